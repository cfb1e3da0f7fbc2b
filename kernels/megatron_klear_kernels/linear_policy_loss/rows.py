"""Which rows meet the output layer, and in what order.

Rows without any scale are left out before the first product. Rows that have a loss but no gradient (the tokens of a
group whose samples all got the same reward have advantage 0) come last: they meet the first product, which the metrics
need, and not the other two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Below a dozen rows or so a CPU's matrix product takes another way and sums in another order; on a GPU the kernel is
# chosen by the number of rows too. With a multiple of this a row has the same bits whatever shares its chunk.
CPU_ROW_MULTIPLE, GPU_ROW_MULTIPLE = 16, 128


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows [R] int64 on the device of the hidden states; the first `num_gradient` of them may have a gradient.

    `num_gradient` is a number of the host: nothing waits for the device.
    """

    index: Tensor
    num_gradient: int

    @classmethod
    def every_row(cls, num_rows: int, device: torch.device) -> RowPlan:
        """All rows, all with a gradient."""
        return cls(torch.arange(num_rows, device=device), num_rows)

    def chunks(self, most_rows: int, multiple: int) -> Iterator[RowChunk]:
        """Parts of at most `most_rows` rows and as equal as can be; each is all with a gradient, or all without."""
        total = self.index.numel()
        for begin, end, has_gradient in ((0, self.num_gradient, True), (self.num_gradient, total, False)):
            if begin == end:
                continue
            parts = -(-(end - begin) // most_rows)
            size = padded(-(-(end - begin) // parts), multiple)
            for start in range(begin, end, size):
                stop = min(start + size, end)
                yield RowChunk(self.index[start:stop], start, stop, has_gradient)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows `start` to `stop` of a plan."""

    index: Tensor
    start: int
    stop: int
    has_gradient: bool


def padded(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def plan_rows(
    token_scale: Tensor, nll_scale: Tensor, advantages: Tensor, *, every_loss_row_has_gradient: bool
) -> RowPlan:
    """The plan of tokens [T] whose scales and advantages are here, on the host (tensors on the CPU).

    `every_loss_row_has_gradient`: there is a KL penalty or an entropy bonus, or advantages are not final.
    """
    has_loss = (token_scale != 0) | (nll_scale != 0)
    has_gradient = has_loss
    if not every_loss_row_has_gradient:
        has_gradient = (nll_scale != 0) | ((token_scale != 0) & (advantages != 0))
    first, last = has_gradient.nonzero()[:, 0], (has_loss & ~has_gradient).nonzero()[:, 0]
    return RowPlan(torch.cat((first, last)), first.numel())
