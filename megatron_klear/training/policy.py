"""A trainable policy on this rank: model stage, optimizer, schedule. Knows nothing of prompts or rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.losses.policy import token_mean
from megatron_klear.metrics import Metric, merge
from megatron_klear.models.build import DTYPES, ModelStage, build_stage
from megatron_klear.models.hf_bridge import export_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.broadcast import reduce_metrics
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.scale import loss_tuple
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.protocols import PolicyLoss
from megatron_klear.training.forward import LossOf, run_schedule
from megatron_klear.training.head import Head
from megatron_klear.training.optimizer import build_optimizer, set_learning_rate, wrap_data_parallel
from megatron_klear.training.schedule import learning_rate
from megatron_klear.types import MicroBatch, StepReport, TokenStats, TrainBatch


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy is built from, besides its weights. `decay_iters` is the update at which min_lr is reached."""

    parallel: ParallelConfig
    optimizer: OptimizerConfig
    params_dtype: str
    decay_iters: int = 1
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Report of an update, the same on every rank, and this rank's log-probs (last stage only, a row a micro-batch)."""

    report: StepReport
    logprobs: list[Tensor]


class Policy:
    """Model, optimizer and schedule of one rank. `version` counts the updates made."""

    def __init__(
        self,
        stage: ModelStage,
        ddp: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        context: ParallelContext,
        settings: PolicySettings,
    ) -> None:
        self.stage = stage
        self.ddp = ddp
        self.optimizer = optimizer
        self.context = context
        self.settings = settings
        self.head = Head(stage, context.groups, temperature=settings.temperature)
        self.table = qwen3_table(stage.shape)
        self.version = 0

    def stats(self, batch: TrainBatch) -> list[TokenStats]:
        """Log-probs and entropies of every micro-batch under the current weights; last stage only, else empty."""

        def collect(micro_batch: MicroBatch) -> Callable[..., TokenStats]:
            return lambda hidden, non_loss_data: self.head(hidden, micro_batch)

        return self._run(batch, collect, forward_only=True)

    def update(self, batch: TrainBatch, loss: PolicyLoss) -> UpdateOutcome:
        """One optimizer update. Non-finite losses or gradients change nothing and are reported as skipped."""
        logprobs: list[Tensor] = []

        def loss_of(micro_batch: MicroBatch) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Metric]]]:
            def compute(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
                stats = self.head(hidden, micro_batch)
                logprobs.append(stats.logprobs.detach())
                output = loss(stats, micro_batch)
                return loss_tuple(output.loss, output.metrics | _stats_metrics(output.loss, stats, micro_batch))

            return compute

        with megatron_scope(self.context.device):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
        metrics = reduce_metrics(merge(self._run(batch, loss_of, forward_only=False)), self.context)
        lr = learning_rate(self.version, self.settings.optimizer, self.settings.decay_iters)
        set_learning_rate(self.optimizer, lr)
        with megatron_scope(self.context.device):
            self.optimizer.prepare_grads()
            grad_norm = float(self.optimizer.get_grad_norm())
            finite = math.isfinite(grad_norm) and math.isfinite(metrics["train/loss"])
            if finite:
                self.optimizer.step()
                self.version += 1
        return UpdateOutcome(StepReport(metrics, grad_norm, lr, skipped=not finite), logprobs)

    def _run(self, batch: TrainBatch, loss_of: LossOf, *, forward_only: bool) -> list[Any]:
        with megatron_scope(self.context.device):
            return run_schedule(self.stage, self.ddp, batch.micro_batches, loss_of, forward_only=forward_only)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names on rank 0. Collective: every rank must exhaust it."""
        return export_weights(self.stage, self.table, self.context)


def _stats_metrics(loss: Tensor, stats: TokenStats, micro_batch: MicroBatch) -> dict[str, Metric]:
    """Metrics that do not depend on which loss it is."""
    mask = micro_batch.token_scale != 0
    assert stats.entropy is not None
    return {
        "train/loss": Metric(loss.detach(), "sum"),
        "train/logprob": token_mean(stats.logprobs, mask),
        "train/entropy": token_mean(stats.entropy, mask),
    }


def build_policy(
    shape: Qwen3Shape, fill: Callable[[ModelStage], None], context: ParallelContext, settings: PolicySettings
) -> Policy:
    """A policy whose weights `fill` sets. The optimizer is made after that, so its main weights are fresh."""
    dtype, on_cpu = DTYPES[settings.params_dtype], context.device.kind == "cpu"
    sharded = settings.parallel.use_distributed_optimizer
    with megatron_scope(context.device):
        stage = build_stage(shape, settings.parallel, context.topology, dtype=dtype, on_cpu=on_cpu)
    fill(stage)
    with megatron_scope(context.device):
        ddp = wrap_data_parallel(stage, use_distributed_optimizer=sharded)
        adam = build_optimizer(ddp, settings.optimizer, dtype=dtype, use_distributed_optimizer=sharded)
    return Policy(stage, ddp, adam, context, settings)
