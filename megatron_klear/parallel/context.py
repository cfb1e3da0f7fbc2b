"""Context parallelism: which positions of a packed micro-batch a rank holds, and sums and rows across the ranks.

Each sequence is padded to a multiple of 2 x cp and cut into 2 x cp chunks; rank r holds chunks r and 2 cp - 1 - r of
every sequence (Transformer Engine's layout): under causal attention all ranks then have the same work. Positions keep
the order of the packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.types import MicroBatch, TrainBatch

# Fields with an entry a position. What `annotate` fills in later is per position too.
PER_POSITION = (
    "token_ids",
    "labels",
    "positions",
    "sequence_ids",
    "token_scale",
    "nll_scale",
    "advantages",
    "rollout_logprobs",
)
ANNOTATED = ("old_logprobs", "old_entropy", "reference_logprobs", "policy_weights", "values", "returns")


def context_rows(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """[T/cp] int64 rows of the packed micro-batch that a rank holds; `cu_seqlens` [S+1] are the padded starts."""
    starts = cu_seqlens.to(torch.int64)
    lengths = starts.diff()
    chunk = lengths // (2 * size)
    own = torch.arange(int(starts[-1]) // size, device=cu_seqlens.device)
    # Rows of one sequence are 2 chunks; which sequence an own row is of follows from the same starts, divided.
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=cu_seqlens.device), 2 * chunk)
    inside = own - (starts // size)[sequence]
    c = chunk[sequence]
    first = inside < c
    offset = torch.where(first, rank * c + inside, (2 * size - 1 - rank) * c + inside - c)
    return starts[sequence] + offset


def split_batch(batch: TrainBatch, context: ParallelContext) -> TrainBatch:
    """A replica's batch -> what this rank holds of it."""
    if context.topology.context_size == 1:
        return batch
    own = [_own_part(micro_batch, context) for micro_batch in batch.micro_batches]
    return replace(batch, micro_batches=own)


def _own_part(micro_batch: MicroBatch, context: ParallelContext) -> MicroBatch:
    topology, group = context.topology, context.groups.context
    rows = context_rows(micro_batch.cu_seqlens, topology.context_rank, topology.context_size)
    part = MicroBatch(**_given(micro_batch) | {name: attrgetter(name)(micro_batch)[rows] for name in PER_POSITION})
    part.own_rows = rows
    part.sum_over_context = lambda totals: SumOverRanks.apply(totals, group)
    return part


def _given(micro_batch: MicroBatch) -> dict[str, Any]:
    """What a micro-batch was made of, by name."""
    return {f.name: attrgetter(f.name)(micro_batch) for f in fields(MicroBatch) if f.init}


class SumOverRanks(torch.autograd.Function):
    """Sum over a group. Every rank's loss depends on the sum, so the backward sums the ranks' gradients too."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102  autograd's
        ctx.group = group  # type: ignore[attr-defined]
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)  # type: ignore[attr-defined]
        return total, None


class GatherRows(torch.autograd.Function):
    """[t, ...] of each rank -> [n x t, ...] in rank order on all; the backward gives each rank the sum of its part."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102  autograd's
        ctx.group = group  # type: ignore[attr-defined]
        out = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        grad = grads[0].contiguous()
        own = grad.new_empty(grad.size(0) // group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad, group=group)
        return own, None


def gather_order(cu_seqlens: Tensor, size: int) -> Tensor:
    """[T] int64: where row i of the packed micro-batch lies in what `GatherRows` of `size` ranks gives."""
    rows = torch.cat([context_rows(cu_seqlens, rank, size) for rank in range(size)])
    return torch.empty_like(rows).index_copy_(0, rows, torch.arange(rows.numel(), device=rows.device))


def whole_rows(own: Tensor, micro_batch: MicroBatch, context: ParallelContext) -> Tensor:
    """[T/cp, ...] of this rank -> [T, ...] of the packed micro-batch, on every rank. No gradient."""
    size = context.topology.context_size
    if size == 1:
        return own
    gathered = GatherRows.apply(own.detach(), context.groups.context)
    return gathered.index_select(0, gather_order(micro_batch.cu_seqlens, size))


def whole_micro_batch(micro_batch: MicroBatch, context: ParallelContext) -> MicroBatch:
    """The packed micro-batch that this rank holds a part of, annotations included. A collective."""
    if micro_batch.own_rows is None:
        return micro_batch

    def whole(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: whole_rows(attrgetter(name)(micro_batch), micro_batch, context) for name in names}

    given: dict[str, Any] = _given(micro_batch) | whole(PER_POSITION)
    result = MicroBatch(**given)
    for name, tensor in whole(ANNOTATED).items():
        setattr(result, name, tensor)
    return result


def own_part_of(rows: Tensor, micro_batch: MicroBatch) -> Tensor:
    """[T, ...] of the packed micro-batch -> [T/cp, ...] of this rank."""
    return rows if micro_batch.own_rows is None else rows.index_select(0, micro_batch.own_rows)
