"""A trainable model on this rank: stage, optimizer, schedule. What it learns is its head's and its loss's business."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.metrics import Metric, merge
from megatron_klear.models.build import DTYPES, ModelStage, build_stage
from megatron_klear.parallel.broadcast import reduce_metrics
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.scale import loss_tuple
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.forward import run_schedule
from megatron_klear.training.optimizer import build_optimizer, set_learning_rate, wrap_data_parallel
from megatron_klear.training.schedule import learning_rate
from megatron_klear.types import LossOutput, MicroBatch, StepReport, TrainBatch


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What a learner is built from, besides its weights. `decay_iters` is the update at which min_lr is reached."""

    parallel: ParallelConfig
    optimizer: OptimizerConfig
    params_dtype: str
    decay_iters: int = 1


@dataclass(frozen=True, slots=True)
class Trainable:
    """A stage wrapped for training, with its optimizer."""

    stage: ModelStage
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer


class Learner:
    """Forward passes and updates. `version` counts the updates made."""

    def __init__(self, trainable: Trainable, context: ParallelContext, settings: LearnerSettings) -> None:
        self.stage = trainable.stage
        self.ddp = trainable.ddp
        self.optimizer = trainable.optimizer
        self.context = context
        self.settings = settings
        self.version = 0

    def forward(self, batch: TrainBatch, of_hidden: Callable[[Tensor, MicroBatch], Any]) -> list[Any]:
        """`of_hidden` of every micro-batch, without gradient; last stage only, else empty."""

        def collect(micro_batch: MicroBatch) -> Callable[..., Any]:
            return lambda hidden, non_loss_data: of_hidden(hidden, micro_batch)

        with megatron_scope(self.context.device):
            return run_schedule(self.stage, self.ddp, batch.micro_batches, collect, forward_only=True)

    def step(self, batch: TrainBatch, loss_of: Callable[[Tensor, MicroBatch], LossOutput], *, name: str) -> StepReport:
        """One optimizer update on a summed loss.

        `name` is the metric that holds it, such as `train/loss`; gradient norm and rate are reported beside it.
        A loss or gradient that is not finite changes nothing and is reported as skipped, on every rank.
        """

        def compute_of(micro_batch: MicroBatch) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Metric]]]:
            def compute(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
                output = loss_of(hidden, micro_batch)
                return loss_tuple(output.loss, output.metrics | {name: Metric(output.loss.detach(), "sum")})

            return compute

        with megatron_scope(self.context.device):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            parts = run_schedule(self.stage, self.ddp, batch.micro_batches, compute_of, forward_only=False)
        metrics = reduce_metrics(merge(parts), self.context)
        lr = learning_rate(self.version, self.settings.optimizer, self.settings.decay_iters)
        set_learning_rate(self.optimizer, lr)
        with megatron_scope(self.context.device):
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            finite = math.isfinite(grad_norm) and math.isfinite(metrics[name])
            if finite:
                self.optimizer.step()
                self.version += 1
        owner = name.partition("/")[0]
        metrics |= {f"{owner}/grad_norm": grad_norm, f"{owner}/lr": lr}
        return StepReport(metrics, grad_norm, lr, skipped=not finite)


def build_trainable(
    shape: Qwen3Shape,
    fill: Callable[[ModelStage], None],
    context: ParallelContext,
    settings: LearnerSettings,
    *,
    value_head: bool = False,
) -> Trainable:
    """A stage whose weights `fill` sets. The optimizer is made after that, so its main weights are fresh."""
    dtype, on_cpu = DTYPES[settings.params_dtype], context.device.kind == "cpu"
    sharded = settings.parallel.use_distributed_optimizer
    with megatron_scope(context.device):
        stage = build_stage(
            shape, settings.parallel, context.topology, dtype=dtype, on_cpu=on_cpu, value_head=value_head
        )
    fill(stage)
    with megatron_scope(context.device):
        ddp = wrap_data_parallel(stage, use_distributed_optimizer=sharded)
        adam = build_optimizer(ddp, settings.optimizer, dtype=dtype, use_distributed_optimizer=sharded)
    return Trainable(stage, ddp, adam)
