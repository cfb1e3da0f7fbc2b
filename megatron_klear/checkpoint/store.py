"""Megatron checkpoints: iter_0000100/ folders and latest_checkpointed_iteration.txt.

A checkpoint is written under a temporary name and renamed when all of it is on disk; the tracker moves after that. So
whatever is named iter_* is whole, and the tracker never names something that is not there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_klear.checkpoint.inprocess import in_process_writer
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import HiddenGPTModel
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.topology import ParallelContext

TRACKER = "latest_checkpointed_iteration.txt"

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
        self, step: int, core: HiddenGPTModel, optimizer: MegatronOptimizer | None, common: Mapping[str, Any]
    ) -> Path:
        """Write everything needed to go on (without an optimizer: the weights). `common` holds plain numbers and strings, equal on all ranks."""
        final = step_folder(self.folder, step)
        partial = final.with_suffix(".partial")
        if self.context.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        try:
            with megatron_scope(self.context.device), in_process_writer():
                model_state = core.sharded_state_dict(metadata=_METADATA)
                state: dict[str, Any] = {"model": model_state, "common": dict(common)}
                if optimizer is not None:
                    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=_METADATA)
                dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
        except (OSError, RuntimeError, CheckpointingException) as error:
            raise CheckpointError(
                f"could not write checkpoint {step} to {partial}: {error}; the newest whole checkpoint in"
                f" {self.folder} is {latest_step(self.folder)}. Free space or make the folder writable, then resume"
            ) from error
        if self.context.is_main:
            self._publish(partial, final, step)
        dist.barrier()
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

    def load(self, core: HiddenGPTModel, optimizer: MegatronOptimizer | None = None) -> dict[str, Any]:
        """Load the newest checkpoint into the model (and optimizer, before it made a step); returns its `common`."""
        step = latest_step(self.folder)
        if step is None:
            raise CheckpointError(
                f"{self.folder} holds no {TRACKER}; expected the folder that a run saved into (the parent of iter_*)"
            )
        folder = step_folder(self.folder, step)
        if not folder.is_dir():
            raise CheckpointError(f"{self.folder / TRACKER} names step {step}, but {folder} does not exist")
        try:
            with megatron_scope(self.context.device):
                if optimizer is not None:
                    _make_state(optimizer)
                model_state = core.sharded_state_dict(metadata=_METADATA)
                state: dict[str, Any] = {"model": model_state}
                if optimizer is not None:
                    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=_METADATA)
                loaded: Any = dist_checkpointing.load(state, str(folder))
                core.load_state_dict(loaded["model"])
                if optimizer is not None:
                    optimizer.load_state_dict(loaded["optimizer"])
        except (OSError, RuntimeError, CheckpointingException) as error:
            raise CheckpointError(
                f"{folder} could not be loaded ({error}); expected a checkpoint of the same model"
            ) from error
        return loaded["common"]


def _make_state(optimizer: MegatronOptimizer) -> None:
    """Give a new optimizer state tensors to load into. Takes a step with zero gradients: only before a load."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            part._init_optimizer_states_with_dummy_values()
