"""Per-sequence reductions inside a micro-batch. No sequence is split over micro-batches; it may be over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear.types import MicroBatch


def trained(micro_batch: MicroBatch) -> Tensor:
    """[T] bool, positions that count in the policy loss."""
    return micro_batch.token_scale != 0


def sequence_mean(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """[T] at each position the mean of `values` [T] over its sequence's trained positions; 0 if there are none."""
    mask = trained(micro_batch).to(values.dtype)
    num_sequences = micro_batch.cu_seqlens.numel() - 1
    totals = torch.zeros(2, num_sequences, dtype=values.dtype, device=values.device)
    # Masked values may be infinite (an engine's -inf): they must not reach the sum, not even times zero.
    kept = torch.where(mask > 0, values, 0.0)
    totals.index_add_(1, micro_batch.sequence_ids, torch.stack((kept, mask)))
    totals = micro_batch.sum_over_context(totals)
    return (totals[0] / totals[1].clamp(min=1))[micro_batch.sequence_ids]
