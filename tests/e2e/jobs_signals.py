"""Runs that get a signal, and runs that meet in one folder."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from e2e.jobs_killed import Attempt
from e2e.jobs_runs import Finished, command
from e2e.kill_campaign import Group
from megatron_klear.checkpoint.lock import LOCK
from megatron_klear.training import rl


def signalled(rank: int, world_size: int, argv: list[str], signals: dict[int, list[int]], step: int) -> Finished:
    """`megatron-klear ARGV`, in which each rank of `signals` sends itself those in the middle of a step."""
    real, calls = rl.annotate, iter(range(1, 1000))

    def stand_in(*args: object) -> dict[str, float]:
        if next(calls) == step:
            for number in signals.get(rank, []):
                os.kill(os.getpid(), number)
        return real(*args)  # pyright: ignore[reportArgumentType]

    rl.annotate = stand_in
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    done = command(rank, world_size, argv)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    # While the process ends a further signal must not kill it; where none came, nothing has changed.
    assert after == ([signal.SIG_IGN] * 2 if signals.get(rank) else before)
    return done


@dataclass(frozen=True)
class Met:
    """Two runs in one folder: their exit codes, what the second said, and who held the folder."""

    first: int
    second: int
    said: str
    holder: int


def meet(rank: int, world_size: int, recipe: str, output: str) -> Met:
    """Start a run, and the same again while the first trains."""
    folder = Path(output)
    logs = [folder.with_name(f"{folder.name}_{name}.log") for name in ("first", "second")]
    metrics = folder / "metrics.jsonl"
    first = Group(Attempt(("rl", recipe), folder, logs[0]))
    try:
        assert not first.ended(60, until=lambda: metrics.is_file() and metrics.stat().st_size > 0), logs[0].read_text()
        holder = int((folder / LOCK).read_text().split()[1])
        assert os.getpgid(holder) == first.leader
        # It must not be done before the second has looked.
        os.kill(holder, signal.SIGSTOP)
        second = Group(Attempt(("rl", recipe), folder, logs[1]))
        if not second.ended(30):
            second.kill()
        code = second.code()
        os.kill(holder, signal.SIGCONT)
        if not first.ended(60):
            first.kill()
        return Met(first.code(), code, logs[1].read_text(), holder)
    finally:
        first.kill()
