"""What runs in a process that is going to be killed: it tells where it is, and can kill its own group at any point.

The product has no hooks for this: functions and system calls are wrapped from outside, in the doomed process alone.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import mmap
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_klear import cli
from megatron_klear.checkpoint import folder, store
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.data.prompts import ItemStream
from megatron_klear.report import record
from megatron_klear.report.jsonl import JsonlWriter
from megatron_klear.training import folders, learner, rl, run

START = "start-up"
PHASES: tuple[tuple[Any, str, str], ...] = (
    (run, "claim_folders", "claim"),
    (folders, "recover", "recover"),
    (store.CheckpointStore, "open", "load"),
    (store.CheckpointStore, "load", "load"),
    (record, "cut_after", "cut"),
    (rl.RlTrainer, "_plan", "rollout"),
    (rl, "annotate", "annotate"),
    (learner.Learner, "step", "update"),
    (run.Run, "push_weights", "sync"),
    (record.RunRecorder, "log", "metrics"),
    (record.RunRecorder, "log_samples", "metrics"),
    (run.Run, "evaluate", "evaluate"),
    (store.CheckpointStore, "begin", "save"),
    (store.CheckpointStore, "wait", "save"),
    (store, "publish", "rename"),
    (folder, "write_tracker", "tracker"),
    (Retention, "apply", "prune"),
    (run.Run, "export", "export"),
)
"""Owner, function, and the phase that a run is in while it is called."""
WRITER = "write"
"""Phase of every other thread: that which writes a checkpoint, and TensorBoard's."""
_SYSTEM_CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
_SLOT, _SLOTS = 96, 3


@dataclass(frozen=True)
class Point:
    """The `number`-th event of a phase on one rank: a change of the disk, or a wrapped function's start or end."""

    phase: str
    number: int
    side: Literal["before", "after"]
    rank: int = 0


class Board:
    """Where each rank stands, in memory that its killer can still read."""

    def __init__(self, world_size: int) -> None:
        self._memory = mmap.mmap(-1, _SLOT * _SLOTS * world_size)

    def write(self, rank: int, slot: int, text: str) -> None:
        begin = _SLOT * (_SLOTS * rank + slot)
        self._memory[begin : begin + _SLOT] = text.encode()[:_SLOT].ljust(_SLOT, b"\0")

    def _read(self, rank: int, slot: int) -> str:
        begin = _SLOT * (_SLOTS * rank + slot)
        return self._memory[begin : begin + _SLOT].rstrip(b"\0").decode(errors="replace")

    def phase(self, rank: int) -> str:
        """Of the main thread."""
        return self._read(rank, 0) or START

    def writes(self, rank: int) -> bool:
        """Whether another thread writes a checkpoint."""
        return self._read(rank, 1) == WRITER

    def point(self, rank: int) -> str:
        """What the rank was about to do, or had done, when it killed its group; "" if it did not."""
        return self._read(rank, 2)


