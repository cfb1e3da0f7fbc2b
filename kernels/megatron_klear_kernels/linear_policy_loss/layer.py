"""An output layer at work on rows: operands, chunks, and the passes over them. No autograd here.

Memory beside the results: one chunk of logits (`chunk_bytes`), that chunk's hidden states and their gradient, and 16
bytes a row and rank of statistics. Nothing grows with T x V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.paths import (
    ChunkPath,
    PathChoice,
    PathName,
    Shard,
    build_path,
    bytes_per_logit,
    choose_path,
    multiply_,
)
from megatron_klear_kernels.linear_policy_loss.products import (
    WeightGradient,
    fast_products,
    hidden_gradient,
    operand,
)
from megatron_klear_kernels.linear_policy_loss.rows import (
    CPU_ROW_MULTIPLE,
    GPU_ROW_MULTIPLE,
    RowChunk,
    RowPlan,
    padded,
)
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution, Vocabulary, over_ranks

MIB = 1024 * 1024
# On a CPU larger chunks gain nothing. On a GPU each chunk reads and writes the whole float32 weight gradient, which
# with 4,096 rows of Qwen3's vocabulary on one rank is small beside the products.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 48 * MIB, 2400 * MIB


@dataclass(frozen=True, slots=True)
class LinearSettings:
    """How an output layer works. Logits are divided by `temperature`; `chunk_bytes` None: as the device likes it.

    `sum_hidden_gradient`: the gradient of the hidden states is summed over the vocabulary's ranks here, in float32;
    otherwise each rank returns its part and the caller sums.
    """

    vocab: Vocabulary
    temperature: float = 1.0
    path: PathName = "auto"
    chunk_bytes: int | None = None
    sum_hidden_gradient: bool = False


@dataclass(frozen=True, slots=True)
class RowGradients:
    """d loss / d log-prob and d loss / d entropy of some rows [C], float32; None: the entropy has no gradient."""

    d_logprob: Tensor
    d_entropy: Tensor | None


GradientsOf = Callable[[RowChunk, Distribution], RowGradients]


@dataclass(frozen=True, slots=True)
class Sinks:
    """Where gradients go: [T, H] in the hidden states' type, zeros before; and the weight's. None: not wanted."""

    hidden: Tensor | None
    weight: WeightGradient | None

    @property
    def wanted(self) -> bool:
        """Whether anybody asks for a gradient."""
        return self.hidden is not None or self.weight is not None

    def multiply(self, factor: Tensor) -> None:
        """Multiply what was collected by a number of the device."""
        if self.hidden is not None:
            multiply_(self.hidden, factor)
        if self.weight is not None and self.weight.own is not None:
            multiply_(self.weight.own, factor)


@dataclass(frozen=True, slots=True)
class _Loaded:
    chunk: RowChunk
    hidden: Tensor  # [C', H] operand, zeros beyond C
    targets: Tensor  # [C]


@dataclass(slots=True)
class OutputLayer:
    """hidden [T, H], weight [V/tp, H] and targets [T] of one call, with the rows of `plan`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    plan: RowPlan
    settings: LinearSettings
    choice: PathChoice = field(init=False)

    def __post_init__(self) -> None:
        _check(self.hidden, self.weight, self.targets)
        self.choice = choose_path(self.settings.path, self.hidden.device)

    def distribution(self) -> Distribution:
        """Statistics [R] of the plan's rows, in its order."""
        return self.one_pass(None, Sinks(None, None))

    def one_pass(self, gradients_of: GradientsOf | None, sinks: Sinks) -> Distribution:
        """Statistics [R] of the plan's rows, and gradients of those that may have one while their logits are there."""
        found = torch.empty(4, self.plan.index.numel(), device=self.hidden.device)
        with fast_products(self.hidden.dtype, self.hidden.device):
            path, weight = self._start()
            for loaded in self._chunks():
                chunk = loaded.chunk
                own = path.statistics(loaded.hidden, loaded.targets)
                rows = over_ranks(own, self.settings.vocab.group)
                found[:, chunk.start : chunk.stop] = rows.stacked
                if gradients_of is not None and chunk.has_gradient:
                    self._backward(path, weight, loaded, rows, gradients_of(chunk, rows), sinks)
        return Distribution(*found.unbind())

    def backward(self, known: Distribution, gradients_of: GradientsOf, sinks: Sinks) -> None:
        """Gradients of the rows whose statistics are known: their logits are made again."""
        with fast_products(self.hidden.dtype, self.hidden.device):
            (path, weight), rows_known = self._start(), known.stacked
            for loaded in self._chunks():
                chunk = loaded.chunk
                if not chunk.has_gradient:
                    continue
                path.reload(loaded.hidden, loaded.targets)
                rows = Distribution(*rows_known[:, chunk.start : chunk.stop].unbind())
                self._backward(path, weight, loaded, rows, gradients_of(chunk, rows), sinks)

    @property
    def _row_multiple(self) -> int:
        return GPU_ROW_MULTIPLE if self.hidden.device.type == "cuda" else CPU_ROW_MULTIPLE

    @property
    def _most_rows(self) -> int:
        """Rows of the largest chunk, padding included."""
        chunk_bytes = self.settings.chunk_bytes
        if chunk_bytes is None:
            chunk_bytes = GPU_CHUNK_BYTES if self.hidden.device.type == "cuda" else CPU_CHUNK_BYTES
        row_bytes = bytes_per_logit(self.choice, self.hidden.dtype) * max(1, self.weight.size(0))
        multiple = self._row_multiple
        return max(chunk_bytes // row_bytes // multiple, 1) * multiple

    def _start(self) -> tuple[ChunkPath, Tensor]:
        vocab, weight = self.settings.vocab, operand(self.weight.detach())
        shard = Shard.of(vocab, weight.size(0), self.settings.temperature)
        most_rows = min(self._most_rows, padded(self.plan.index.numel(), self._row_multiple))
        return build_path(self.choice, weight, shard, most_rows), weight

    def _chunks(self) -> Iterator[_Loaded]:
        for chunk in self.plan.chunks(self._most_rows, self._row_multiple):
            num = chunk.index.numel()
            rows = operand(self.hidden.detach().index_select(0, chunk.index))
            missing = padded(num, self._row_multiple) - num
            if missing:
                rows = torch.cat((rows, rows.new_zeros(missing, rows.size(1))))
            yield _Loaded(chunk, rows, self.targets.index_select(0, chunk.index))

    def _backward(
        self,
        path: ChunkPath,
        weight: Tensor,
        loaded: _Loaded,
        rows: Distribution,
        given: RowGradients,
        sinks: Sinks,
    ) -> None:
        d_logits = path.gradient(loaded.targets, rows, given.d_logprob, given.d_entropy)
        if sinks.weight is not None:
            sinks.weight.add(d_logits, loaded.hidden)
        if sinks.hidden is not None:
            vocab, summed = self.settings.vocab, self.settings.sum_hidden_gradient
            part = hidden_gradient(d_logits, weight, in_float32=summed)[: loaded.targets.numel()]
            if summed and vocab.group is not None and vocab.group.size() > 1:
                dist.all_reduce(part, group=vocab.group)
            sinks.hidden.index_copy_(0, loaded.chunk.index, part.to(sinks.hidden.dtype))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() != 2 or hidden.size(-1) != weight.size(-1):
        raise ValueError(
            f"hidden states are {list(hidden.shape)} but the output weight is {list(weight.shape)}: expected [T, H] and"
            " [V/tp, H] of one width H; hand over hidden states, not logits"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected one target for each of {hidden.size(0)} rows, got targets {list(targets.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states are {hidden.dtype} but the output weight is {weight.dtype}; convert one of them"
        )
