"""Jobs on the policy: updates that must change nothing, and updates that must be skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dist.world import Arrays, Layout, World, exported, gppo, gradients, ragged_samples, random_fill, tiny, world
from megatron_klear.config.loss import CorrectionConfig, GppoLossConfig, KlConfig
from megatron_klear.config.recipe import HealthConfig, OptimizerConfig
from megatron_klear.errors import TrainingError
from megatron_klear.losses.registry import build_loss
from megatron_klear.training.annotate import Annotators, annotate
from megatron_klear.training.health import NonFiniteGuard
from megatron_klear.training.policy import Policy
from megatron_klear.types import StepReport, TrainBatch

MOVING = OptimizerConfig(lr=1e-2)
BUDGET = 80


def still(rank: int, world_size: int, layout: Layout, dtype: str) -> tuple[Arrays, Arrays]:
    """Weights before and after two updates with learning rate 0 (and weight decay, which must scale with it)."""
    with world(layout) as here:
        policy = here.policy(tiny(True), optimizer=OptimizerConfig(lr=0.0, weight_decay=0.5), dtype=dtype)
        before = exported(policy)
        for _ in range(2):
            policy.update(here.batch(ragged_samples(), BUDGET), gppo())
        return before, exported(policy)


def decay_alone(rank: int, world_size: int, layout: Layout, lr: float, weight_decay: float) -> tuple[Arrays, Arrays]:
    """Weights before and after an update without a gradient."""
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=OptimizerConfig(lr=lr, weight_decay=weight_decay))
        before, samples = exported(policy), ragged_samples()
        for sample in samples:
            sample.advantage = 0.0
        policy.update(here.batch(samples, BUDGET, sft_loss_coef=0.0), gppo())
        return before, exported(policy)


def first_update(rank: int, world_size: int, layout: Layout, dtype: str) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the first and the second update after `annotate`."""
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=MOVING, dtype=dtype)
        batch = here.batch(ragged_samples(), BUDGET)
        annotate([batch], Annotators(policy, CorrectionConfig()))
        return tuple(policy.update(batch, gppo()).report.metrics for _ in range(2))  # type: ignore[return-value]


def first_gradients(rank: int, world_size: int, layout: Layout, dtype: str, on_policy: bool) -> Arrays:
    """Gradients of the first update: with old log-probs of a pass, or without any."""
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=MOVING, dtype=dtype, sharded_optimizer=False)
        batch = here.batch(ragged_samples(), BUDGET)
        old = "current" if on_policy else "recompute"
        annotate([batch], Annotators(policy, CorrectionConfig(), old))
        policy.update(batch, build_loss(GppoLossConfig(type="gppo"), KlConfig(), on_policy=on_policy))
        return gradients(policy)


@dataclass(frozen=True)
class Skipped:
    """What a poisoned update left behind."""

    report: StepReport
    version: int
    before: Arrays
    after: Arrays
    warning: str
    error: str
    dumps: list[str]
    healed: Arrays
    """Weights after the poison is gone and one more update."""


def poisoned(rank: int, world_size: int, layout: Layout, poison: str, folder: str) -> Skipped:
    """Two updates with `poison` under a guard that forgives one, then one without."""
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=MOVING)
        batch = here.batch(ragged_samples(), BUDGET)
        before, guard = exported(policy), NonFiniteGuard(HealthConfig(max_nonfinite_steps=1), Path(folder))
        undo = _poison(here, policy, batch, poison)
        report = policy.update(batch, gppo()).report
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard.check(1, report, policy, batch)
        error = "no error"
        try:
            guard.check(2, policy.update(batch, gppo()).report, policy, batch)
        except TrainingError as raised:
            error = str(raised)
        undo()
        after, version = exported(policy), policy.version
        policy.update(batch, gppo())
        dumps = sorted(path.name for path in Path(folder).glob(f"*_rank_{rank}.pt"))
        return Skipped(
            report, version, before, after, str(caught[0].message) if caught else "", error, dumps, exported(policy)
        )


def _poison(here: World, policy: Policy, batch: TrainBatch, poison: str) -> Callable[[], None]:
    """Break one number; gives a function that repairs it."""
    topology = here.context.topology
    if poison == "weight":
        parameters = dict(policy.stage.named_parameters())
        holder = parameters["decoder.layers.0.mlp.linear_fc2.weight"] if topology.is_first_stage else None
    else:
        # Of one replica alone: the others must skip with it.
        holder = batch.micro_batches[0].advantages if topology.data_rank == topology.data_size - 1 else None
    if holder is None:
        return lambda: None
    flat = holder.detach().flatten()
    place = int((flat != 0).nonzero()[0])
    kept = flat[place].clone()
    flat[place] = torch.nan if poison != "infinity" else torch.inf

    def undo() -> None:
        flat[place] = kept

    return undo


def one_good_update(rank: int, world_size: int, layout: Layout) -> Arrays:
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=MOVING)
        policy.update(here.batch(ragged_samples(), BUDGET), gppo())
        return exported(policy)


def one_sample(rank: int, world_size: int, layout: Layout) -> tuple[int, StepReport, Arrays]:
    """(sequences with loss on this rank, report, gradients) of a batch of a single sample."""
    with world(layout) as here:
        policy = here.policy(tiny(True), random_fill(tiny(True)), optimizer=MOVING, sharded_optimizer=False)
        batch = here.batch(ragged_samples()[:1], BUDGET)
        annotate([batch], Annotators(policy, CorrectionConfig()))
        report = policy.update(batch, gppo()).report
        trained = sum(int((micro_batch.token_scale != 0).any()) for micro_batch in batch.micro_batches)
        return trained, report, gradients(policy)


def load_dump(rank: int, world_size: int, path: str) -> list[dict[str, object]]:
    """A dump as a person would look at it: field names with shapes."""
    return [
        {name: tuple(v.shape) if isinstance(v, torch.Tensor) else v for name, v in row.items()}
        for row in torch.load(path, weights_only=True)
    ]