class Watch:
    """Counts the events of this process by phase, and kills its process group at one of them."""

    def __init__(self, board: Board, rank: int, point: Point | None) -> None:
        self.counts: Counter[str] = Counter()
        self._board, self._rank = board, rank
        self._point = point if point is not None and point.rank == rank else None
        self._main = threading.main_thread()
        self._stack = [START]
        self._lock = threading.Lock()

    def passes(self, label: str, *, tear: Callable[[], object] | None = None) -> Callable[[], None]:
        """Count an event that is about to happen; what is returned must be called when it has happened.

        `tear` leaves it half done, where that is possible.
        """
        phase = self._stack[-1] if threading.current_thread() is self._main else WRITER
        with self._lock:
            self.counts[phase] += 1
            point = self._point
            if point is None or (phase, self.counts[phase]) != (point.phase, point.number):
                return lambda: None
        if point.side == "before":
            if tear is not None:
                tear()
            self._die(f"{phase}: before {label}")
        return lambda: self._die(f"{phase}: after {label}")

    def _die(self, label: str) -> None:
        self._board.write(self._rank, 2, label)
        os.killpg(0, signal.SIGKILL)

    def enter(self, phase: str) -> None:
        if threading.current_thread() is self._main:
            self._stack.append(phase)
            self._board.write(self._rank, 0, phase)

    def leave(self) -> None:
        if threading.current_thread() is self._main:
            self._stack.pop()
            self._board.write(self._rank, 0, self._stack[-1])

    def wrap_phase(self, owner: Any, name: str, phase: str) -> None:
        real = vars(owner)[name]

        @functools.wraps(real)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            try:
                self.passes(f"{name} starts")()
                result = real(*args, **kwargs)
                self.passes(f"{name} ends")()
                return result
            finally:
                self.leave()

        setattr(owner, name, stand_in)

    def wrap_writer(self) -> None:
        """The function of a checkpoint's writer thread."""
        real = store._write

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self._board.write(self._rank, 1, WRITER)
            try:
                return real(*args, **kwargs)
            finally:
                self._board.write(self._rank, 1, "")

        store._write = stand_in

    def wrap_system_call(self, name: str) -> None:
        real = vars(os)[name]

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            done = self.passes(f"{name} {_brief(args)}")
            try:
                return real(*args, **kwargs)
            finally:
                done()

        setattr(os, name, stand_in)

    def wrap_open(self, output: Path) -> None:
        """`open` for writing below a folder: a kill after it leaves an empty file."""
        real = io.open

        def stand_in(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            is_ours = not isinstance(file, int) and str(file).startswith(str(output))
            done = self.passes(f"open {_brief((file,))}") if is_ours and set(mode) & set("wxa+") else None
            result = real(file, mode, *args, **kwargs)
            if done is not None:
                done()
            return result

        for module in (io, builtins):
            vars(module)["open"] = stand_in

    def wrap_append(self) -> None:
        """A line of metrics or samples: a kill before it leaves half a line."""
        real = JsonlWriter.append

        def stand_in(writer: JsonlWriter, records: Any) -> None:
            done = self.passes(f"append {writer.path.name}", tear=lambda: writer._file.write(b'{"step": 1, "ti'))
            real(writer, records)
            done()

        JsonlWriter.append = stand_in  # pyright: ignore[reportAttributeAccessIssue]  names of arguments


def _brief(args: tuple[Any, ...]) -> str:
    return " ".join(Path(arg).name for arg in args if isinstance(arg, str | os.PathLike))


def _tracker_first() -> None:
    """The tracker names what is not there yet."""
    real = store.CheckpointStore._prepare

    def stand_in(self: store.CheckpointStore, partial: Path, models: Any, record: store.RunRecord) -> None:
        real(self, partial, models, record)
        if self.context.is_main:
            folder.write_tracker(self.folder, record.step)

    store.CheckpointStore._prepare = stand_in


def _name_first() -> None:
    """A checkpoint has its name before its files are complete."""

    def begin(checkpoints: Path, step: int) -> Path:
        return folder.step_folder(checkpoints, step)

    def publish(checkpoints: Path, step: int) -> Path:
        folder.write_tracker(checkpoints, step)
        return folder.step_folder(checkpoints, step)

    store.partial_folder = begin
    store.publish = publish


def _uncut() -> None:
    record.cut_after = lambda path, step: None


def _no_cursor() -> None:
    ItemStream.restore = lambda self, state: None


MUTANTS: Mapping[str, Callable[[], None]] = {
    "tracker first": _tracker_first,
    "name first": _name_first,
    "metrics not cut": _uncut,
    "cursor not restored": _no_cursor,
}
"""Mistakes that a campaign must find."""


@dataclass(frozen=True)
class Attempt:
    """One start of a command, `world_size` ranks in one process group."""

    argv: tuple[str, ...]
    output: Path
    log: Path
    world_size: int = 1
    point: Point | None = None
    mutant: str | None = None
    counts: Path | None = None
    """Where the ranks leave their counts of events, as counts.RANK."""


def lead(attempt: Attempt, board: Board, port: int) -> int:
    """In a fresh process: start the ranks as torchrun would, and wait for them; the largest exit code."""
    os.setsid()
    out = os.open(attempt.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    pids = []
    for rank in range(attempt.world_size):
        pid = os.fork()
        if pid == 0:
            _as_rank(attempt, board, rank, port)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) % 256 for pid in pids)


def _as_rank(attempt: Attempt, board: Board, rank: int, port: int) -> None:
    code = 1
    # Whatever becomes of the one that started it, it ends.
    signal.alarm(900)
    with contextlib.suppress(BaseException):
        try:
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(attempt.world_size),
            )
            if attempt.mutant is not None:
                MUTANTS[attempt.mutant]()
            watch = _watched(attempt, board, rank)
            code = cli.main(attempt.argv)
            if attempt.counts is not None:
                lines = "".join(f"{number} {phase}\n" for phase, number in watch.counts.items())
                attempt.counts.with_suffix(f".{rank}").write_text(lines)
        except BaseException:
            traceback.print_exc()
            raise
    os._exit(code)


def _watched(attempt: Attempt, board: Board, rank: int) -> Watch:
    watch = Watch(board, rank, attempt.point)
    for owner, name, phase in PHASES:
        watch.wrap_phase(owner, name, phase)
    for name in _SYSTEM_CALLS:
        watch.wrap_system_call(name)
    watch.wrap_open(attempt.output)
    watch.wrap_append()
    watch.wrap_writer()
    return watch
