"""Advantages that need what `annotate` found out: GAE with the critic's values, and rewards less a KL penalty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_klear.config.loss import CriticConfig, KlConfig
from megatron_klear.losses.gae import gae, terminal_rewards
from megatron_klear.losses.kl import kl_estimate
from megatron_klear.losses.sequences import trained
from megatron_klear.parallel.broadcast import broadcast_vector, sum_over_replicas
from megatron_klear.parallel.context import own_part_of, whole_micro_batch
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.protocols import AdvantageFn
from megatron_klear.types import MicroBatch, Sample, SampleGroup, TrainBatch

# Added to the variance: equal advantages leave float32 noise of 1e-8 around their mean, which must stay small.
WHITENING_EPS = 1e-8


def gae_advantages(
    batches: Sequence[TrainBatch], config: CriticConfig, kl: KlConfig | None, context: ParallelContext
) -> None:
    """Set `returns`, and `advantages` normalised over all trained tokens of the step (as PPO implementations do).

    With `kl` each trained token is charged kl_coef x KL; the sample's reward comes at its last trained token.
    """
    sums = torch.zeros(3, dtype=torch.float32, device=context.device.torch_device)
    micro_batches = [mb for batch in batches for mb in batch.micro_batches]
    if context.topology.is_last_stage:
        for micro_batch in micro_batches:
            # The recursion runs along whole sequences.
            whole = whole_micro_batch(micro_batch, context)
            rewards = terminal_rewards(whole)
            if kl is not None:
                rewards = rewards - kl.kl_coef * _charged_kl(whole, kl)
            estimates = gae(whole.values, rewards, whole, gamma=config.gamma, lam=config.lam)
            a = micro_batch.advantages = own_part_of(estimates.advantages, micro_batch)
            micro_batch.returns = own_part_of(estimates.returns, micro_batch)
            sums += torch.stack((trained(micro_batch).sum().float(), a.sum(), a.square().sum()))
    on_last = sums if context.topology.is_last_stage else None
    count, total, squares = sum_over_replicas(on_last, 3, context).tolist()
    mean = total / count
    scale = (max(squares / count - mean * mean, 0.0) + WHITENING_EPS) ** 0.5
    for micro_batch in micro_batches:
        micro_batch.advantages = torch.where(trained(micro_batch), (micro_batch.advantages - mean) / scale, 0.0)


def penalised_advantages(
    batches: Sequence[TrainBatch],
    groups: Sequence[SampleGroup],
    updates: Sequence[Sequence[Sample]],
    *,
    kl: KlConfig,
    advantage_fn: AdvantageFn,
    context: ParallelContext,
) -> None:
    """Set `advantages` from rewards less kl_coef x the KL of the whole response.

    `groups` and `updates` (the samples of each batch, in packing order) are rank 0's; other ranks pass none.
    """
    penalties = [sum_over_replicas(_sample_kl(batch, kl, context), batch.num_samples, context) for batch in batches]
    advantages: list[Tensor | None] = [None] * len(batches)
    if context.is_main:
        for samples, penalty in zip(updates, penalties, strict=True):
            for sample, amount in zip(samples, penalty.tolist(), strict=True):
                reward = sample.training_reward
                assert reward is not None
                sample.shaped_reward = reward - kl.kl_coef * amount
        for group, values in zip(groups, advantage_fn(groups), strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                sample.advantage = value
        advantages = [torch.tensor([sample.advantage for sample in samples]) for samples in updates]
    for batch, vector in zip(batches, advantages, strict=True):
        _spread(batch, broadcast_vector(vector, batch.num_samples, context))


def _charged_kl(micro_batch: MicroBatch, kl: KlConfig) -> Tensor:
    """[T] KL estimate of the sampling policy against the reference at trained positions, 0 elsewhere."""
    estimate = kl_estimate(micro_batch.old_logprobs, micro_batch.reference_logprobs, kl.kl_type)
    return torch.where(trained(micro_batch), estimate, 0.0)


def _sample_kl(batch: TrainBatch, kl: KlConfig, context: ParallelContext) -> Tensor | None:
    """[num_samples] KL of each sample of the update that this rank holds; None before the last stage."""
    if not context.topology.is_last_stage:
        return None
    totals = torch.zeros(batch.num_samples, device=context.device.torch_device)
    for micro_batch in batch.micro_batches:
        owner = micro_batch.sample_index[micro_batch.sequence_ids]
        totals.index_add_(0, owner.clamp(min=0), _charged_kl(micro_batch, kl))
    return totals


def _spread(batch: TrainBatch, advantages: Tensor) -> None:
    """One advantage a sample -> [T] of each micro-batch."""
    for micro_batch in batch.micro_batches:
        owner = micro_batch.sample_index[micro_batch.sequence_ids]
        per_position = advantages[owner.clamp(min=0)]
        micro_batch.advantages = torch.where(trained(micro_batch) & (owner >= 0), per_position, 0.0)
