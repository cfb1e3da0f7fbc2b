"""Write Megatron's checkpoint files from this process, and their checksums with them.

Megatron collects writer results through a queue of a spawned manager process, which costs seconds on the first save
and outlives a rank that leaves in a hurry; 0.16 also forks its writers. So a save is planned by Megatron, with a queue
of this process in place of the manager's, and its files are written here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_klear.checkpoint.flush import DiskFlusher
from megatron_klear.checkpoint.manifest import FileEntry
from megatron_klear.errors import KlearError
from megatron_klear.parallel.checkpoint_files import write_item
from megatron_klear.parallel.failures import CollectiveFailure

# What a full disk, a damaged file or another model's file makes torch and Megatron raise.
FAILURES = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
    CollectiveFailure,
)

# Small enough to be in a core's cache when it is hashed and then written.
PIECE = 2**16


class HashedFile(io.RawIOBase):
    """A new file that is written from its beginning to its end, and hashed on the way."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  closed by `close`
        self._digest = hashlib.sha256()
        self._flusher = DiskFlusher(self._file.fileno())
        self._size = 0
        self.failure: OSError | None = None
        """Of a write. torch goes on to finish its archive, and what that raises says nothing of the disk."""

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """All of it. Raises `OSError`."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                count = self._file.write(rest[:PIECE])
                self._digest.update(rest[:count])
                rest = rest[count:]
                self._flusher.wrote(count)
        except OSError as error:
            self.failure = error
            raise
        self._size += size
        return size

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def entry(self) -> FileEntry:
        """Size and checksum, once all is on disk. Raises `OSError`."""
        self._flusher.finish()
        return FileEntry(bytes=self._size, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Also when something failed."""
        self._flusher.close()
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Written:
    """The files of this rank, and what Megatron wants to know of them: {bucket: results} or the first failure."""

    entries: dict[Path, FileEntry]
    outcome: Any


def write_files(transforms: Sequence[Any], buckets: Sequence[Any]) -> Written:
    """Write Megatron's buckets, one file each, at once. A failure is an outcome."""

    def write(bucket: Any) -> tuple[FileEntry, list[Any]] | Exception:
        path, key, (bytes_data, tensor_data) = bucket
        try:
            stream = HashedFile(path)
        except OSError as error:
            return error
        try:
            with stream:
                results = [
                    write_item(transforms, stream, data, item, file=key)
                    for part in (bytes_data, tensor_data)
                    for item, data in part
                ]
                return stream.entry(), results
        # Every rank must hear of it: Megatron gathers the outcomes and raises it everywhere.
        except (*FAILURES, KlearError) as error:
            assert isinstance(error, Exception), "no collective is called here"
            return stream.failure or error

    # Files that are hashed as a whole need no CRC of each record: a fifth of the work. torch reads such files as ever;
    # `unzip` would complain of them. Newer releases keep the option for each thread.
    before = get_crc32_options()
    try:
        with ThreadPoolExecutor(
            max(1, len(buckets)), thread_name_prefix="write", initializer=set_crc32_options, initargs=(False,)
        ) as pool:
            found = list(pool.map(write, buckets))
    finally:
        set_crc32_options(before)
    entries: dict[Path, FileEntry] = {}
    outcome: dict[int, list[Any]] = {}
    for i, (bucket, result) in enumerate(zip(buckets, found, strict=True)):
        if isinstance(result, Exception):
            return Written({}, result)
        entries[Path(bucket[0])], outcome[i] = result
    return Written(entries, outcome)


@contextlib.contextmanager
def in_process_results() -> Iterator[None]:
    """A save that is planned inside puts its results into a queue of this process, and starts none for them."""
    results: queue.Queue[Any] = queue.Queue()
    # The names of 0.16 and of 0.19.
    name = next(n for n in ("_get_write_results_queue", "get_write_results_queue") if n in vars(filesystem_async))
    original = vars(filesystem_async)[name]
    setattr(filesystem_async, name, lambda *_args, **_kwargs: results)
    try:
        yield
    finally:
        setattr(filesystem_async, name, original)
