"""One run a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_klear.checkpoint.lock import LOCK, folder_lock
from megatron_klear.errors import CheckpointError


@contextmanager
def held_by_another(folder: Path) -> Iterator[int]:
    """A process that holds the folder until it is killed."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with folder_lock(folder):
                os.write(told, b"x")
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as pid:
        wanted = (
            rf"{tmp_path} is in use by process {pid} on \S+ since \d{{4}}-.*\+00:00; expected one run a folder: wait"
        )
        for _ in range(2):
            with pytest.raises(CheckpointError, match=wanted), folder_lock(tmp_path):
                pytest.fail("two runs in one folder")
    # Its holder was killed.
    with folder_lock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()


def test_a_lock_of_this_process_counts_too(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()} "), folder_lock(tmp_path):
        pytest.fail("two runs in one folder")
    with folder_lock(tmp_path), folder_lock(tmp_path / "other"):
        pass


def test_an_error_inside_gives_it_free_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mine"), folder_lock(tmp_path):
        raise FileNotFoundError("mine")
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK).read_text().count("\n") == 1


def test_it_makes_the_folder(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "runs" / "one"):
        assert (tmp_path / "runs" / "one" / LOCK).is_file()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    wanted = rf"\.lock cannot be locked \({os.strerror(code)}\).*Take care that no other run"
    with pytest.warns(UserWarning, match=wanted) as caught, folder_lock(tmp_path):
        pass
    # It points at the line that asked for the lock.
    assert caught[0].filename == __file__


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file" / "below", "Not a directory"), (tmp_path / "file", "File exists")):
        wanted = re.escape(f"{folder} cannot be written ({reason}); expected a folder with free space")
        with pytest.raises(CheckpointError, match=wanted), folder_lock(folder):
            pytest.fail("locked a file")
    (tmp_path / "taken" / LOCK).mkdir(parents=True)
    with (
        pytest.raises(CheckpointError, match=r"taken cannot be written \(Is a directory\)"),
        folder_lock(tmp_path / "taken"),
    ):
        pytest.fail("locked a folder")


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Permission denied\)"), folder_lock(tmp_path):
        pytest.fail("wrote into a read-only folder")


def test_a_read_only_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Read-only file system\)"), folder_lock(tmp_path):
        pytest.fail("wrote on a read-only disk")


def test_a_full_disk_is_named_and_the_lock_is_given_back(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(File too large\)"), folder_lock(tmp_path):
            pytest.fail("wrote on a full disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with folder_lock(tmp_path):
        pass
