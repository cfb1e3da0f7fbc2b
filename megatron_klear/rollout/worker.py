"""The inside of the rollout process: commands in, results out, and between them the fleet and the scoring."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from megatron_klear.errors import KlearError, RolloutError
from megatron_klear.rollout.connect import connect
from megatron_klear.rollout.fleet import Fleet
from megatron_klear.rollout.jobs import FleetStatus, Job, JobDone, ProcessSettings, ServerSpec
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.local_server import LocalServer
from megatron_klear.rollout.member import Member
from megatron_klear.rollout.supervisor import Pace
from megatron_klear.types import Completion, Prompt, RolloutBatch, ServerAddress

LOG_NAME = "rollout.log"
# Calls beside generation: probes, versions, aborts.
_SPARE_CONNECTIONS = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Command."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Command."""

    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BeginPush:
    """Command; answered with addresses."""

    version: int


@dataclass(frozen=True, slots=True)
class EndPush:
    """Command."""

    version: int
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Command; answered with a `FleetStatus`."""


@dataclass(frozen=True, slots=True)
class Close:
    """Command without an answer. A closed pipe says the same, unless a helper of the trainer's holds it open."""


Command = Submit | Cancel | BeginPush | EndPush | GetStatus | Close
Answer = list[ServerAddress] | FleetStatus | KlearError | None


@dataclass(frozen=True, slots=True)
class PushNeeded:
    """Result: nobody serves before a push. `num_pushes` had begun when this was found."""

    num_pushes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Result: a job's error, or (`is_end`) the one that ends the process."""

    error: KlearError
    is_end: bool = False


Result = JobDone | PushNeeded | Failure


class Judge(Protocol):
    """Scores and selects groups beside generation."""

    async def judge(self, prompt: Prompt, completions: Sequence[Completion], weight_version: int) -> RolloutBatch:
        """The group, or none, with what was dropped."""
        ...

    async def close(self) -> None:
        """End its processes."""
        ...


MakeJudge = Callable[[ProcessSettings], Judge]


def main(
    settings: ProcessSettings, commands: Connection, results: Connection, make_judge: MakeJudge | None = None
) -> None:
    """Run until `commands` is closed at the other end, or the parent dies.

    `make_judge` is handed in by name: its tokenizer takes seconds to import, also where nothing is judged.
    """
    # Ctrl-C goes to all processes of a terminal; the parent ends this one in order.
    signal.signal(signal.SIGINT, lambda *_: None)
    logging.basicConfig(
        filename=Path(settings.log_dir) / LOG_NAME,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_Worker(settings, commands, results, make_judge).run())
    except Exception as error:
        log.exception("the rollout process ends")
        results.send(Failure(_named(error), is_end=True))
        raise SystemExit(1) from error


def _named(error: BaseException) -> KlearError:
    """The first error of a group, as one that can be sent: others may not survive being pickled."""
    if isinstance(error, BaseExceptionGroup):
        return _named(error.exceptions[0])
    return error if isinstance(error, KlearError) else RolloutError(f"{type(error).__name__}: {error}")


class _ParentGone(Exception):
    """The end that is meant."""


