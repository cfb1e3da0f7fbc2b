"""Hugging Face folders, streamed: one tensor in memory at a time on the way in, one shard on the way out."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import CheckpointError
from megatron_klear.models.hf_bridge import TensorSource

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


class HfWriter:
    """Writes shards as tensors come, into a temporary folder that gets its name only when nothing is missing."""

    def __init__(self, folder: str | Path, shape: Qwen3Shape, *, template: str | Path, max_shard_bytes: int) -> None:
        self.folder = Path(folder)
        self.template = Path(template)
        self.shape = shape
        self.expected = shape.tensor_shapes()
        self.max_shard_bytes = max_shard_bytes
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self._pending: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> HfExport:
        """Write all tensors as `dtype`. Raises, leaving `folder` as it was, if one is missing or misshapen."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        for name, tensor in named_tensors:
            if tuple(tensor.shape) != self.expected.get(name):
                raise CheckpointError(
                    f"refusing to export {name} with shape {tuple(tensor.shape)}: expected {self.expected.get(name)}"
                )
            self._add(name, tensor.to("cpu", dtype))
        self._flush()
        missing = sorted(self.expected.keys() - {name for names in self._files for name in names})
        if missing:
            raise CheckpointError(
                f"refusing to export {self.folder}: {len(missing)} tensors missing, first {missing[0]}"
            )
        self._name_shards()
        self._write_companions(dtype)
        _replace_folder(self.partial, self.folder)
        return HfExport(self.folder, len(self.expected), self._num_bytes, len(self._files))

    def _add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        held = sum(t.numel() * t.element_size() for t in self._pending.values())
        if self._pending and held + size > self.max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._num_bytes += size

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self.partial / f"shard-{len(self._files)}", metadata={"format": "pt"})
            self._files.append(list(self._pending))
            self._pending = {}

    def _name_shards(self) -> None:
        """Hugging Face's names hold the number of shards, which is known only now."""
        total = len(self._files)
        if total == 1:
            (self.partial / "shard-0").rename(self.partial / SINGLE)
            return
        weight_map = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            (self.partial / f"shard-{i}").rename(self.partial / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
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
