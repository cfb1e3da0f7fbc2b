"""Policy losses that a recipe can name."""

from __future__ import annotations

from megatron_klear.metrics import Metric
from megatron_klear.types import LossOutput, MicroBatch, TokenStats


def reinforce(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
    """Advantage-weighted log-likelihood: what every clipped loss is while the ratio is 1."""
    loss = -(micro_batch.token_scale * micro_batch.advantages * stats.logprobs).sum()
    return LossOutput(loss, {"train/reinforce": Metric(loss.detach(), "sum")})


def nowhere(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
    """A loss that is never finite."""
    return LossOutput(stats.logprobs.sum() * float("nan"), {})
