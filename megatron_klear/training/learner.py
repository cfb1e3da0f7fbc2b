"""A trainable model on this rank: stage, optimizer, schedule. What it learns is its head's and its loss's business."""

from __future__ import annotations

import contextlib
import math
import warnings
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
from megatron_klear.models.qwen3.moe import take_balance_losses
from megatron_klear.parallel.broadcast import reduce_metrics, sum_over_ranks
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.scale import balance_loss_coefficient, loss_tuple
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.forward import run_schedule
from megatron_klear.training.offload import Offload, offload_to_host
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
    moe_aux_loss_coeff: float = 0.0


@dataclass(frozen=True, slots=True)
class Trainable:
    """A stage wrapped for training, with its optimizer."""

    stage: ModelStage
    ddps: list[DistributedDataParallel]
    """One a chunk."""
    optimizer: MegatronOptimizer
    offload: Offload | None = None
    """Where the optimizer's state waits in host memory."""

    def optimizer_at_work(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the optimizer's state is on the device."""
        if self.offload is None:
            return contextlib.nullcontext()
        return self.offload.at_work(self.optimizer, self.stage.parameters())


class Learner:
    """Forward passes and updates. `version` counts the updates made."""

    def __init__(self, trainable: Trainable, context: ParallelContext, settings: LearnerSettings) -> None:
        self.trainable = trainable
        self.stage = trainable.stage
        self.ddps = trainable.ddps
        self.optimizer = trainable.optimizer
        self.context = context
        self.settings = settings
        self.version = 0

    def forward(self, batch: TrainBatch, of_hidden: Callable[[Tensor, MicroBatch], Any]) -> list[Any]:
        """`of_hidden` of every micro-batch, without gradient; last stage only, else empty."""

        def collect(micro_batch: MicroBatch) -> Callable[..., Any]:
            return lambda hidden, non_loss_data: of_hidden(hidden, micro_batch)

        with megatron_scope(self.context.device):
            return run_schedule(self.stage, self.ddps, batch.micro_batches, collect, forward_only=True)

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

        self._weigh_balance_loss(len(batch.micro_batches))
        with megatron_scope(self.context.device):
            for ddp in self.ddps:
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            parts = run_schedule(self.stage, self.ddps, batch.micro_batches, compute_of, forward_only=False)
        metrics = reduce_metrics(merge(parts), self.context)
        lr = learning_rate(self.version, self.settings.optimizer, self.settings.decay_iters)
        set_learning_rate(self.optimizer, lr)
        with megatron_scope(self.context.device), self.trainable.optimizer_at_work():
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            finite = math.isfinite(grad_norm) and math.isfinite(metrics[name])
            if finite:
                self.optimizer.step()
                self.version += 1
        owner = name.partition("/")[0]
        metrics |= {f"{owner}/grad_norm": grad_norm, f"{owner}/lr": lr}
        if self.settings.moe_aux_loss_coeff > 0:
            metrics[f"{owner}/moe_aux_loss"] = self._balance_loss(len(batch.micro_batches))
        return StepReport(metrics, grad_norm, lr, skipped=not finite)

    def _weigh_balance_loss(self, num_micro_batches: int) -> None:
        """Megatron reads the coefficient in every forward pass; what it must be depends on the update."""
        self.stage.core.config.moe_aux_loss_coeff = balance_loss_coefficient(
            self.settings.moe_aux_loss_coeff,
            num_micro_batches=num_micro_batches,
            data_size=self.context.topology.data_size,
        )

    def _balance_loss(self, num_micro_batches: int) -> float:
        """Mean over layers, micro-batches and replicas, without the coefficient; 1 is perfect balance. A collective."""
        losses = (sum(take_balance_losses(chunk.core)) for chunk in self.stage.chunks)
        total = sum_over_ranks(sum(losses), self.context)
        return total / (sum(self.stage.shape.moe_layers) * num_micro_batches * self.context.topology.data_size)


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
        ddps = wrap_data_parallel(stage, use_distributed_optimizer=sharded)
        adam = build_optimizer(ddps, settings.optimizer, dtype=dtype, use_distributed_optimizer=sharded)
        offload = _offload(context, settings.optimizer)
        if offload is not None:
            offload.park(adam, stage.parameters())
    return Trainable(stage, ddps, adam, offload)


def _offload(context: ParallelContext, optimizer: OptimizerConfig) -> Offload | None:
    if not optimizer.optimizer_cpu_offload:
        return None
    if context.device.kind == "cuda":
        return offload_to_host(context.device)
    if context.is_main:
        warnings.warn("optimizer_cpu_offload changes nothing here: without a GPU all is in host memory", stacklevel=2)
    return None
