"""Saving and loading checkpoints; every method is a collective over all ranks.

A save has three parts. `begin` fixes what is written and starts a thread that writes it; `poll` looks whether every
rank's thread is done; then the files get their manifest and their name, and the tracker moves. A save that nobody
waits for lets training go on; one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from megatron_klear import __version__
from megatron_klear.checkpoint.folder import (
    existing_step_folder,
    fsync_folder,
    latest_step,
    partial_folder,
    publish,
    step_folder,
)
from megatron_klear.checkpoint.inprocess import FAILURES
from megatron_klear.checkpoint.manifest import (
    FileEntry,
    Manifest,
    damaged,
    file_entry,
    find_damage,
    read_manifest,
    write_manifest,
)
from megatron_klear.checkpoint.megatron_files import ModelPart, WriteRequest, load_part, stored_weights
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.checkpoint.stream import ParameterSource
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.rope import RopeConfig
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.broadcast import all_ranks, gather_objects
from megatron_klear.parallel.failures import reason
from megatron_klear.parallel.rng import restore_rng_state, rng_state
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.types import Topology

T = TypeVar("T")
RECIPE, STATE = "recipe.yaml", "state.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run knows beside its models, on rank 0; the other ranks' is not looked at, but for step and kind."""

    step: int
    kind: Literal["sft", "rl", "weights"]
    recipe: str = ""
    """YAML; empty for weights alone."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Cursors and counters, as JSON can hold them."""
    tokenizer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk, checked."""

    folder: Path
    manifest: Manifest

    @property
    def recipe(self) -> str:
        """YAML of the run that wrote it."""
        return (self.folder / RECIPE).read_text()

    @property
    def state(self) -> dict[str, Any]:
        """Cursors and counters of the run that wrote it."""
        return json.loads((self.folder / STATE).read_text())


@dataclass(frozen=True, slots=True)
class _Pending:
    """A save whose files are being written."""

    record: RunRecord
    models: tuple[ModelPart, ...]
    requests: tuple[WriteRequest, ...]
    written: Future[dict[Path, FileEntry]]


class CheckpointStore:
    """Checkpoints of a run under one folder, which must exist before the first save."""

    def __init__(self, folder: str | Path, context: ParallelContext, retention: Retention = Retention()) -> None:  # noqa: B008  frozen
        self.folder = Path(folder)
        self.context = context
        self.retention = retention
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def save(self, models: Sequence[ModelPart], record: RunRecord) -> Path:
        """Write a checkpoint and wait until it is published."""
        self.begin(models, record, copy=False)
        folder = self.wait()
        assert folder is not None
        return folder

    def begin(self, models: Sequence[ModelPart], record: RunRecord, *, copy: bool = True) -> Path | None:
        """Start to write the state of this moment; waits for an earlier save first, and returns what that published.

        Without `copy` the models must stay as they are until `wait` returns.
        """
        earlier = self.wait()
        partial = partial_folder(self.folder, record.step)
        self._save_step(record.step, lambda: self._prepare(partial, models, record))
        try:
            requests = tuple(WriteRequest(part, part.folder(partial), self.context, copy=copy) for part in models)
        except FAILURES as error:
            raise self._cannot_write(record.step, reason(error)) from error
        state = None if record.kind == "weights" else rng_state(self.context.device)
        written = self._thread.submit(_write, requests, partial / _rng_file(self.context.topology.rank), state)
        self._pending = _Pending(record, tuple(models), requests, written)
        return earlier

    def poll(self) -> Path | None:
        """Publish the save in flight if every rank has written its files; its folder then, else None."""
        if self._pending is None or not all_ranks(self._pending.written.done(), self.context):
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for the save in flight, if there is one, and publish it. Raises `CheckpointError` on every rank."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        step = pending.record.step
        own = self._save_step(step, pending.written.result)
        try:
            for request in pending.requests:
                request.finish()
        except FAILURES as error:
            raise self._cannot_write(step, reason(error)) from error
        entries = dict(pair for part in gather_objects(own) for pair in part.items())
        folder = self._save_step(step, lambda: self._publish(pending, entries))
        self.clean_up()
        return folder

    def _save_step(self, step: int, work: Callable[[], T]) -> T:
        """This rank's part of a save; if it fails on any rank, all ranks raise."""
        result, told = _together(work)
        if told:
            raise self._cannot_write(step, "; ".join(f"rank {rank}: {text}" for rank, text in told.items()))
        return cast(T, result)

    def _cannot_write(self, step: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"could not write checkpoint {step} to {self.folder} ({why or 'another rank says why'});"
            f" the newest whole checkpoint there is {latest_step(self.folder)}."
            " Free space or make the folder writable, then resume"
        )

    def clean_up(self) -> None:
        """Delete, on rank 0, what need not stay. If that fails it warns: one too many is no reason to stop a run."""
        try:
            if self.context.is_main:
                self.retention.apply(self.folder)
        except (OSError, CheckpointError) as error:
            warnings.warn(f"could not delete older checkpoints in {self.folder}: {error}", stacklevel=3)

    def _prepare(self, partial: Path, models: Sequence[ModelPart], record: RunRecord) -> None:
        if not self.context.is_main:
            return
        if partial.exists():
            shutil.rmtree(partial)
        # Not its parents: a folder that vanished may be a disk that is no longer there.
        partial.mkdir()
        for part in models:
            part.folder(partial).mkdir(exist_ok=True)
        if record.kind != "weights":
            (partial / RECIPE).write_text(record.recipe)
            (partial / STATE).write_text(json.dumps(dict(record.state), indent=1))

    def _publish(self, pending: _Pending, entries: Mapping[Path, FileEntry]) -> Path:
        """On rank 0, name what is complete."""
        record = pending.record
        partial = partial_folder(self.folder, record.step)
        if not self.context.is_main:
            return step_folder(self.folder, record.step)
        files = dict(entries)
        # What rank 0 wrote beside the tensors has not been waited for yet.
        for path in sorted(path for path in partial.rglob("*") if path.is_file() and path not in entries):
            _fsync(path)
            files[path] = file_entry(path)
        for part in pending.models:
            fsync_folder(part.folder(partial))
        write_manifest(partial, self._manifest(pending, {str(p.relative_to(partial)): e for p, e in files.items()}))
        return publish(self.folder, record.step)

    def _manifest(self, pending: _Pending, files: dict[str, FileEntry]) -> Manifest:
        topology, record = self.context.topology, pending.record
        return Manifest(
            kind=record.kind,
            step=record.step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            params_dtype=str(pending.models[0].stage.core.config.params_dtype).removeprefix("torch."),
            world_size=topology.world_size,
            parallel=_layout(topology),
            models={part.name: part.entry for part in pending.models},
            tokenizer=record.tokenizer,
            metrics={name: value for name, value in record.metrics.items() if abs(value) < float("inf")},
            packages=_packages(),
            files=files,
        )

    def open(self, step: int | None = None, *, verify: bool = True) -> Saved:
        """Find a checkpoint (the newest, or `step`'s) and check it; each rank checks a share of the files."""

        def find() -> Saved:
            folder = existing_step_folder(self.folder, step)
            manifest = read_manifest(folder)
            if folder != step_folder(self.folder, manifest.step):
                raise CheckpointError(f"{folder} holds step {manifest.step}; give the folder its own name back")
            return Saved(folder, manifest)

        # Every rank reads it: a folder that only one machine has is found out here.
        saved, told = _together(find)
        if saved is None or told:
            raise CheckpointError(next(iter(told.values())))
        if verify:
            topology = self.context.topology
            own = sorted(saved.manifest.files)[topology.rank :: topology.world_size]
            faults = [
                fault for part in gather_objects(find_damage(saved.folder, saved.manifest, own)) for fault in part
            ]
            if faults:
                raise damaged(saved.folder, faults)
        return saved

    def load(self, part: ModelPart, saved: Saved, *, any_rope: bool = False) -> int:
        """Bring a model (and its optimizer, which made no step yet) to the state it was saved in; its version.

        With `any_rope` the model may have other rotary positions than it was saved with, which is then a warning.
        """
        version = self._check_fits(part, saved, any_rope=any_rope)
        with _unloadable(saved.folder):
            load_part(part, saved.folder, self.context)
        return version

    def _check_fits(self, part: ModelPart, saved: Saved, *, any_rope: bool) -> int:
        """Raise unless it can be loaded into this model; its version."""
        entry = saved.manifest.models.get(part.name)
        if entry is None:
            held = ", ".join(saved.manifest.models)
            raise CheckpointError(
                f"{saved.folder} holds no {part.name}, only {held}; start a fresh run from its weights with model.load"
            )
        _check_same_model(saved.folder, entry.shape, part.stage.shape)
        self._check_same_rope(saved.folder, entry.shape.rope, part.stage.shape.rope, any_rope=any_rope)
        wanted = part.entry.optimizer
        if wanted is not None and entry.optimizer != wanted:
            raise CheckpointError(_other_optimizer(saved.folder, entry.optimizer, wanted))
        return entry.version

    def _check_same_rope(self, folder: Path, saved: RopeConfig, wanted: RopeConfig, *, any_rope: bool) -> None:
        """No tensor shows it, and a model that turns by other angles than it was trained with only gets worse."""
        if saved == wanted:
            return
        told = f"{folder} was trained with {saved}, this model has {wanted}"
        if not any_rope:
            parameters = json.dumps(saved.to_hf()["rope_parameters"])
            raise CheckpointError(
                f"{told}; give config.json the rope_parameters {parameters} (a recipe: the old model.yarn_factor),"
                " or start a fresh run from its weights with model.load"
            )
        if self.context.is_main:
            warnings.warn(f"{told}: from here on it has the latter", stacklevel=4)

    def load_weights(self, stage: ModelStage, *, any_rope: bool = False) -> None:
        """The policy's weights of the newest checkpoint, and nothing else."""
        self.load(ModelPart(stage), self.open(), any_rope=any_rope)

    @contextlib.contextmanager
    def weights(self, stage: ModelStage) -> Iterator[ParameterSource]:
        """The same for a stage on the device "meta": each parameter is read when it is asked for, by any rank.

        One rank alone reads the large files for their checksums meanwhile: what it was given is right if this ends
        well.
        """
        alone = self.context.topology.world_size == 1
        saved, part = self.open(verify=not alone), ModelPart(stage)
        large = [name for name in saved.manifest.files if alone and name.endswith(".distcp")]
        self._check_fits(part, saved, any_rope=False)
        if alone:
            small = saved.manifest.files.keys() - large
            faults = find_damage(saved.folder, saved.manifest, small)
            faults += find_damage(saved.folder, saved.manifest, large, by_size=True)
            if faults:
                raise damaged(saved.folder, faults)
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as thread:
            check = thread.submit(find_damage, saved.folder, saved.manifest, large)
            try:
                with _unloadable(saved.folder):
                    yield stored_weights(part, saved.folder)
            finally:
                # Damage explains what else went wrong.
                if check.result():
                    raise damaged(saved.folder, check.result())

    def restore_rng(self, saved: Saved) -> bool:
        """Random state of this rank, where the checkpoint was written from the same layout; else False."""
        topology = self.context.topology
        if saved.manifest.parallel != _layout(topology):
            return False
        path = saved.folder / _rng_file(topology.rank)
        try:
            restore_rng_state(torch.load(path, weights_only=True), self.context.device)
        except FAILURES as error:
            raise CheckpointError(f"{path} could not be loaded ({reason(error)}); resume from another step") from error
        return True


