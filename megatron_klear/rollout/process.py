"""The rollout process, as rank 0 of the trainer sees it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from megatron_klear.errors import KlearError, RolloutError, WeightsWanted
from megatron_klear.rollout.jobs import FleetStatus, Job, JobDone, ProcessSettings
from megatron_klear.rollout.local_server import GRACE_S, last_lines
from megatron_klear.rollout.scoring import make_scorer
from megatron_klear.rollout.worker import (
    LOG_NAME,
    Answer,
    BeginPush,
    Cancel,
    Close,
    Command,
    EndPush,
    Failure,
    GetStatus,
    PushNeeded,
    Result,
    Submit,
    main,
)
from megatron_klear.types import ServerAddress

# The servers' own grace, and the end of the reward's processes.
CLOSE_TIMEOUT_S = GRACE_S + 20.0
# Nothing but a push waits for anything.
ANSWER_TIMEOUT_S = 120.0


class RolloutProcess:
    """Starts the process, which keeps its servers running until `close`; a `PushControl`. For one thread."""

    def __init__(self, settings: ProcessSettings) -> None:
        self.settings = settings
        self.log_file = Path(settings.log_dir) / LOG_NAME
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        # Spawned, not forked: the trainer has threads and an accelerator's context.
        context = multiprocessing.get_context("spawn")
        self._commands, commands = context.Pipe()
        self._results, results = context.Pipe(duplex=False)
        arguments = (settings, commands, results, None if settings.reward is None else make_scorer)
        self._process = context.Process(target=main, args=arguments, name="rollout")
        self._process.start()
        commands.close()
        results.close()
        self._ready: deque[JobDone | KlearError] = deque()
        self._error: KlearError | None = None
        self._num_pushes = 0
        self._is_push_needed = False
        # Without it an interpreter that ends would wait for a process that waits for it.
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        """Give jobs out; returns at once. Raises `RolloutError` for an id of a job or request that is running."""
        self._ask(Submit(tuple(jobs)))

    def receive(self, timeout_s: float) -> JobDone | None:
        """The next job that is done; None if there is none within `timeout_s`.

        Raises:
            WeightsWanted: no server can serve before weights were pushed again; push, then call this again.
            RequestRefused: a job failed, for a server found its request wrong.
            RolloutError: no server is left, or the process died.
            RewardError, DataError, ...: the reward failed, and with it the process.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._is_push_needed and not self._results.poll():
                raise WeightsWanted("requests wait, and no server serves: push the weights, then ask again")
            left = max(0.0, deadline - time.monotonic())
            if not self._take(left) and left == 0.0:
                return None
        result = self._ready.popleft()
        if isinstance(result, KlearError):
            raise result
        return result

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cut jobs short: they come back soon, with what they have. Jobs that are unknown or done are passed over."""
        self._ask(Cancel(tuple(job_ids)))

    def begin_push(self, version: int) -> list[ServerAddress]:
        """Give no new requests out, and list the servers to bring up to `version`.

        Waits for servers that are starting where there is no other, and before the first push for all of them.
        Raises `RolloutError` naming each server if none is left.
        """
        # At worst it waits for all that a server's restarts may take.
        config = self.settings.config
        patience = ANSWER_TIMEOUT_S + (config.max_restarts + 1) * (config.start_timeout_s + ANSWER_TIMEOUT_S)
        found = self._ask(BeginPush(version), patience)
        assert isinstance(found, list)
        self._num_pushes += 1
        self._is_push_needed = False
        return found

    def end_push(self, version: int, failed: Mapping[str, str]) -> None:
        """Let those serve that took the weights; those in `failed` (by name, with the reason) are taken out."""
        self._ask(EndPush(version, dict(failed)))

    def status(self) -> FleetStatus:
        """How the servers fare."""
        found = self._ask(GetStatus())
        assert isinstance(found, FleetStatus)
        return found

    def close(self) -> None:
        """End the process and the servers that it started. What was not received is lost."""
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._commands.send(Close())
        self._commands.close()
        self._results.close()
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> RolloutProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: Command, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer, or the error that it is."""
        if self._error is not None:
            raise self._error
        try:
            self._commands.send(command)
            # A dead process's pipe is readable too: its end is what it says.
            if not self._commands.poll(timeout_s):
                self._error = RolloutError(
                    f"the rollout process (pid {self.pid}) did not answer {type(command).__name__} within"
                    f" {timeout_s:g} s; see {self.log_file}"
                )
                raise self._error
            answer: Answer = self._commands.recv()
        except (EOFError, OSError):
            raise self._end() from None
        if isinstance(answer, KlearError):
            raise answer
        return answer

    def _take(self, timeout_s: float) -> bool:
        """Wait for one result and sort it; False if none came. The end of the process is a result too."""
        if not self._results.poll(timeout_s):
            return False
        try:
            result: Result = self._results.recv()
        except (EOFError, OSError):
            self._process.join(CLOSE_TIMEOUT_S)
            self._error = RolloutError(
                f"the rollout process ended with exit code {self._process.exitcode}; expected it to live as long as the"
                f" run. The end of {self.log_file}:\n{last_lines(self.log_file)}"
            )
            return True
        match result:
            case JobDone():
                self._ready.append(result)
            case PushNeeded(num_pushes):
                self._is_push_needed = num_pushes == self._num_pushes
            case Failure(error, is_end):
                if is_end:
                    self._error = error
                else:
                    self._ready.append(error)
        return True

    def _end(self) -> KlearError:
        """Why the process has ended. What was done before can still be received."""
        while self._error is None and self._take(CLOSE_TIMEOUT_S):
            pass
        return self._error or RolloutError("the rollout process closed its commands, but has not ended")
