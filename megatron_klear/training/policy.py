"""The policy that is trained. Knows nothing of prompts or rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.losses.sequences import trained
from megatron_klear.losses.terms import token_mean
from megatron_klear.metrics import Metric
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import export_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.protocols import PolicyLoss
from megatron_klear.training.head import Head, HeadSettings
from megatron_klear.training.learner import Learner, LearnerSettings, Trainable, build_trainable
from megatron_klear.types import LossOutput, MicroBatch, StepReport, TokenStats, TrainBatch


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Report of an update, the same on every rank, and this rank's log-probs (last stage only, a row a micro-batch)."""

    report: StepReport
    logprobs: list[Tensor]


class Policy(Learner):
    """A learner with an output layer over the vocabulary."""

    def __init__(
        self, trainable: Trainable, context: ParallelContext, settings: LearnerSettings, *, head: HeadSettings
    ) -> None:
        super().__init__(trainable, context, settings)
        self.head = Head(self.stage, context.groups, head)
        self.table = qwen3_table(self.stage.shape)

    def stats(self, batch: TrainBatch) -> list[TokenStats]:
        """Log-probs and entropies of every micro-batch under the current weights; last stage only, else empty."""
        return self.forward(batch, self.head)

    def update(self, batch: TrainBatch, loss: PolicyLoss) -> UpdateOutcome:
        """One optimizer update."""
        logprobs: list[Tensor] = []

        def loss_of(hidden: Tensor, micro_batch: MicroBatch) -> LossOutput:
            judged = self.head.judge(hidden, micro_batch, loss)
            logprobs.append(judged.stats.logprobs.detach())
            output = judged.output
            return LossOutput(output.loss, output.metrics | _stats_metrics(judged.stats, micro_batch))

        return UpdateOutcome(self.step(batch, loss_of, name="train/loss"), logprobs)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names on rank 0. Collective: every rank must exhaust it."""
        return export_weights(self.stage, self.table, self.context)


def _stats_metrics(stats: TokenStats, micro_batch: MicroBatch) -> dict[str, Metric]:
    """Metrics that do not depend on which loss it is."""
    mask = trained(micro_batch)
    assert stats.entropy is not None
    return {"train/logprob": token_mean(stats.logprobs, mask), "train/entropy": token_mean(stats.entropy, mask)}


def build_policy(
    shape: Qwen3Shape,
    fill: Callable[[ModelStage], None],
    context: ParallelContext,
    settings: LearnerSettings,
    head: HeadSettings = HeadSettings(),  # noqa: B008  frozen
) -> Policy:
    """A policy whose weights `fill` sets."""
    return Policy(build_trainable(shape, fill, context, settings), context, settings, head=head)
