"""Hugging Face folders, streamed: one tensor in memory at a time, on the way in and on the way out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_klear.checkpoint.flush import DiskFlusher
from megatron_klear.checkpoint.inprocess import PIECE
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import CheckpointError
from megatron_klear.models.hf_bridge import TensorSource, check_shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _weight_map(folder: Path) -> dict[str, str]:
    """File of each tensor, after checking that every file is there."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_index(index)
    elif (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as shard:
            weight_map = dict.fromkeys(shard.keys(), SINGLE)
    else:
        raise CheckpointError(
            f"{folder} holds neither {INDEX} nor {SINGLE}; expected a Hugging Face folder with weights"
        )
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of {len(set(weight_map.values()))} weight files, first of them {absent[0]};"
            " download or copy the folder again"
        )
    return weight_map


def _read_index(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text())
    except ValueError as error:
        raise CheckpointError(f"{index} is not valid JSON ({error}); copy the folder again") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} holds no weight_map of tensor names to file names; copy the folder again")
    return weight_map


def _open(path: Path) -> Any:
    """The open file, a context manager."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from error


def _check_index(folder: Path, weight_map: Mapping[str, str], held: Mapping[str, set[str]]) -> None:
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(
                f"{folder / file} does not hold {name}, but {INDEX} says so; the files are of different models:"
                " copy the folder again"
            )


@contextlib.contextmanager
def open_folder(folder: str | Path, shape: Qwen3Shape) -> Iterator[TensorSource]:
    """A source of full tensors. The folder must hold exactly those of `shape` (a tied lm_head may be there too)."""
    folder = Path(folder)
    weight_map = _weight_map(folder)
    expected = set(shape.tensor_shapes())
    missing = sorted(expected - weight_map.keys())
    unknown = sorted(weight_map.keys() - expected - {"lm_head.weight"})
    if missing or unknown:
        raise CheckpointError(
            f"{folder} does not hold the weights that its config.json describes:"
            f" missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}"
        )
    with contextlib.ExitStack() as stack:
        shards = {name: stack.enter_context(_open(folder / name)) for name in sorted(set(weight_map.values()))}
        _check_index(folder, weight_map, {name: set(shard.keys()) for name, shard in shards.items()})
        for name, expected_shape in shape.tensor_shapes().items():
            check_shape(name, shards[weight_map[name]].get_slice(name).get_shape(), expected_shape)

        def get(name: str) -> Tensor:
            return shards[weight_map[name]].get_tensor(name)

        yield get


@dataclass(frozen=True, slots=True)
class HfExport:
    """What was written."""

    folder: Path
    num_tensors: int
    num_bytes: int
    num_shards: int


# Copied beside the weights when the source folder has them.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a tensor belong."""

    file: str
    start: int
    num_bytes: int


class _OpenFile:
    """A new file of an export."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.flusher = DiskFlusher(self._descriptor)

    def write_at(self, data: bytes | Any, position: int) -> None:
        """All of it. Raises `OSError`."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._descriptor, rest[:PIECE], position)
            rest, position = rest[count:], position + count
            self.flusher.wrote(count)

    def close(self) -> None:
        """Also when something failed."""
        self.flusher.close()
        os.close(self._descriptor)


