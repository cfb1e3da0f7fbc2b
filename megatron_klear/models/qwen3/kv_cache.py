"""Keys and values of running sequences, all of which end at the same column.

A new sequence is placed so that its last token stands beside everyone's last token; from then on a step writes one
column for all rows. Live rows are the first ones, without gaps. So a step reads and writes plain slices: no index, no
copy, and only columns from the start of the longest live row.

The memory is kept close around what is live and made anew when it is full: on a CPU, products over a cache with as many
free columns as live ones take twice the time, while a copy every BLOCK steps is a few percent of reading it each step.

Letters: R rows, G key/value groups, D head_dim, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear_kernels.native.library import LANES

# Free columns after the memory was made anew, at least.
BLOCK = 32
# Added to scores of columns before a row's start. Finite, so that nothing becomes a NaN; far below any score.
HIDDEN = -1e30


class KvCache:
    """`end`: columns before it are filled; `begin`: start of the longest live row; `num_rows`: live rows.

    For each layer `keys` [., G, D, C] (transposed, as the product with queries reads them) and `values` [., G, C, D].
    """

    def __init__(self, shape: Qwen3Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype, self.device = dtype, device
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.begin = self.end = 0
        # `starts` [R] on the host: first column of each row. `positions` [R] on the device: its length.
        self.starts = torch.zeros(0, dtype=torch.int64)
        self.positions = torch.zeros(0, dtype=torch.int64, device=self.device)
        layers = [self._memory(0, 0) for _ in range(self.shape.num_hidden_layers)]
        self.keys, self.values = [keys for keys, _ in layers], [values for _, values in layers]
        self.bias: Tensor | None = None

    def _memory(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer. Zeros: a hidden value counts 0 times, which only makes 0 if it is finite."""
        groups, dim = self.shape.num_key_value_heads, self.shape.head_dim
        keys = torch.zeros(rows, groups, dim, columns, dtype=self.dtype, device=self.device)
        return keys, torch.zeros(rows, groups, columns, dim, dtype=self.dtype, device=self.device)

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self.starts.numel()

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def append(self, lengths: Tensor) -> None:
        """New rows after the live ones, of `lengths` [n] (host) columns before `end`; the caller fills them."""
        rows, longest = self.num_rows + lengths.numel(), int(lengths.max())
        if rows > self.keys[0].size(0) or longest > self.end:
            self._remake(rows, max(longest, self.end - self.begin))
        self._set_rows(torch.cat([self.starts, self.end - lengths]))

    def advance(self) -> None:
        """One more column for every row, which the caller fills."""
        if self.end == self.keys[0].size(3):
            self._remake(self.num_rows, self.end - self.begin)
            self._set_rows(self.starts)
        self.end += 1
        self.positions += 1

    def take(self, order: Tensor) -> None:
        """Row i becomes what row order[i] was, the other rows are gone. `order` [n] (host), no longer than the rows."""
        moved = torch.nonzero(order != torch.arange(order.numel()))[:, 0]
        if moved.numel():
            self._copy(order[moved].to(self.device), moved.to(self.device))
        self._set_rows(self.starts[order])

    def repeat(self, sources: Tensor, first: int) -> None:
        """Give rows from `first` on what the rows `sources` [n] (host) hold."""
        targets = torch.arange(first, first + sources.numel(), device=self.device)
        self._copy(sources.to(self.device), targets)

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        live = slice(self.begin, self.end)
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[targets, :, :, live] = keys[sources, :, :, live]
            values[targets, :, live] = values[sources, :, live]

    def _remake(self, rows: int, end: int) -> None:
        """Memory for `rows` rows, the live columns ending at `end`. Layer by layer, so that little is held twice."""
        num, old = self.num_rows, slice(self.begin, self.end)
        new = slice(end - (self.end - self.begin), end)
        for i, (old_keys, old_values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys, values = self._memory(rows, -(-(end + BLOCK) // LANES) * LANES)
            keys[:num, ..., new], values[:num, :, new] = old_keys[:num, ..., old], old_values[:num, :, old]
            self.keys[i], self.values[i] = keys, values
        self.starts, self.end = self.starts + (end - self.end), end

    def _set_rows(self, starts: Tensor) -> None:
        self.starts = starts
        self.begin = int(starts.min()) if starts.numel() else self.end
        there = starts.to(self.device)
        self.positions, self.bias = self.end - there, None
        if (starts != self.begin).any():
            hidden = torch.arange(self.keys[0].size(3), device=self.device) < there[:, None]
            bias = (hidden * HIDDEN).to(self.dtype)[:, None, None]
            self.bias = bias.expand(-1, self.shape.num_key_value_heads, -1, -1).flatten(0, 1)