class _Worker:
    def __init__(
        self,
        settings: ProcessSettings,
        commands: Connection,
        results: Connection,
        make_judge: MakeJudge | None,
    ) -> None:
        self._commands = commands
        self._results = results
        self._num_pushes = 0
        self._requests: dict[str, list[str]] = {}
        self._outbox: asyncio.Queue[Result] = asyncio.Queue(settings.max_results)
        self._inbox: asyncio.Queue[Command | None] = asyncio.Queue()
        self._push_needed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._fleet = build_fleet(settings, self._push_needed.set)
        self._judge = None if make_judge is None else make_judge(settings)

    async def run(self) -> None:
        reader = threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True)
        try:
            async with self._tasks:
                reader.start()
                self._tasks.create_task(self._fleet.run())
                self._tasks.create_task(self._send())
                self._tasks.create_task(self._tell_push_needed())
                self._tasks.create_task(self._watch_parent(os.getppid()))
                self._tasks.create_task(self._obey())
        except* _ParentGone:
            log.info("the trainer has closed the rollout process")
        finally:
            if self._judge is not None:
                await self._judge.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread, for a pipe's `recv` blocks."""
        try:
            while True:
                loop.call_soon_threadsafe(self._inbox.put_nowait, self._commands.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(self._inbox.put_nowait, None)

    async def _send(self) -> None:
        while True:
            result = await self._outbox.get()
            try:
                await asyncio.to_thread(self._results.send, result)
            except OSError as error:
                raise _ParentGone from error

    async def _watch_parent(self, parent: int) -> None:
        """A child of the trainer's that holds a copy of the pipe keeps it open when the trainer dies."""
        while os.getppid() == parent:
            await asyncio.sleep(1.0)
        raise _ParentGone

    async def _obey(self) -> None:
        while (command := await self._inbox.get()) is not None:
            try:
                answer: Answer = await self._execute(command)
            except RolloutError as error:
                answer = error
            self._commands.send(answer)
        raise _ParentGone

    async def _execute(self, command: Command) -> Answer:
        match command:
            case Submit(jobs):
                for job in jobs:
                    self._start(job)
            case Cancel(job_ids):
                self._tasks.create_task(self._fleet.cancel(self._requests_of(job_ids)))
            case BeginPush(version):
                addresses = await self._fleet.begin_push(version)
                self._num_pushes += 1
                return addresses
            case EndPush(version, failed):
                self._fleet.end_push(version, failed)
            case GetStatus():
                return self._fleet.status()
            case Close():
                raise _ParentGone

    def _requests_of(self, job_ids: Sequence[str]) -> list[str]:
        return [request for job_id in job_ids for request in self._requests.get(job_id, ())]

    def _start(self, job: Job) -> None:
        started = job.started or (None,) * len(job.requests)
        if job.job_id in self._requests:
            raise RolloutError(f"job {job.job_id} is already running; give every job an id of its own")
        if len(started) != len(job.requests):
            raise RolloutError(f"job {job.job_id}: {len(started)} beginnings for {len(job.requests)} requests")
        if job.prompt is not None and self._judge is None:
            raise RolloutError(f"job {job.job_id} has a prompt to be scored, but the process was given no reward")
        tasks = [self._fleet.generate(request, begun) for request, begun in zip(job.requests, started, strict=True)]
        self._requests[job.job_id] = [request.request_id for request in job.requests]
        self._tasks.create_task(self._finish(job, tasks))

    async def _finish(self, job: Job, tasks: Sequence[asyncio.Task[Completion]]) -> None:
        try:
            completions = tuple(await asyncio.gather(*tasks))
        except RolloutError as error:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._requests[job.job_id]
            log.error("job %s failed: %s", job.job_id, error)
            await self._outbox.put(Failure(error))
            return
        del self._requests[job.job_id]
        await self._outbox.put(await self._judged(job, completions))

    async def _judged(self, job: Job, completions: tuple[Completion, ...]) -> JobDone:
        cancelled = any(completion.stop_reason == "abort" for completion in completions)
        if job.prompt is None or self._judge is None or cancelled:
            return JobDone(job.job_id, completions, cancelled=cancelled)
        # Its age here is the least that it can be when a step uses it; the step looks at it again.
        batch = await self._judge.judge(job.prompt, completions, self._fleet.version or 0)
        group = batch.groups[0] if batch.groups else None
        return JobDone(job.job_id, completions, group, batch.metrics, batch.dropped)

    async def _tell_push_needed(self) -> None:
        while await self._push_needed.wait():
            self._push_needed.clear()
            await self._outbox.put(PushNeeded(self._num_pushes))


def build_fleet(settings: ProcessSettings, on_weights_wanted: Callable[[], None]) -> Fleet:
    """Members for all servers of the settings, with launchers for those that the run starts."""
    config, labels, log_dir = settings.config, VersionLabels(settings.tag), Path(settings.log_dir)
    pace = Pace(
        start_timeout_s=config.start_timeout_s,
        request_timeout_s=config.request_timeout_s,
        max_requests_per_server=config.max_requests_per_server,
        max_restarts=config.max_restarts,
    )

    def member(spec: ServerSpec, num_servers: int = 1) -> Member:
        server = connect(
            spec.address,
            labels,
            timeout_s=config.request_timeout_s,
            max_connections=config.max_requests_per_server * num_servers + _SPARE_CONNECTIONS,
            limits=settings.limits,
        )
        name, url = spec.address.name, spec.address.url
        launcher = LocalServer(name, url, spec.argv, log_dir / f"{name}.log") if spec.argv else None
        return Member(server, launcher, is_router=spec.address is settings.router)

    return Fleet(
        [member(spec) for spec in settings.servers],
        pace=pace,
        router=None if settings.router is None else member(ServerSpec(settings.router), len(settings.servers)),
        on_weights_wanted=on_weights_wanted,
    )
