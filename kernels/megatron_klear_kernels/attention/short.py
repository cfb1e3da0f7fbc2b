"""Causal attention of packed short sequences in C: float32 on a CPU, heads of a multiple of 16 numbers.

A task is one key/value head of one sequence: its keys lie transposed in the cache while blocks of queries pass. Kept
for the backward are the inputs and each row's log-sum-exp; probabilities are computed again from those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.native.library import call


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which positions are a sequence: `begins` and `lengths` [S] int64 on the host, and whether they are all.

    Nothing checks them against the operands: C reads and writes where they say.
    """

    begins: Tensor
    lengths: Tensor
    cover_all: bool


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> Tensor:
        assert key.shape == value.shape and query.size(0) == key.size(0) and query.size(1) % key.size(1) == 0
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out, logsums = _made_like(query, sequences), query.new_empty(query.shape[:-1])
        call("attention_forward", query, key, value, *_sizes(query, key, sequences), scale, out, logsums)
        ctx.save_for_backward(query, key, value, logsums)
        ctx.sequences, ctx.scale = sequences, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, logsums = ctx.saved_tensors
        made = [_made_like(x, ctx.sequences) for x in (query, key, value)]
        sizes = _sizes(query, key, ctx.sequences)
        call("attention_backward", grads[0].contiguous(), query, key, value, logsums, *sizes, ctx.scale, *made)
        return made[0], made[1], made[2], None, None


def _made_like(x: Tensor, sequences: Sequences) -> Tensor:
    return torch.empty_like(x) if sequences.cover_all else torch.zeros_like(x)


def _sizes(query: Tensor, key: Tensor, sequences: Sequences) -> tuple[Tensor | int, ...]:
    groups = key.size(1)
    begins, lengths = sequences.begins, sequences.lengths
    return begins, lengths, begins.numel(), groups, query.size(1) // groups, query.size(2)


def short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, sequences: Sequences) -> Tensor:
    """q [T, H, D], k and v [T, G, D] of packed sequences -> [T, H, D], zero at positions of no sequence."""
    return _ShortAttention.apply(query, key, value, sequences, scale)
