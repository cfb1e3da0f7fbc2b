"""Stopping at a step's end when the machine is taken away: SIGTERM, and SIGUSR1 as Slurm sends it ahead of a limit."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from megatron_klear.parallel.broadcast import largest
from megatron_klear.parallel.topology import ParallelContext

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Remembers a signal until somebody asks; a context manager, which puts the old handlers back if none came.

    A second signal changes nothing, also not while the process ends: launchers send one to every process of a group
    and pass on their own as well.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._old[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_IGN if self._seen else handler)

    def agreed(self, context: ParallelContext) -> str | None:
        """Name of the signal that any rank got, on every rank. A collective."""
        number = largest(self._seen, context)
        return signal.Signals(number).name if number else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._seen = number