class _Shards:
    """The files of an export. Shapes say where each tensor belongs, so that it is written as it comes."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> None:
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        parts = _fill(sizes, max_bytes)
        self.folder = folder
        self.num_bytes = sum(sizes.values())
        self.places: dict[str, _Place] = {}
        self._headers: dict[str, bytes] = {}
        for i, names in enumerate(parts):
            file = SINGLE if len(parts) == 1 else f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
            header, starts = _header({name: (shapes[name], sizes[name]) for name in names}, _DTYPE_NAMES[dtype])
            self._headers[file] = header
            self.places |= {name: _Place(file, start, sizes[name]) for name, start in starts.items()}
        self._open: dict[str, _OpenFile] = {}

    @property
    def files(self) -> list[str]:
        """Their names, in order."""
        return list(self._headers)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor of the export's dtype, on the CPU, where it belongs. Raises `OSError`."""
        place = self.places[name]
        if place.file not in self._open:
            self._open[place.file] = _OpenFile(self.folder / place.file)
            self._open[place.file].write_at(self._headers[place.file], 0)
        data = tensor.contiguous().flatten().view(torch.uint8)
        assert data.numel() == place.num_bytes
        self._open[place.file].write_at(data.numpy(), place.start)

    def sync(self) -> None:
        """Wait until all is on disk. Raises `OSError`."""
        for file in self._open.values():
            file.flusher.finish()

    def close(self) -> None:
        """After it nothing is written."""
        while self._open:
            self._open.popitem()[1].close()


def _fill(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Tensors of each file, in order: no file is larger unless one tensor is."""
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= size
    return parts


def _header(tensors: Mapping[str, tuple[tuple[int, ...], int]], dtype: str) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where each tensor (given shape and bytes) starts in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, position = {}, 0
    for name, (shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        starts[name] = position
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Tensors start at a multiple of 64, where vectorised code likes them.
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


class HfWriter:
    """Writes tensors as they come, into a temporary folder that gets its name only when all are there and on disk."""

    def __init__(self, folder: str | Path, shape: Qwen3Shape, *, template: str | Path, max_shard_bytes: int) -> None:
        self.folder = Path(folder)
        self.template = Path(template)
        self.shape = shape
        self.expected = shape.tensor_shapes()
        self.max_shard_bytes = max_shard_bytes
        self.partial = self.folder.with_name(self.folder.name + ".partial")

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> HfExport:
        """Write all tensors as `dtype`. Raises, leaving `folder` as it was, if one is missing or misshapen."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        missing = set(self.expected)
        with contextlib.closing(_Shards(self.partial, self.expected, dtype, self.max_shard_bytes)) as shards:
            for name, tensor in named_tensors:
                if tuple(tensor.shape) != self.expected.get(name):
                    raise CheckpointError(
                        f"refusing to export {name} with shape {tuple(tensor.shape)}: expected"
                        f" {self.expected.get(name)}"
                    )
                shards.write(name, tensor.to("cpu", dtype))
                missing.discard(name)
            if missing:
                raise CheckpointError(
                    f"refusing to export {self.folder}: {len(missing)} tensors missing, first {min(missing)}"
                )
            shards.sync()
        self._write_index(shards)
        self._write_companions(dtype)
        _replace_folder(self.partial, self.folder)
        return HfExport(self.folder, len(self.expected), shards.num_bytes, len(shards.files))

    def _write_index(self, shards: _Shards) -> None:
        if len(shards.files) > 1:
            weight_map = {name: place.file for name, place in shards.places.items()}
            index = {"metadata": {"total_size": shards.num_bytes}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2))

    def _write_companions(self, dtype: torch.dtype) -> None:
        config = json.loads((self.template / "config.json").read_text())
        # The file may say either; transformers reads both.
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        # The recipe may have stretched the context: what reads the folder must turn by the same angles.
        config |= {"max_position_embeddings": self.shape.max_position_embeddings, **self.shape.rope.to_hf()}
        (self.partial / "config.json").write_text(json.dumps(config, indent=2))
        for name in _COMPANIONS:
            if (self.template / name).is_file():
                shutil.copyfile(self.template / name, self.partial / name)


def export_folder(
    named_tensors: Iterable[tuple[str, Tensor]], writer: HfWriter | None, *, dtype: torch.dtype
) -> HfExport | None:
    """Write where there is a writer; ranks without one only take part in the collective that gives the tensors."""
    if writer is not None:
        return writer.write(named_tensors, dtype=dtype)
    for _ in named_tensors:
        pass
    return None


def _replace_folder(source: Path, target: Path) -> None:
    """Give a finished folder its name; an older one of that name is moved away first and removed last."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)
