"""What the starting policy, the reference and the critic say of a step's micro-batches, before anything is updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_klear.config.loss import CorrectionConfig
from megatron_klear.losses.corrections import correction_weights
from megatron_klear.losses.sequences import trained
from megatron_klear.losses.terms import token_mean
from megatron_klear.metrics import Metric, merge
from megatron_klear.parallel.broadcast import reduce_metrics
from megatron_klear.training.critic import Critic
from megatron_klear.training.policy import Policy
from megatron_klear.training.reference import Reference
from megatron_klear.types import MicroBatch, TrainBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Annotators:
    """Who annotates. Without a reference or a critic their fields stay zero."""

    policy: Policy
    correction: CorrectionConfig
    reference: Reference | None = None
    critic: Critic | None = None


def annotate(batches: Sequence[TrainBatch], by: Annotators) -> dict[str, float]:
    """Fill `old_`, `reference_`, `policy_weights` and `values` on the micro-batches that `update` will use; metrics."""
    if not batches:
        return {}
    parts: list[dict[str, Metric]] = []
    for batch in batches:
        for micro_batch, stats in _last_stage(batch, by.policy.stats(batch)):
            assert stats.entropy is not None
            micro_batch.old_logprobs, micro_batch.old_entropy = stats.logprobs, stats.entropy
            parts.append(_engine_difference(micro_batch))
            micro_batch.policy_weights, metrics = correction_weights(micro_batch, by.correction)
            if by.correction.type != "none":
                parts.append(metrics)
        if by.critic is not None:
            for micro_batch, values in _last_stage(batch, by.critic.values(batch)):
                micro_batch.values = values
    if by.reference is not None:
        with by.reference.swapped_in(by.policy.stage):
            for batch in batches:
                for micro_batch, stats in _last_stage(batch, by.policy.stats(batch)):
                    micro_batch.reference_logprobs = stats.logprobs
    return reduce_metrics(merge(parts), by.policy.context)


def _last_stage(batch: TrainBatch, results: list[T]) -> list[tuple[MicroBatch, T]]:
    """Micro-batches with their results; nothing where this is not the last stage."""
    return list(zip(batch.micro_batches, results, strict=True)) if results else []


def _engine_difference(micro_batch: MicroBatch) -> dict[str, Metric]:
    difference = (micro_batch.old_logprobs - micro_batch.rollout_logprobs).abs()
    return {"train/train_rollout_logprob_abs_diff": token_mean(difference, trained(micro_batch))}
