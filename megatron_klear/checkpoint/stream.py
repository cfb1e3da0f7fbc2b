"""Weights that are read, or made, one parameter at a time while they are written: no rank holds its whole part.

The stage lies on the device "meta": it has the shapes and names of its parameters, and no memory. Megatron plans with
it as with any other, and what its plan names is looked up by the (empty) storages of the parameters.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.checkpoint_files import StoredChunk, StoredTensor, stored_tensors

BlockSource = Callable[[str], Sequence[Tensor]]
"""Gives this rank's shard of a parameter by the stage's name of it, in blocks of rows that lie behind each other."""


def _storage(tensor: Tensor) -> int:
    """What a tensor and its views have in common. Without memory there is no address."""
    return tensor.untyped_storage()._cdata


def _names(stage: ModelStage) -> dict[int, str]:
    return {_storage(parameter): name for name, parameter in stage.named_parameters()}


def _same_part(value: Tensor, placeholder: Tensor) -> Tensor:
    """The part of a parameter's value that a view of its placeholder is of it."""
    return value.as_strided(placeholder.size(), placeholder.stride(), placeholder.storage_offset())


class LateTensors:
    """(item, tensor) of a file to write, each tensor made when its turn comes. For one pass."""

    def __init__(self, planned: Iterable[tuple[Any, Tensor]], stage: ModelStage, source: BlockSource) -> None:
        self._planned, self._names, self._source = planned, _names(stage), source

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        name, blocks = "", list[Tensor]()
        for item, placeholder in self._planned:
            wanted = self._names[_storage(placeholder)]
            # gate and up are two items of one parameter, and two blocks.
            if wanted != name:
                name, blocks = wanted, [block.to(placeholder.dtype).contiguous() for block in self._source(wanted)]
            part = _cut_out(blocks, placeholder)
            # torch.save writes all of a storage.
            yield item, part if part.nbytes == part.untyped_storage().nbytes() else part.clone()


def _cut_out(blocks: Sequence[Tensor], placeholder: Tensor) -> Tensor:
    """The part of a parameter that a view of its placeholder is of it: a block, or cut from all of them."""
    position = 0
    for block in blocks:
        if (position, block.numel()) == (placeholder.storage_offset(), placeholder.numel()):
            return block.view(placeholder.size())
        position += block.numel()
    return _same_part(torch.cat(list(blocks)), placeholder)


ParameterSource = Callable[[str], Tensor]
"""Gives this rank's shard of a parameter by the stage's name of it; valid until the next call."""


class StoredWeights:
    """This rank's parameters of a checkpoint by name, each read when it is asked for. Not a collective."""

    def __init__(self, sharded_state: dict[str, Any], stage: ModelStage, folder: Path) -> None:
        """`sharded_state` is of `stage`."""
        apply_factories(sharded_state)
        names = _names(stage)
        self._shards: dict[str, list[ShardedTensor]] = {}
        for shard in nested_values(sharded_state):
            if isinstance(shard, ShardedTensor) and shard.data is not None:
                self._shards.setdefault(names[_storage(shard.data)], []).append(shard)
        self._parameters = dict(stage.named_parameters())
        self._folder = folder
        self._stored = stored_tensors(folder)
        self._files: dict[str, mmap.mmap] = {}
        self._memory: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor:
        """Valid until the next call. Raises ValueError or KeyError for what is not in the files, or of another shape
        there; OSError.
        """
        parameter = self._parameters[name]
        shards = self._shards[name]
        if len(shards) == 1 and (whole := self._stored_as(shards[0])) is not None:
            return whole.view(parameter.shape).to(parameter.dtype)
        kind = (parameter.shape, parameter.dtype)
        # New memory for each layer would cost as much as reading it.
        if kind not in self._memory:
            self._memory[kind] = torch.empty_like(parameter, device="cpu")
        value = self._memory[kind]
        for shard in shards:
            assert shard.data is not None
            self._read(shard, _same_part(value, shard.data))
        return value

    def _stored_as(self, shard: ShardedTensor) -> Tensor | None:
        """The bytes of the file, if they are this shard and nothing else."""
        bounds = _bounds(shard)
        stored = self._checked(shard)
        for chunk in stored.chunks:
            if (chunk.offsets, chunk.sizes) == bounds:
                return self._bytes_of(shard.key, chunk, stored.dtype)
        return None

    def _read(self, shard: ShardedTensor, target: Tensor) -> None:
        stored, (offsets, sizes) = self._checked(shard), _bounds(shard)
        if shard.allow_shape_mismatch:
            # Rows of a vocabulary that was padded to fewer.
            target.zero_()
        target, missing = target.view(sizes), target.numel()
        for chunk in stored.chunks:
            starts = [max(pair) for pair in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(a + size, b + other)
                for a, size, b, other in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                source = self._bytes_of(shard.key, chunk, stored.dtype)
                part = _part(target, offsets, starts, ends)
                part.copy_(_part(source, chunk.offsets, starts, ends))
                missing -= part.numel()
        if missing and not shard.allow_shape_mismatch:
            raise ValueError(f"{missing} numbers of {shard.key} from {offsets} on are in no file")

    def _checked(self, shard: ShardedTensor) -> StoredTensor:
        stored, shape = self._stored[shard.key], tuple(shard.global_shape)
        if not shard.allow_shape_mismatch and stored.shape != shape:
            raise ValueError(f"expected {shard.key} of shape {shape}, found {stored.shape}")
        return stored

    def _bytes_of(self, key: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        """A stored chunk without a copy: pages of the file, read when they are looked at."""
        if chunk.file not in self._files:
            with (self._folder / chunk.file).open("rb") as file:
                # Private, so that torch may take it for writable.
                self._files[chunk.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = _only_tensor(memoryview(self._files[chunk.file])[chunk.start : chunk.start + chunk.num_bytes])
        size = math.prod(chunk.sizes) * dtype.itemsize
        if len(data) != size:
            raise ValueError(f"{chunk.file} holds {len(data)} bytes of {key}, expected {size}")
        return torch.frombuffer(data, dtype=dtype).view(chunk.sizes)


def _bounds(shard: ShardedTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a shard lies in its tensor: offsets and sizes."""
    return tuple(shard.global_offset), (1,) * shard.prepend_axis_num + tuple(shard.local_shape)


def _part(tensor: Tensor, offsets: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """What lies between `starts` and `ends` (global) of a tensor that begins at `offsets`."""
    for dim, (offset, start, end) in enumerate(zip(offsets, starts, ends, strict=True)):
        tensor = tensor.narrow(dim, start - offset, end - start)
    return tensor


def _only_tensor(archive: memoryview) -> memoryview:
    """The bytes of the one tensor that torch.save put into this: a zip archive that stores its records as they are."""
    try:
        with zipfile.ZipFile(_Window(archive)) as file:
            (record,) = (info for info in file.infolist() if info.filename.endswith("/data/0"))
        # A record follows a header of its own, which may be padded otherwise than the directory's entry says.
        name_size, extra_size = struct.unpack_from("<HH", archive, record.header_offset + 26)
    except (zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"expected an archive that torch.save wrote ({error})") from error
    start = record.header_offset + 30 + name_size + extra_size
    return archive[start : start + record.file_size]


class _Window(io.RawIOBase):
    """Memory as a file to read."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._position = data, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = start + offset
        if self._position < 0:
            raise OSError("before the beginning")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
