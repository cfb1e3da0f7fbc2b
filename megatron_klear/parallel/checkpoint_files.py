"""torch's distributed checkpoint files, as far as no process group is needed: what they hold, and an item written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# torch writes other forms too since 2.8; Megatron reads this one.
_FORMAT: dict[str, Any] = (
    {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}
    if "serialization_format" in signature(filesystem._write_item).parameters
    else {}
)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor, and where its archive lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def stored_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """What a folder holds by key. Raises `OSError` or what pickle raises."""
    metadata = FileSystemReader(folder).read_metadata()
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            chunks = []
            for chunk in stored.chunks:
                place = places[key, chunk.offsets]
                chunks.append(
                    StoredChunk(
                        tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length
                    )
                )
            found[key] = StoredTensor(stored.properties.dtype, tuple(stored.size), tuple(chunks))
    return found


def write_item(transforms: Sequence[Any], stream: Any, data: Any, item: Any, *, file: str) -> Any:
    """Append an item of Megatron's plan to a file; what torch wants to know of it. Raises what writing raises."""
    # Without `transforms` in torch before 2.7.
    write: Any = filesystem._write_item
    return write(*transforms, stream, data, item, file, **_FORMAT)
