"""Jobs on Megatron checkpoints: save, go on, and everything that can be wrong with a folder."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import numpy as np
import psutil
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from dist.world import Arrays, Layout, exported, gppo, ragged_samples, random_fill, world
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.checkpoint import megatron_files
from megatron_klear.checkpoint.folder import latest_step
from megatron_klear.checkpoint.inprocess import in_process_results
from megatron_klear.checkpoint.megatron_files import ModelPart, WriteRequest
from megatron_klear.checkpoint.store import CheckpointStore, RunRecord
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.rng import seed_rank
from megatron_klear.training.policy import Policy

# Every part of the state shows: moments, decay, warm-up (by version), clipping.
MOVING = OptimizerConfig(lr=1e-2, lr_warmup_iters=5, weight_decay=0.1, clip_grad=0.5)
BUDGET = 80


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms of the updates that were made; weights on rank 0; what load gave back."""

    losses: list[float]
    grad_norms: list[float]
    weights: Arrays
    common: dict[str, Any]
    groups: list[tuple[float, tuple[float, float], float]]
    """(weight decay, betas, eps) of the optimizer's parameter groups."""


def _updates(policy: Policy, batch: Any, count: int) -> tuple[list[float], list[float]]:
    reports = [policy.update(batch, gppo()).report for _ in range(count)]
    return [report.metrics["train/loss"] for report in reports], [report.grad_norm for report in reports]


def part_of(policy: Policy) -> ModelPart:
    return ModelPart(policy.stage, policy.optimizer, policy.version)


