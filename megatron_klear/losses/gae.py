"""Generalised advantage estimation and the critic's loss.

    delta_t = reward_t + gamma V_{t+1} - V_t          V after the last token is 0
    A_t     = delta_t + gamma lam A_{t+1}             (arXiv 1506.02438 Eq. 16; Klear-Reasoner Eq. 2)
    return_t = A_t + V_t
Value loss, clipped (arXiv 1707.06347 section 5 in the form of its reference code): with old values V0,
    L = sum_t w_t max((V - R)^2, (clip(V, V0 - c, V0 + c) - R)^2) / 2
Position t is an action: the prediction of labels[t]. The trained positions of a sequence are its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.losses.sequences import trained
from megatron_klear.losses.terms import token_mean
from megatron_klear.types import LossOutput, MicroBatch


@dataclass(frozen=True, slots=True)
class Estimates:
    """Advantages and returns [T]; zero where nothing is trained."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(values: Tensor, rewards: Tensor, micro_batch: MicroBatch, *, gamma: float, lam: float) -> Estimates:
    """Estimates of packed sequences from `values` [T] and per-token `rewards` [T].

    The recursion runs backwards over positions, all sequences of the micro-batch at once; a position that is not
    trained leaves the running estimate as it is.
    """
    mask = trained(micro_batch)
    dense = _to_dense(torch.stack((values, rewards, mask.to(values.dtype))), micro_batch)
    value_rows, reward_rows, mask_rows = dense
    running = values.new_zeros(value_rows.size(0))
    next_value = values.new_zeros(value_rows.size(0))
    columns = []
    for position in range(value_rows.size(1) - 1, -1, -1):
        value, active = value_rows[:, position], mask_rows[:, position] > 0
        delta = reward_rows[:, position] + gamma * next_value - value
        running = torch.where(active, delta + gamma * lam * running, running)
        next_value = torch.where(active, value, next_value)
        columns.append(torch.where(active, running, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)[micro_batch.sequence_ids, micro_batch.positions]
    return Estimates(advantages, torch.where(mask, advantages + values, 0.0))


def _to_dense(rows: Tensor, micro_batch: MicroBatch) -> Tensor:
    """[n, T] packed -> [n, S, L] by sequence."""
    num_sequences = micro_batch.cu_seqlens.numel() - 1
    dense = rows.new_zeros(rows.size(0), num_sequences, micro_batch.max_seqlen)
    dense[:, micro_batch.sequence_ids, micro_batch.positions] = rows
    return dense


def terminal_rewards(micro_batch: MicroBatch) -> Tensor:
    """[T] the sample's reward at its last trained position, 0 elsewhere."""
    mask = trained(micro_batch)
    num_sequences = micro_batch.cu_seqlens.numel() - 1
    last = torch.full((num_sequences,), -1, dtype=torch.int64, device=mask.device)
    positions = torch.arange(mask.numel(), device=mask.device).masked_fill(~mask, -1)
    last.scatter_reduce_(0, micro_batch.sequence_ids, positions, reduce="amax")
    rewards = torch.zeros(mask.numel(), device=mask.device)
    has = last >= 0
    rewards[last[has]] = micro_batch.rewards[has]
    return rewards


class ValueLoss:
    """The critic's loss over `values` [T]; `value_clip` None does not clip."""

    def __init__(self, value_clip: float | None) -> None:
        self.value_clip = value_clip

    def __call__(self, values: Tensor, micro_batch: MicroBatch) -> LossOutput:
        """Summed loss; `micro_batch.values` are those before the step, `returns` its targets."""
        error = (values - micro_batch.returns).square()
        clipped = torch.zeros_like(error, dtype=torch.bool)
        if self.value_clip is not None:
            old = micro_batch.values
            bounded = torch.maximum(torch.minimum(values, old + self.value_clip), old - self.value_clip)
            bounded_error = (bounded - micro_batch.returns).square()
            clipped = bounded_error > error
            error = torch.maximum(error, bounded_error)
        loss = (micro_batch.token_scale * error).sum() / 2
        mask = trained(micro_batch)
        return LossOutput(
            loss,
            {
                "critic/value_mean": token_mean(values, mask),
                "critic/return_mean": token_mean(micro_batch.returns, mask),
                "critic/clip_fraction": token_mean(clipped, mask),
            },
        )
