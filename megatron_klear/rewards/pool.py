"""Killable verifier processes: jobs go out over pipes, one deadline an answer, a dead worker is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

from megatron_klear.errors import RewardError

Verdict = Literal["correct", "wrong", "not_parsed", "bad_gold", "timeout", "worker_died"]
_VERDICTS: dict[bytes, Verdict] = {
    b"correct": "correct",
    b"wrong": "wrong",
    b"not_parsed": "not_parsed",
    b"bad_gold": "bad_gold",
}

START_TIMEOUT_S = 60.0
# sympy's and antlr's caches grow by some 2.5 MB a thousand answers; a fresh process costs half a second.
MAX_ANSWERS_PER_WORKER = 20_000

# Not multiprocessing's spawn: that imports the parent's main module, and a training script loads torch.
_CHILD = """
import sys
root, descriptor, max_cpu_s = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from megatron_klear.rewards.worker import main
main(int(descriptor), float(max_cpu_s))
"""
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class Job:
    """One question for a worker. Without a prediction: does the gold parse? `boxed`: not prose, a box's content."""

    gold: str
    prediction: str | None = None
    boxed: bool = True


class _Worker:
    """One child process. `deadline` is None while it is idle; `job` is None while it is idle or still starting."""

    def __init__(self, timeout_s: float) -> None:
        self.connection, child_end = Pipe()
        with child_end:
            descriptor = child_end.fileno()
            arguments = [_PACKAGE_ROOT, str(descriptor), str(2 * timeout_s + 1)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.job: int | None = None
        self.deadline: float | None = time.monotonic() + START_TIMEOUT_S
        self.num_answers = 0

    @property
    def is_idle(self) -> bool:
        return self.deadline is None

    @property
    def is_spent(self) -> bool:
        """Idle, and gone (killed from outside) or grown too large."""
        return self.is_idle and (self.process.poll() is not None or self.num_answers >= MAX_ANSWERS_PER_WORKER)

    def send(self, index: int, job: Job, timeout_s: float) -> None:
        self.connection.send_bytes(json.dumps(asdict(job)).encode())
        self.job, self.deadline = index, time.monotonic() + timeout_s

    def finish(self) -> None:
        self.num_answers += self.job is not None
        self.job = self.deadline = None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """Spreads jobs over worker processes from one thread. Workers start with the first job that needs them."""

    def __init__(self, *, num_workers: int, timeout_s: float) -> None:
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict a job, in order. Raises `RewardError` if a worker cannot start."""
        waiting = deque(enumerate(jobs))
        verdicts: dict[int, Verdict] = {}
        try:
            while len(verdicts) < len(jobs):
                self._start(len(jobs) - len(verdicts))
                self._assign(waiting, verdicts)
                self._collect(verdicts)
        finally:
            # After an interrupt some still work on answers that nobody waits for.
            for worker in [worker for worker in self._workers if not worker.is_idle and worker.job is not None]:
                self._remove(worker)
        return [verdicts[index] for index in range(len(jobs))]

    def close(self) -> None:
        """End every worker, whatever it is doing."""
        while self._workers:
            self._remove(self._workers[-1])

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _start(self, num_open_jobs: int) -> None:
        for worker in [worker for worker in self._workers if worker.is_spent]:
            self._remove(worker)
        while len(self._workers) < min(self._num_workers, num_open_jobs):
            self._workers.append(_Worker(self._timeout_s))

    def _assign(self, waiting: deque[tuple[int, Job]], verdicts: dict[int, Verdict]) -> None:
        for worker in [worker for worker in self._workers if worker.is_idle]:
            if not waiting:
                return
            index, job = waiting.popleft()
            try:
                worker.send(index, job, self._timeout_s)
            except OSError:
                verdicts[index] = "worker_died"
                self._remove(worker)

    def _collect(self, verdicts: dict[int, Verdict]) -> None:
        """Wait for the next answer, death or deadline, and take everything that is due."""
        deadlines = {worker: worker.deadline for worker in self._workers if worker.deadline is not None}
        now = time.monotonic()
        patience = max(0.0, min(deadlines.values(), default=now) - now)
        readable = wait([worker.connection for worker in deadlines], patience)
        now = time.monotonic()
        for worker, deadline in deadlines.items():
            # An answer that is there counts, even if the deadline passed while it was on its way.
            if worker.connection in readable:
                self._receive(worker, verdicts)
            elif deadline <= now:
                self._give_up(worker, "timeout", verdicts)

    def _receive(self, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._give_up(worker, "worker_died", verdicts)
            return
        if worker.job is not None:
            verdicts[worker.job] = _VERDICTS[message]
        worker.finish()

    def _give_up(self, worker: _Worker, verdict: Verdict, verdicts: dict[int, Verdict]) -> None:
        self._remove(worker)
        if worker.job is None:
            what = f"exit code {worker.process.returncode}" if verdict == "worker_died" else f"{START_TIMEOUT_S:g} s"
            raise RewardError(
                f"a math verifier process did not become ready ({what}); expected it to import math_verify under"
                f" {sys.executable}: see its message on stderr; if the package is missing: pip install math-verify"
            )
        verdicts[worker.job] = verdict
