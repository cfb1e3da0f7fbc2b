"""One run a folder. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from megatron_klear.errors import CheckpointError

LOCK = ".lock"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for as long as the block runs; the kernel gives it free when the process dies, however it does.

    Raises `CheckpointError` if another process has it (its words name that one), or if it cannot be written. Where the
    file system knows no locks, a warning says so.
    """
    with _open(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "an unknown process"
            raise CheckpointError(
                f"{folder} is in use by {holder}; expected one run a folder: wait for it, stop it, or choose another"
                " folder"
            ) from error
        except OSError as error:
            warnings.warn(
                f"{folder / LOCK} cannot be locked ({error.strerror}): this file system does not tell runs apart."
                " Take care that no other run writes there",
                stacklevel=3,
            )
        _sign(file, folder)
        yield


def _open(folder: Path) -> FileIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what a full disk refused must not be tried again when the file is closed.
        return (folder / LOCK).open("ab+", buffering=0)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _sign(file: FileIO, folder: Path) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be written ({error.strerror}); expected a folder with free space that this user may write"
        " to: make room, change its permissions, or choose another folder"
    )