def _together(work: Callable[[], T]) -> tuple[T | None, dict[int, str]]:
    """The result of this rank's work, and what failed on which ranks (the same on all of them)."""
    result, failure = None, None
    try:
        result = work()
    except FAILURES as error:
        failure = str(error) if isinstance(error, CheckpointError) else reason(error)
    return result, {rank: text for rank, text in enumerate(gather_objects(failure)) if text is not None}


@contextlib.contextmanager
def _unloadable(folder: Path) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise CheckpointError(
            f"{folder} could not be loaded ({reason(error)}); expected a whole checkpoint written by"
            " megatron-klear: `megatron-klear checkpoint verify` looks at every file of it"
        ) from error


def _layout(topology: Topology) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": topology.tensor_size,
        "pipeline_model_parallel_size": topology.pipeline_size,
        "context_parallel_size": topology.context_size,
        "expert_model_parallel_size": topology.expert_size,
        "data_parallel_size": topology.data_size,
    }


def _write(requests: Iterable[WriteRequest], rng_path: Path, state: dict[str, Any] | None) -> dict[Path, FileEntry]:
    """All files of this rank."""
    entries: dict[Path, FileEntry] = {}
    for request in requests:
        entries |= request.write()
    if state is not None:
        with rng_path.open("wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        entries[rng_path] = file_entry(rng_path)
    return entries


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.pt"


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _packages() -> dict[str, str]:
    """Versions of what shapes the numbers."""
    found = {"megatron-klear": __version__}
    for name in ("torch", "megatron-core", "transformer-engine", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _check_same_model(folder: Path, saved: Qwen3Shape, wanted: Qwen3Shape) -> None:
    """Megatron itself would load a vocabulary of another size without a word, and leave missing rows as they are."""
    if saved.tensor_shapes() == wanted.tensor_shapes() and saved.routing == wanted.routing:
        return
    old, new = dict(saved), dict(wanted)
    differences = ", ".join(f"{name} {old[name]} instead of {new[name]}" for name in new if old[name] != new[name])
    raise CheckpointError(
        f"{folder} is of another model: {differences}; load it with the config.json it was trained with"
    )


def _other_optimizer(folder: Path, found: str | None, wanted: str) -> str:
    if found is None:
        return f"{folder} holds weights without optimizer state; start from them with model.load instead of resuming"
    needed = str(found == "distributed").lower()
    return (
        f"{folder} holds the state of a {found} optimizer, this run has a {wanted} one;"
        f" resume with parallel.use_distributed_optimizer={needed}"
    )
