"""Weights through a folder that the trainer's first rank and the servers see.

Under the weights folder whatever is named version_* (and nothing behind the number) is whole at every moment:

    version_0000007           complete, on disk
    version_0000007.partial   being written
    version_0000007.replaced  an older one of that version, while a newer one takes its name
    version_0000007.removed   being deleted
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_klear.errors import WeightSyncError
from megatron_klear.types import Transport
from megatron_klear.weight_sync.crew import Crew

MAX_SHARD_BYTES = 4 * 1024**3

_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_VERSION = re.compile(r"version_(\d{7,})", re.ASCII)
_LEFTOVER = re.compile(rf"{_VERSION.pattern}\.(partial|replaced|removed)", re.ASCII)


class DiskTransport:
    """Writes a Hugging Face folder for each version under `folder`; the newest `keep` stay.

    `template`: a folder with the config.json and tokenizer files that servers shall read; weights in it are ignored.
    One shard is held in memory at a time.
    """

    kind: Transport = "disk"

    def __init__(
        self, folder: str | Path, *, template: str | Path, keep: int = 2, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        assert keep >= 1
        # Servers run in a folder of their own.
        self.folder = Path(folder).absolute()
        self.template = Path(template)
        self.keep = keep
        self.max_shard_bytes = max_shard_bytes
        if not (self.template / "config.json").is_file():
            raise WeightSyncError(
                f"{self.template} holds no config.json; expected the Hugging Face folder that the servers were started"
                " with, or one like it"
            )

    def version_folder(self, version: int) -> Path:
        """Where a version lies."""
        return self.folder / f"version_{version:07d}"

    def stage(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the folder while servers still draw. Raises `WeightSyncError`; an older folder is then as it was."""
        try:
            self._remove_leftovers()
            self._write(named_tensors, version)
            self._prune(version)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"cannot write the weights of version {version} under {self.folder}: {error}; expected a folder of"
                f" rank 0 with room for {self.keep + 1} versions"
            ) from error

    async def send(self, crew: Crew, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Let every server read the folder."""
        folder = str(self.version_folder(version))
        await crew.each("update_from_disk", lambda member: member.server.update_from_disk(folder, version))

    async def close(self) -> None:
        """The folders stay: a server may be restarted from them."""

    def _write(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        final = self.version_folder(version)
        partial = final.with_suffix(".partial")
        partial.mkdir(parents=True)
        try:
            _write_weights(partial, named_tensors, self.max_shard_bytes)
            for source in sorted(self.template.iterdir()):
                if source.is_file() and not _is_weights(source.name):
                    _link_or_copy(source, partial / source.name)
            _sync(partial)
            _rename(partial, final)
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _prune(self, version: int) -> None:
        """Keep the newest by the time they were written: after a run went back, higher numbers are the older ones."""
        others = [path for path in self.folder.iterdir() if _VERSION.fullmatch(path.name)]
        others = [path for path in others if path != self.version_folder(version)]
        others.sort(key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
        for path in others[self.keep - 1 :]:
            doomed = path.with_suffix(".removed")
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        """What a killed run left; a version that was being replaced gets its name back."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                final = path.with_suffix("")
                if path.suffix == ".replaced" and not final.exists():
                    path.rename(final)
                else:
                    shutil.rmtree(path)


def _write_weights(folder: Path, named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    shards: list[list[str]] = []
    total = 0
    shard: dict[str, Tensor] = {}
    room = max_bytes

    def write() -> None:
        file = folder / f"shard-{len(shards)}"
        save_file(shard, file, metadata={"format": "pt"})
        _sync(file)
        shards.append(list(shard))

    for name, tensor in named_tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and size > room:
            write()
            shard, room = {}, max_bytes
        # A copy: tensors may be views of one storage, which the format forbids, and it must not change under us.
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        room -= size
        total += size
    if shard:
        write()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Give the shards their names, now that their number is known, and write the index where there are several."""
    if not shards:
        raise WeightSyncError(f"no tensors came for {folder}; expected the model's weights")
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
    _sync(folder / _INDEX)


def _is_weights(name: str) -> bool:
    return name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(source, target)
        _sync(target)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(partial: Path, final: Path) -> None:
    """Give a finished folder its name; an older one of that name steps aside, and back if the renaming fails."""
    old = final.with_suffix(".replaced")
    if final.exists():
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    # Who still reads the older one (NFS) keeps it a while: the next push deletes it.
    with contextlib.suppress(OSError):
        shutil.rmtree(old)
