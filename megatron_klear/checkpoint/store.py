"""Megatron checkpoints: iter_0000100/ folders and latest_checkpointed_iteration.txt.

A checkpoint is written under a temporary name and renamed when all of it is on disk; the tracker moves after that. So
whatever is named iter_* is whole, and the tracker never names something that is not there.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_klear.checkpoint.inprocess import in_process_writer
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.broadcast import barrier
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.failures import CollectiveFailure, reason
from megatron_klear.parallel.topology import ParallelContext

TRACKER = "latest_checkpointed_iteration.txt"

# What a full disk, a damaged file or another model's file makes torch and Megatron raise.
_FAILURES = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
    CollectiveFailure,
)

# Optimizer state in a layout-free form.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def latest_step(folder: str | Path) -> int | None:
    """Step of the newest whole checkpoint, or None where there is none."""
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} holds {text!r}; expected the number of an iter_* folder beside it")
    return int(text)


def step_folder(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies."""
    return Path(folder) / f"iter_{step:07d}"


class CheckpointStore:
    """Saves and loads one model (and its optimizer) under one folder. Every method is a collective over all ranks."""

    def __init__(self, folder: str | Path, context: ParallelContext) -> None:
        self.folder = Path(folder)
        self.context = context

    def save(
        self, step: int, stage: ModelStage, optimizer: MegatronOptimizer | None, common: Mapping[str, Any]
    ) -> Path:
        """Write everything needed to go on; without an optimizer, the weights.

        `common` holds plain numbers and strings, equal on all ranks.
        """
        final = step_folder(self.folder, step)
        partial = final.with_suffix(".partial")
        if self.context.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        try:
            with megatron_scope(self.context.device), in_process_writer():
                model_state = stage.core.sharded_state_dict(metadata=_METADATA)
                shape = stage.shape.model_dump_json()
                state: dict[str, Any] = {"model": model_state, "shape": shape, "common": dict(common)}
                if optimizer is not None:
                    _make_state(optimizer)
                    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=_METADATA)
                dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
        except _FAILURES as error:
            raise CheckpointError(
                f"could not write checkpoint {step} to {partial}: {reason(error)}; the newest whole checkpoint in"
                f" {self.folder} is {latest_step(self.folder)}. Free space or make the folder writable, then resume"
            ) from error
        if self.context.is_main:
            self._publish(partial, final, step)
        barrier()
        return final

    def _publish(self, partial: Path, final: Path, step: int) -> None:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        tracker = self.folder / f"{TRACKER}.partial"
        with tracker.open("w") as out:
            out.write(str(step))
            out.flush()
            os.fsync(out.fileno())
        tracker.rename(self.folder / TRACKER)

    def load(
        self, stage: ModelStage, optimizer: MegatronOptimizer | None = None, *, step: int | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint (the newest, or `step`'s) into the model, and into an optimizer that made no step yet.

        Returns its `common`.
        """
        step = latest_step(self.folder) if step is None else step
        if step is None:
            raise CheckpointError(
                f"{self.folder} holds no {TRACKER}; expected the folder that a run saved into (the parent of iter_*)"
            )
        folder = step_folder(self.folder, step)
        if not folder.is_dir():
            raise CheckpointError(f"{self.folder / TRACKER} names step {step}, but {folder} does not exist")
        try:
            saved = Qwen3Shape.model_validate_json(dist_checkpointing.load_common_state_dict(str(folder))["shape"])
        except _FAILURES as error:
            raise _cannot_load(folder, error) from error
        _check_same_model(folder, saved, stage.shape)
        try:
            return self._load(folder, stage, optimizer)
        except _FAILURES as error:
            raise _cannot_load(folder, error) from error

    def _load(self, folder: Path, stage: ModelStage, optimizer: MegatronOptimizer | None) -> dict[str, Any]:
        with megatron_scope(self.context.device):
            model_state = stage.core.sharded_state_dict(metadata=_METADATA)
            state: dict[str, Any] = {"model": model_state}
            if optimizer is not None:
                _make_state(optimizer)
                state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=_METADATA)
            loaded: Any = dist_checkpointing.load(state, str(folder))
            stage.core.load_state_dict(loaded["model"])
            if optimizer is not None:
                settings = [_settings(part) for part in optimizer_parts(optimizer)]
                optimizer.load_state_dict(loaded["optimizer"])
                for part, own in zip(optimizer_parts(optimizer), settings, strict=True):
                    for group, values in zip(part.optimizer.param_groups, own, strict=True):
                        group.update(values)
        return loaded["common"]


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron chained, or the one there is."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _settings(part: Any) -> list[dict[str, Any]]:
    """Weight decay, betas and the like by parameter group. The checkpoint holds them too, but the recipe decides."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in part.optimizer.param_groups
    ]


def _cannot_load(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} could not be loaded ({reason(error)}); expected a whole checkpoint written by megatron-klear."
        f" An older one beside it can be loaded by writing its step into {TRACKER}"
    )


def _check_same_model(folder: Path, saved: Qwen3Shape, wanted: Qwen3Shape) -> None:
    """Megatron itself would load a vocabulary of another size without a word, and leave missing rows as they are."""
    if saved.tensor_shapes() == wanted.tensor_shapes():
        return
    old, new = saved.model_dump(), wanted.model_dump()
    differences = ", ".join(f"{name} {old[name]} instead of {new[name]}" for name in new if old[name] != new[name])
    raise CheckpointError(
        f"{folder} is of another model: {differences}; load it with the config.json it was trained with"
    )


def _make_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that made no step yet the state it would start with, to save it or to load into it.

    Megatron's own way takes a step with zero gradients, which counts, and decays the weights.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        if not isinstance(part, DistributedOptimizer) or not isinstance(inner, torch.optim.AdamW) or inner.state:
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
