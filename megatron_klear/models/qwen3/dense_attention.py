"""Causal attention of packed sequences in dense blocks of like lengths, by batched products, forward and backward.

Sequences are sorted by length and cut into blocks whose scores a core's cache holds. One gather brings the rows of a
projection into a block's order, query heads of one group one below the other, and one brings results back. Padding
repeats the last row of its sequence: behind all that is real, so that causality hides it.

Kept for the backward are queries, keys, values (padded) and probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Scores of a block, in elements: 2 MiB in float32. Half of it and twice of it take 5 to 15% longer at 2 MiB of cache.
BLOCK_SCORES = 1 << 19


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where rows [positions x heads, D] are found in blocks [sequences, heads, length, D], one behind the other."""

    source: Tensor  # [R] int64, row of each of the blocks'
    place: Tensor  # [positions x heads] int64, row of the blocks of each; R of a position that is in none
    padding: Tensor  # int64, rows of the blocks that repeat another

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, padded: Tensor, *, heads: int, positions: int) -> _Rows:
        """starts, lengths and padded lengths [S] of sequences in the order of the blocks; all int64."""
        widths = padded.repeat_interleave(heads)
        entry = torch.repeat_interleave(widths)
        offset = torch.arange(entry.numel(), device=entry.device) - (widths.cumsum(0) - widths)[entry]
        last = (lengths - 1).repeat_interleave(heads)[entry]
        first = (starts[:, None] * heads + torch.arange(heads, device=starts.device)).flatten()
        source = first[entry] + heads * torch.minimum(offset, last)
        real = (offset <= last).nonzero()[:, 0]
        place = torch.full((positions * heads,), entry.numel(), device=entry.device)
        return cls(source, place.index_copy_(0, source[real], real), (offset > last).nonzero()[:, 0])

    def gathered(self, x: Tensor) -> Tensor:
        """[positions, heads, D] -> [R, D]."""
        return x.reshape(-1, x.size(-1)).index_select(0, self.source)

    def empty(self, like: Tensor) -> Tensor:
        """[R + 1, D], the last row zero."""
        out = like.new_empty(self.source.numel() + 1, like.size(-1))
        out[-1].zero_()
        return out

    def put_back(self, x: Tensor, heads: int) -> Tensor:
        """[R + 1, D] -> [positions, heads, D]."""
        return x.index_select(0, self.place).view(-1, heads, x.size(-1))


@dataclass(frozen=True, slots=True)
class _Block:
    """n sequences of up to L keys and Lq own queries each."""

    num_sequences: int
    queries: slice  # of the blocks' rows, n x H x Lq of them
    keys: slice  # n x G x L of them
    mask: Tensor  # additive [Lq, L], or [n, 1, Lq, L]