def ready(folder: str) -> str:
    """The folder, made if need be, as a run makes it before its first save."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def train(
    rank: int,
    world_size: int,
    layout: Layout,
    dtype: str,
    *,
    save: str = "",
    load: str = "",
    before: int = 0,
    after: int = 0,
    mutant: str = "",
    shape: Qwen3Shape | None = None,
    sharded_optimizer: bool = True,
    optimizer: OptimizerConfig = MOVING,
) -> Trained:
    """Load (if told), `before` updates, save (if told), `after` updates."""
    shape = shape or tiny_shape(False)
    with world(layout) as here:
        # A run that loads starts from other weights, so that what is not loaded shows.
        fill = random_fill(shape, seed=7 if load else 0)
        policy = here.policy(shape, fill, optimizer=optimizer, dtype=dtype, sharded_optimizer=sharded_optimizer)
        MUTANTS[mutant](policy)
        batch = here.batch(ragged_samples(shape.vocab_size), BUDGET)
        common: dict[str, Any] = {}
        if load:
            store = CheckpointStore(load, here.context)
            saved = store.open()
            policy.version = store.load(part_of(policy), saved)
            common = {"step": saved.manifest.step, "version": policy.version, **saved.state}
        losses, norms = _updates(policy, batch, before)
        if save:
            store = CheckpointStore(ready(save), here.context)
            store.save([part_of(policy)], RunRecord(before, "rl", "recipe", {"note": {"text": "x"}}))
        more, more_norms = _updates(policy, batch, after)
        groups = [(group["weight_decay"], group["betas"], group["eps"]) for group in policy.optimizer.param_groups]
        return Trained(losses + more, norms + more_norms, exported(policy), common, groups)


def _plain_class(policy: Policy) -> None:
    for part in policy.optimizer.chained_optimizers:  # type: ignore[attr-defined]
        part.__class__ = DistributedOptimizer


def _shared_step(policy: Policy) -> None:
    """Megatron's load, made to accept torch's AdamW but not to give each parameter its own step."""

    class Shared(policy.optimizer.chained_optimizers[0].__class__):  # type: ignore[attr-defined,misc]
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            DistributedOptimizer.load_state_dict(self, state_dict)

    for part in policy.optimizer.chained_optimizers:  # type: ignore[attr-defined]
        part.__class__ = Shared


MUTANTS: dict[str, Callable[[Policy], None]] = {
    "": lambda policy: None,
    "plain class": _plain_class,
    "shared step": _shared_step,
}


def save_steps(rank: int, world_size: int, layout: Layout, folder: str, steps: list[int]) -> list[str]:
    """Weights alone, seeded by the step; the folders that save returned."""
    shape = tiny_shape(True)
    with world(layout) as here:
        store, paths = CheckpointStore(ready(folder), here.context), []
        for step in steps:
            policy = here.policy(shape, random_fill(shape, seed=step), optimizer=MOVING)
            paths.append(store.save([ModelPart(policy.stage)], RunRecord(step, "weights")).name)
        return paths


def load_weights(
    rank: int, world_size: int, layout: Layout, folder: str, shape: Qwen3Shape, with_optimizer: bool = False
) -> tuple[int, Arrays] | str:
    """(step, weights) of the newest checkpoint, or the error."""
    with world(layout) as here:
        policy = here.policy(shape, random_fill(shape, seed=99), optimizer=MOVING)
        store = CheckpointStore(folder, here.context)
        try:
            saved = store.open()
            store.load(ModelPart(policy.stage, policy.optimizer if with_optimizer else None), saved)
        except CheckpointError as error:
            return str(error)
        return saved.manifest.step, exported(policy)


def open_each(rank: int, world_size: int, layout: Layout, folders: list[str]) -> list[str]:
    """For each folder "whole", or why its newest checkpoint cannot be opened."""
    texts = []
    with world(layout) as here:
        for folder in folders:
            try:
                CheckpointStore(folder, here.context).open()
                texts.append("whole")
            except CheckpointError as error:
                texts.append(str(error))
    return texts


@dataclass(frozen=True)
class Seen:
    """What a save in the background looked like from outside."""

    tracker_while_writing: int | None
    polled_while_writing: str | None
    tracker_after_first: int | None
    published: list[str]


def save_while_training(
    rank: int, world_size: int, layout: Layout, folder: str, sharded_optimizer: bool, copy: bool = True
) -> Seen:
    """Save at once and in the background, the latter with writers that wait until two more updates were made."""
    shape = tiny_shape(False)
    go = threading.Event()
    with world(layout) as here:
        policy = here.policy(shape, random_fill(shape), optimizer=MOVING, sharded_optimizer=sharded_optimizer)
        batch = here.batch(ragged_samples(shape.vocab_size), BUDGET)
        _updates(policy, batch, 1)
        CheckpointStore(ready(f"{folder}/at_once"), here.context).save([part_of(policy)], RunRecord(1, "rl"))
        store = CheckpointStore(ready(f"{folder}/background"), here.context)
        original = WriteRequest.write

        def late(self: WriteRequest) -> Any:
            assert go.wait(30)
            return original(self)

        WriteRequest.write = late  # type: ignore[method-assign]
        store.begin([part_of(policy)], RunRecord(1, "rl"), copy=copy)
        _updates(policy, batch, 2)
        polled, tracker = store.poll(), latest_step(store.folder)
        go.set()
        first = store.begin([part_of(policy)], RunRecord(2, "rl"))
        after_first = latest_step(store.folder)
        second = store.wait()
        assert first is not None and second is not None and store.wait() is None
        return Seen(tracker, polled and polled.name, after_first, [first.name, second.name])


def save_nowhere(rank: int, world_size: int, layout: Layout, folder: str) -> list[str]:
    """Errors of saves into a folder that vanished and into one that is a file."""
    shape, texts = tiny_shape(True), []
    with world(layout) as here:
        policy = here.policy(shape, random_fill(shape), optimizer=MOVING)
        Path(f"{folder}/a_file").touch()
        for name in ("vanished", "a_file"):
            try:
                CheckpointStore(f"{folder}/{name}", here.context).save([part_of(policy)], RunRecord(1, "weights"))
            except CheckpointError as error:
                texts.append(str(error))
    return texts


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.normal()), float(torch.rand(()))


def draw_after_save(rank: int, world_size: int, layout: Layout, folder: str) -> tuple[float, float, float]:
    """Draw a little, save, and what is drawn next."""
    shape = tiny_shape(True)
    with world(layout) as here:
        seed_rank(3, rank)
        _draw()
        policy = here.policy(shape, random_fill(shape), optimizer=MOVING)
        CheckpointStore(ready(folder), here.context).save([part_of(policy)], RunRecord(1, "rl"))
        return _draw()


def draw_after_restore(rank: int, world_size: int, layout: Layout, folder: str) -> tuple[float, float, float] | str:
    """What is drawn by a run that goes on."""
    with world(layout) as here:
        store = CheckpointStore(folder, here.context)
        return _draw() if store.restore_rng(store.open()) else "other layout"


def load_critic(rank: int, world_size: int, layout: Layout, folder: str) -> str:
    """The error of loading a model that the checkpoint does not hold."""
    shape = tiny_shape(False)
    with world(layout) as here:
        policy = here.policy(shape, random_fill(shape), optimizer=MOVING)
        store = CheckpointStore(folder, here.context)
        try:
            store.load(ModelPart(policy.stage, name="critic"), store.open())
        except CheckpointError as error:
            return str(error)
    return "no error"


def save_on_a_full_disk(rank: int, world_size: int, layout: Layout, folder: str, full_on: list[int]) -> str:
    """Save step 1, then step 2 with a limit on the size of files on some ranks; the error of that."""
    shape = tiny_shape(True)
    with world(layout) as here:
        store = CheckpointStore(folder, here.context)
        policy = here.policy(shape, random_fill(shape, seed=1), optimizer=MOVING)
        store.save([part_of(policy)], RunRecord(1, "weights"))
        if rank in full_on:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            store.begin([part_of(policy)], RunRecord(2, "weights"))
            store.wait()
        except CheckpointError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return "no error"


def crash_while_saving(rank: int, world_size: int, layout: Layout, folder: str) -> None:
    """Die in the middle of a save, with some of the files written."""
    shape = tiny_shape(True)
    with world(layout) as here:
        store = CheckpointStore(folder, here.context)
        policy = here.policy(shape, random_fill(shape, seed=1), optimizer=MOVING)
        # The tensors are written, the metadata is not.
        original = megatron_files.write_files

        def write_and_die(*args: Any) -> None:
            original(*args)
            os._exit(9)

        megatron_files.write_files = write_and_die  # type: ignore[assignment]
        store.save([part_of(policy)], RunRecord(2, "weights"))


def leftovers(rank: int, world_size: int, layout: Layout, folder: str) -> tuple[int, bool, bool]:
    """(child processes after a save, is the patch in place inside, and gone after an exception)."""

    def patched() -> object:
        return vars(filesystem_async)["_get_write_results_queue"]

    shape, original = tiny_shape(True), patched()
    with world(layout) as here:
        policy = here.policy(shape, random_fill(shape), optimizer=MOVING)
        CheckpointStore(ready(folder), here.context).save([part_of(policy)], RunRecord(1, "weights"))
        children = len(psutil.Process().children(recursive=True))
    try:
        with in_process_results():
            inside = patched() is not original
            raise KeyError
    except KeyError:
        return children, inside, patched() is original


def fill_from(rank: int, world_size: int, layout: Layout, folder: str, dtype: str) -> tuple[Arrays, Arrays]:
    """A weights-only start from a checkpoint, then an update with learning rate 0: weights before and after."""
    shape = tiny_shape(True)
    with world(layout) as here:

        def fill(stage: ModelStage) -> None:
            CheckpointStore(folder, here.context).load_weights(stage)

        policy = here.policy(shape, fill, optimizer=OptimizerConfig(lr=0.0), dtype=dtype)
        before = exported(policy)
        policy.update(here.batch(ragged_samples(), BUDGET), gppo())
        return before, exported(policy)


def run_train(rank: int, world_size: int, layout: Layout, dtype: str, options: dict[str, Any]) -> Trained:
    """`train` with its keyword arguments in a dictionary, as the pool passes positions only."""
    return train(rank, world_size, layout, dtype, **options)
