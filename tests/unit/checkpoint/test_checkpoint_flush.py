"""Files that go to the disk while they are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import megatron_klear.checkpoint.flush as flush
from megatron_klear.checkpoint.flush import DiskFlusher


@contextmanager
def flusher(path: Path) -> Iterator[DiskFlusher]:
    with path.open("wb") as file:
        made = DiskFlusher(file.fileno())
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls were made, in order."""
    calls: list[str] = []
    monkeypatch.setattr(flush, "STEP", 100)
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: calls.append("fdatasync"))
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("fsync"))
    return calls


def test_each_step_is_flushed_and_the_rest_at_the_end(asked: list[str], tmp_path: Path) -> None:
    with flusher(tmp_path / "file") as file:
        for _ in range(3):
            file.wrote(60)
        file.finish()
    assert asked == ["fdatasync", "fsync"]


def test_a_small_file_starts_no_thread(asked: list[str], tmp_path: Path) -> None:
    before = threading.active_count()
    with flusher(tmp_path / "file") as file:
        file.wrote(99)
        assert threading.active_count() == before
        file.finish()
    assert asked == ["fsync"]


def test_writing_does_not_wait_for_a_slow_disk(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: asked.append("slow") or go.wait(10))
    with flusher(tmp_path / "file") as file:
        for _ in range(50):
            file.wrote(100)
        assert asked == ["slow"]
        go.set()
        file.finish()
    assert asked == ["slow", "fsync"]


@pytest.mark.parametrize("more", [0, 1000], ids=["at the end", "at the next step"])
def test_a_failure_of_the_disk_is_not_lost(
    more: int, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with flusher(tmp_path / "file") as file:
        file.wrote(100)
        with pytest.raises(OSError, match="No space left"):
            while more:
                file.wrote(more)
            file.finish()
    assert "fsync" not in asked
