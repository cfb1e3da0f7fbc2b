"""Files that are hashed while they are written, and failures that come out as what they were."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron_klear.checkpoint.inprocess import PIECE, HashedFile, write_files
from megatron_klear.checkpoint.manifest import file_entry
from megatron_klear.errors import CheckpointError

# What Megatron hands over; torch knows it since 2.7.
TRANSFORMS = [vars(filesystem)["_StorageWriterTransforms"]()] if "_StorageWriterTransforms" in vars(filesystem) else []


def item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.TENSOR)


def bucket(path: Path, tensors: Any) -> Any:
    return str(path), path.name, ([], tensors)


@pytest.mark.parametrize("size", [0, 1, PIECE, 3 * PIECE + 7])
def test_a_hashed_file_holds_what_was_written_and_knows_its_checksum(tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    with HashedFile(tmp_path / "f") as file:
        assert file.write(b"head") == 4
        assert file.write(memoryview(data)) == size
        assert file.tell() == 4 + size
        entry = file.entry()
    assert (tmp_path / "f").read_bytes() == b"head" + data
    assert entry == file_entry(tmp_path / "f")
    assert entry.sha256 == hashlib.sha256(b"head" + data).hexdigest()


def test_files_are_written_at_once_and_their_tensors_are_where_torch_was_told(tmp_path: Path) -> None:
    tensors = {name: torch.randn(5, 7) for name in "abc"}
    parts = [
        bucket(tmp_path / "0", [(item(n), tensors[n]) for n in "ab"]),
        bucket(tmp_path / "1", [(item("c"), tensors["c"])]),
    ]
    written = write_files(TRANSFORMS, parts)
    assert list(written.outcome) == [0, 1]
    assert written.entries == {tmp_path / name: file_entry(tmp_path / name) for name in "01"}
    for results in written.outcome.values():
        for result in results:
            place = result.storage_data
            data = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            assert torch.equal(torch.load(io.BytesIO(data)), tensors[result.index.fqn])


@pytest.mark.parametrize("failure", [OSError("the disk is full"), CheckpointError("w has shape (3,)")])
def test_what_a_tensor_raises_is_the_outcome_and_no_file_has_an_entry(tmp_path: Path, failure: Exception) -> None:
    def tensors() -> Any:
        yield item("a"), torch.ones(3)
        raise failure

    parts = [bucket(tmp_path / "0", [(item("b"), torch.ones(2))]), bucket(tmp_path / "1", tensors())]
    written = write_files(TRANSFORMS, parts)
    assert written.outcome is failure
    assert written.entries == {}


def test_a_bug_is_no_outcome(tmp_path: Path) -> None:
    def tensors() -> Any:
        yield item("a"), torch.ones(3)
        raise AttributeError("a bug")

    with pytest.raises(AttributeError, match="a bug"):
        write_files(TRANSFORMS, [bucket(tmp_path / "0", tensors())])


def test_a_folder_that_is_not_there_is_an_outcome(tmp_path: Path) -> None:
    no_tensors: list[tuple[WriteItem, Tensor]] = []
    written = write_files(TRANSFORMS, [bucket(tmp_path / "absent" / "0", no_tensors)])
    assert isinstance(written.outcome, FileNotFoundError)