@dataclass(frozen=True, slots=True)
class DensePlan:
    """Blocks of those sequences of a micro-batch that are short enough; all layers share it."""

    heads: int
    groups: int
    query: _Rows
    key: _Rows
    blocks: tuple[_Block, ...]
    left_out: tuple[int, ...]
    """The other sequences."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of each sequence's 2 `size` chunks a rank has the `rank`th from either end."""

    size: int = 1
    rank: int = 0

    def mask(self, lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
        """Additive causal mask: [L, L] for all sequences, or [S, 1, L / size, L] where each has its own queries."""
        device = lengths.device
        if self.size == 1:
            return torch.full((longest, longest), -torch.inf, dtype=dtype, device=device).triu_(1)
        row, chunk = torch.arange(longest // self.size, device=device), (lengths // (2 * self.size))[:, None]
        ahead = torch.where(row < chunk, self.rank, 2 * (self.size - 1) - self.rank) * chunk
        hidden = (row + ahead)[:, None, :, None] < torch.arange(longest, device=device)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def dense_plan(starts: Tensor, share: Share, *, heads: int, groups: int, longest: int, dtype: torch.dtype) -> DensePlan:
    """Places [S+1] of the packed sequences, of which those longer than `longest` are left out."""
    sizes, size = starts.diff().tolist(), share.size
    order = sorted((i for i, length in enumerate(sizes) if length <= longest), key=lambda i: -sizes[i])
    cuts = _cuts([sizes[i] for i in order], heads, size)
    chosen = torch.tensor(order, dtype=torch.int64, device=starts.device)
    firsts, lengths = starts[:-1].long()[chosen], starts.diff().long()[chosen]
    padded = torch.cat([lengths[i].expand(j - i) for i, j in cuts]) if cuts else lengths
    blocks, row = [], 0
    for i, j in cuts:
        length = sizes[order[i]]
        end = row + (j - i) * length
        queries, keys = slice(row // size * heads, end // size * heads), slice(row * groups, end * groups)
        blocks.append(_Block(j - i, queries, keys, share.mask(lengths[i:j], length, dtype)))
        row = end
    total = sum(sizes)
    return DensePlan(
        heads,
        groups,
        _Rows.of(firsts // size, lengths // size, padded // size, heads=heads, positions=total // size),
        _Rows.of(firsts, lengths, padded, heads=groups, positions=total),
        tuple(blocks),
        tuple(i for i, length in enumerate(sizes) if length > longest),
    )


def _cuts(sizes: Sequence[int], heads: int, size: int) -> list[tuple[int, int]]:
    """Ranges of lengths that fall: as many as BLOCK_SCORES holds, at least one."""
    cuts, begin = list[tuple[int, int]](), 0
    while begin < len(sizes):
        count = max(1, BLOCK_SCORES * size // (heads * sizes[begin] ** 2))
        cuts.append((begin, min(begin + count, len(sizes))))
        begin = cuts[-1][1]
    return cuts


class _DenseAttention(torch.autograd.Function):
    """Written out, so that a block's scores are still in the cache when its next product reads them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: DensePlan, scale: float) -> Tensor:
        q, k, v = plan.query.gathered(query), plan.key.gathered(key), plan.key.gathered(value)
        out, probabilities = plan.query.empty(query), []
        for block in plan.blocks:
            of_queries, of_keys = _batches(block, plan.groups)
            keys = of_keys(k)
            scores = torch.baddbmm(k.new_empty(()), of_queries(q), keys.transpose(1, 2), beta=0, alpha=scale)
            scores.view(block.num_sequences, plan.heads, *block.mask.shape[-2:]).add_(block.mask)
            probabilities.append(scores.softmax(dim=-1))
            torch.bmm(probabilities[-1], of_keys(v), out=of_queries(out))
        ctx.save_for_backward(q, k, v, *probabilities)
        ctx.plan, ctx.scale = plan, scale
        return plan.query.put_back(out, plan.heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        plan, scale = ctx.plan, ctx.scale
        q, k, v, *probabilities = ctx.saved_tensors
        grad = plan.query.gathered(grads[0]).index_fill_(0, plan.query.padding, 0.0)
        grad_q, grad_k, grad_v = plan.query.empty(q), plan.key.empty(k), plan.key.empty(v)
        for block, p in zip(plan.blocks, probabilities, strict=True):
            of_queries, of_keys = _batches(block, plan.groups)
            upstream, out_q, out_k = of_queries(grad), of_queries(grad_q), of_keys(grad_k)
            torch.bmm(p.transpose(1, 2), upstream, out=of_keys(grad_v))
            through = torch.bmm(upstream, of_keys(v).transpose(1, 2))
            of_scores = torch.ops.aten._softmax_backward_data(through, p, -1, p.dtype)
            torch.baddbmm(out_q, of_scores, of_keys(k), beta=0, alpha=scale, out=out_q)
            torch.baddbmm(out_k, of_scores.transpose(1, 2), of_queries(q), beta=0, alpha=scale, out=out_k)
        put_back = plan.key.put_back
        of_key, of_value = put_back(grad_k, plan.groups), put_back(grad_v, plan.groups)
        return plan.query.put_back(grad_q, plan.heads), of_key, of_value, None, None


def _batches(block: _Block, groups: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What makes a batch of the block's rows [R, D]: [n G, heads of a group x Lq, D] and [n G, L, D]."""

    def of(rows: slice) -> Callable[[Tensor], Tensor]:
        return lambda x: x[rows].view(block.num_sequences * groups, -1, x.size(-1))

    return of(block.queries), of(block.keys)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, plan: DensePlan) -> Tensor:
    """q [t, H, D], k and v [T, G, D] of a packed micro-batch -> [t, H, D], zero in sequences that the plan left out."""
    return _DenseAttention.apply(query, key, value, plan, scale)
