"""manifest.json: what a checkpoint is of, and the checksum of every file in it. Needs no torch.

The manifest is the last file written before a checkpoint gets its name, so a folder with a manifest was whole; the
checksums say whether it still is. It holds a checksum of itself too.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat, ValidationError

from megatron_klear.config.base import Config, NonNegativeInt, PositiveInt
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import CheckpointError

MANIFEST = "manifest.json"
# Raised when a reader of the older form would misread the newer one.
FORMAT = 1
POLICY = "policy"
ANOTHER = (
    "`megatron-klear checkpoint list` shows which checkpoints beside it are whole:"
    " go on from one of them with checkpoint.ckpt_step"
)


class FileEntry(Config):
    """One file: its size, and what `sha256sum` prints for it."""

    bytes: NonNegativeInt
    sha256: str


class ModelEntry(Config):
    """One model of the checkpoint. The policy lies in the folder itself, others in a folder of their name."""

    shape: Qwen3Shape
    version: NonNegativeInt
    """Optimizer updates made; the learning rate follows from it."""
    optimizer: Literal["distributed", "plain"] | None = None
    """Form of its optimizer's state; None if only weights were saved."""


class Manifest(Config):
    """All that a reader needs to know before it opens one of Megatron's files."""

    format: PositiveInt = FORMAT
    kind: Literal["sft", "rl", "weights"]
    """What kind of run wrote it; `weights` for a converted model."""
    step: NonNegativeInt
    saved_at: str
    """UTC, ISO 8601."""
    params_dtype: str
    world_size: PositiveInt
    parallel: dict[str, int]
    """The layout it was written from. Any other can read it."""
    models: dict[str, ModelEntry]
    tokenizer: str | None = None
    """Fingerprint of the tokenizer; None for weights alone."""
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Finite metrics of the step, for `keep_best` and for people."""
    packages: dict[str, str]
    files: dict[str, FileEntry]
    """By path inside the checkpoint; the manifest itself is left out."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.files.values())


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, and wait for the disk. Raises `OSError`."""
    body = manifest.model_dump(mode="json")
    with (folder / MANIFEST).open("w") as out:
        json.dump({"manifest_sha256": _digest(body), **body}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `CheckpointError` if it is missing, damaged or of a newer format."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}; expected a checkpoint written by megatron-klear. Weights in Hugging Face's"
            " form become one with `megatron-klear convert import`"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {ANOTHER}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__} instead of a JSON object; {ANOTHER}")
    body = {key: value for key, value in raw.items() if key != "manifest_sha256"}
    found = body.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{folder} has format {found}, this megatron-klear reads up to {FORMAT}; it was written by a newer version"
            f" (packages: {body.get('packages')}): upgrade, or load another checkpoint"
        )
    if raw.get("manifest_sha256") != _digest(body):
        raise CheckpointError(f"{path} is damaged: it does not match its own checksum; {ANOTHER}")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest ({error}); {ANOTHER}") from error


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file as it is now. Raises `OSError`."""
    with path.open("rb") as file:
        return FileEntry(bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def find_damage(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, by_size: bool = False
) -> list[str]:
    """One line for each file (of `names`, or of all) that is missing, cut short or changed. [] means whole.

    `by_size` reads none of them, and so finds no changed bytes.
    """

    def look(name: str) -> str | None:
        return _fault(folder / name, name, manifest.files[name], by_size=by_size)

    # Large files at once: a checksum is the work of one core. One core is left to who reads or writes meanwhile.
    with ThreadPoolExecutor(min(8, max(1, (os.cpu_count() or 1) - 1)), thread_name_prefix="checksum") as pool:
        faults = list(pool.map(look, sorted(manifest.files if names is None else names)))
    return [fault for fault in faults if fault is not None]


def _fault(path: Path, name: str, wanted: FileEntry, *, by_size: bool) -> str | None:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if status.st_size != wanted.bytes:
            return f"{name} has {status.st_size} bytes instead of {wanted.bytes}"
        if not by_size and file_entry(path).sha256 != wanted.sha256:
            return f"{name} has changed since it was written (its checksum differs)"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return None


def damaged(folder: Path, faults: Iterable[str]) -> CheckpointError:
    """The error of a checkpoint that `find_damage` found something in."""
    return CheckpointError(f"{folder} is damaged: {'; '.join(faults)}. {ANOTHER}")
