"""What of a run is saved, and where it goes on: whoever holds state registers it here, and is restored by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from tqdm import tqdm

from megatron_klear.checkpoint.manifest import POLICY
from megatron_klear.checkpoint.megatron_files import ModelPart
from megatron_klear.checkpoint.store import CheckpointStore, RunRecord, Saved
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage
from megatron_klear.training.learner import Learner


class Stateful(Protocol):
    """A cursor or counter. Its state must be what JSON can hold, and all that `restore` needs."""

    def state(self) -> Mapping[str, Any]: ...  # noqa: D102

    def restore(self, state: Mapping[str, Any]) -> None: ...  # noqa: D102


class RunCheckpoints:
    """Saves a run, and restores what registers when the run goes on from `saved`. Methods are collectives."""

    def __init__(
        self, store: CheckpointStore, saved: Saved | None, *, kind: Literal["sft", "rl"], in_background: bool
    ) -> None:
        self.store = store
        self.saved = saved
        self.kind: Literal["sft", "rl"] = kind
        self.in_background = in_background
        self.recipe = ""
        """YAML of the resolved recipe; rank 0."""
        self.tokenizer: str | None = None
        """Fingerprint; rank 0."""
        self._models: list[Callable[[], ModelPart]] = []
        self._stateful: dict[str, Stateful] = {}
        self._seconds = 0.0

    @property
    def start_step(self) -> int:
        """First step to do, counted from 1."""
        return 1 if self.saved is None else self.saved.manifest.step + 1

    def add_learner(self, learner: Learner, name: str = POLICY) -> None:
        """Weights, optimizer and version."""

        def part() -> ModelPart:
            return ModelPart(learner.stage, learner.optimizer, learner.version, name)

        self._models.append(part)
        if self.saved is not None:
            learner.version = self.store.load(part(), self.saved)

    def add_weights(self, stage: ModelStage, name: str, scope: Callable[[], AbstractContextManager[None]]) -> None:
        """Weights that the stage holds inside of `scope` only; what is loaded there must outlast it."""
        part = ModelPart(stage, name=name, scope=scope)
        self._models.append(lambda: part)
        if self.saved is not None:
            self.store.load(part, self.saved)

    def add_state(self, name: str, stateful: Stateful) -> None:
        """A cursor or counter. Rank 0's is saved; every rank that registers is restored to it. No collective."""
        assert name not in self._stateful, f"{name} is registered already"
        self._stateful[name] = stateful
        if self.saved is None:
            return
        states = self.saved.state
        if name not in states:
            raise CheckpointError(
                f"{self.saved.folder} holds no state of {name}, only of {', '.join(states)}; it was written by another"
                " version or for another recipe: start a fresh run from its weights with model.load"
            )
        stateful.restore(states[name])

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a checkpoint; in the background if the run was told so, else it is on disk when this returns."""
        started = time.perf_counter()
        record = RunRecord(
            step,
            self.kind,
            self.recipe,
            {name: dict(stateful.state()) for name, stateful in self._stateful.items()},
            self.tokenizer,
            metrics,
        )
        folder = self.store.begin([part() for part in self._models], record, copy=self.in_background)
        if not self.in_background:
            folder = self.store.wait()
        self._told(folder, time.perf_counter() - started)

    def poll(self) -> None:
        """Publish a save that has been written in the background; cheap if there is none."""
        started = time.perf_counter()
        self._told(self.store.poll(), time.perf_counter() - started)

    def wait(self) -> None:
        """Return when everything is on disk."""
        started = time.perf_counter()
        self._told(self.store.wait(), time.perf_counter() - started)

    def take_seconds(self) -> float:
        """Seconds that the run stood still for its checkpoints since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _told(self, folder: Path | None, seconds: float) -> None:
        self._seconds += seconds
        if folder is not None and self.store.context.is_main:
            tqdm.write(f"saved {folder} in {'the background' if self.in_background else f'{seconds:.2f} s'}")
