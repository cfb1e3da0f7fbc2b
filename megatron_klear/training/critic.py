"""The critic of GAE: a Qwen3 of the policy's shape with a value head, its own optimizer and checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.losses.gae import ValueLoss
from megatron_klear.models.build import ModelStage, ValueGPTModel
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.learner import Learner, LearnerSettings, build_trainable
from megatron_klear.types import LossOutput, MicroBatch, StepReport, TrainBatch


class Critic(Learner):
    """A learner that gives one number a position."""

    def values(self, batch: TrainBatch) -> list[Tensor]:
        """[T] of every micro-batch under the current weights; last stage only, else empty."""
        return self.forward(batch, self._values)

    def update(self, batch: TrainBatch, loss: ValueLoss) -> StepReport:
        """One optimizer update towards `returns`."""

        def loss_of(hidden: Tensor, micro_batch: MicroBatch) -> LossOutput:
            return loss(self._values(hidden, micro_batch), micro_batch)

        return self.step(batch, loss_of, name="critic/loss")

    def _values(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        core = self.stage.core
        assert isinstance(core, ValueGPTModel)
        return core.values(hidden)


def critic_shape(shape: Qwen3Shape) -> Qwen3Shape:
    """The policy's shape with a tied head, which a critic never uses: so it holds no output layer of its own."""
    return shape.model_copy(update={"tie_word_embeddings": True})


def build_critic(
    shape: Qwen3Shape, fill: Callable[[ModelStage], None], context: ParallelContext, settings: LearnerSettings
) -> Critic:
    """A critic whose trunk `fill` sets (`shape` from `critic_shape`); its values start at zero."""
    trainable = build_trainable(shape, fill, context, settings, value_head=True)
    return Critic(trainable, context, settings)
