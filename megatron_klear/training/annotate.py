"""What the starting policy, the reference and the critic say of a step's micro-batches, before anything is updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from megatron_klear.config.loss import CorrectionConfig
from megatron_klear.losses.corrections import correction_weights
from megatron_klear.losses.terms import engine_difference
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
    old_logprobs: Literal["recompute", "rollout", "current"] = "recompute"
    reference: Reference | None = None
    critic: Critic | None = None


def annotate(batches: Sequence[TrainBatch], by: Annotators) -> dict[str, float]:
    """Fill `old_`, `reference_`, `policy_weights` and `values` on the micro-batches that `update` will use; metrics."""
    if not batches:
        return {}
    parts: list[dict[str, Metric]] = []
    for batch in batches:
        if by.old_logprobs == "recompute":
            parts += _take_old_logprobs(batch, by.policy, by.correction)
        elif by.old_logprobs == "rollout":
            for micro_batch in batch.micro_batches:
                micro_batch.old_logprobs = micro_batch.rollout_logprobs
        if by.critic is not None:
            for micro_batch, values in last_stage(batch, by.critic.values(batch)):
                micro_batch.values = values
    if by.reference is not None:
        with by.reference.swapped_in(by.policy.stage):
            for batch in batches:
                for micro_batch, stats in last_stage(batch, by.policy.stats(batch)):
                    micro_batch.reference_logprobs = stats.logprobs
    return reduce_metrics(merge(parts), by.policy.context)


def _take_old_logprobs(batch: TrainBatch, policy: Policy, correction: CorrectionConfig) -> list[dict[str, Metric]]:
    parts: list[dict[str, Metric]] = []
    for micro_batch, stats in last_stage(batch, policy.stats(batch)):
        assert stats.entropy is not None
        micro_batch.old_logprobs, micro_batch.old_entropy = stats.logprobs, stats.entropy
        parts.append(engine_difference(micro_batch.old_logprobs, micro_batch))
        micro_batch.policy_weights, metrics = correction_weights(micro_batch, correction)
        if correction.type != "none":
            parts.append(metrics)
    return parts


def last_stage(batch: TrainBatch, results: list[T]) -> list[tuple[MicroBatch, T]]:
    """Micro-batches with their results; nothing where this is not the last stage."""
    return list(zip(batch.micro_batches, results, strict=True)) if results else []
