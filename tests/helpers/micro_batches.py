"""Micro-batches made by hand: what a test says nothing about is zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_klear.types import MicroBatch


def micro_batch_of_lengths(lengths: Sequence[int], *, token_ids: Tensor | None = None) -> MicroBatch:
    """Sequences of these lengths, one after the other, without a loss."""
    sizes = torch.tensor(lengths)
    total = int(sizes.sum())
    zeros = torch.zeros(total)
    starts = sizes.cumsum(0) - sizes
    return MicroBatch(
        token_ids=torch.zeros(total, dtype=torch.int64) if token_ids is None else token_ids,
        labels=torch.zeros(total, dtype=torch.int64),
        positions=torch.arange(total) - starts.repeat_interleave(sizes),
        cu_seqlens=torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32),
        true_lengths=sizes.to(torch.int32),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(sizes),
        max_seqlen=max(lengths),
        token_scale=zeros,
        nll_scale=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        sample_index=torch.arange(len(lengths)),
        rewards=torch.zeros(len(lengths)),
    )


def loss_micro_batch(
    *,
    token_scale: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    nll_scale: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> MicroBatch:
    """Sequences (one if no lengths are given) with these loss rows [T], kept in the dtype they come in."""
    batch = micro_batch_of_lengths([token_scale.numel()] if lengths is None else lengths)
    batch.token_scale, batch.advantages, batch.old_logprobs = token_scale, advantages, old_logprobs
    batch.nll_scale = torch.zeros_like(token_scale) if nll_scale is None else nll_scale
    return batch
