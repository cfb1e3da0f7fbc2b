"""A server of the fleet: its state, the calls that are on their way to it, and whether it works."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, Protocol

from megatron_klear.errors import EngineStale, EngineUnavailable, RolloutError
from megatron_klear.protocols import EngineServer
from megatron_klear.rollout.jobs import EngineStatus, MemberState
from megatron_klear.types import Completion, GenerationRequest

Finding = Literal["works", "stale", "fails"]


class Launcher(Protocol):
    """Starts one server, again and again."""

    async def start(self) -> None:
        """Start it. Raises `EngineUnavailable` where that is not possible."""
        ...

    async def ended(self) -> str:
        """Wait until the server that was started last has ended; says how."""
        ...

    async def stop(self) -> None:
        """End it with all its processes, if it runs."""
        ...


class Member:
    """A server, and what the fleet knows of it.

    `launcher` is None for a server that somebody else started. A router generates, but has no weights of its own.
    """

    def __init__(self, server: EngineServer, launcher: Launcher | None = None, *, is_router: bool = False) -> None:
        self.server = server
        self.launcher = launcher
        self.is_router = is_router
        self.state: MemberState = "starting"
        self.version: int | None = None
        self.num_running = 0
        self.num_answers = 0
        self.num_failures = 0
        """In a row: an answer takes it back to 0."""
        self.num_restarts = 0
        self.last_failure = ""
        """Why it was last taken out, or suspected."""
        self.last_complaint = ""
        """Of a probe: while a server starts, these say nothing bad."""
        self.num_lives = 0
        """Counts deaths, so that what was learnt of an earlier life is not taken for this one."""
        self.is_given_up = False
        self.is_distrusted = False
        """A push failed: whatever version it reports, its weights are not known before the next one."""
        self.num_setbacks = 0
        """Starts since it last took weights: the pause before the next one doubles with each."""
        self.examination: asyncio.Task[None] | None = None
        self.down = asyncio.Event()
        self._calls: set[asyncio.Task[Completion]] = set()
        self._num_probes = 0

    @property
    def name(self) -> str:
        """The address's."""
        return self.server.address.name

    @property
    def is_up(self) -> bool:
        """It works, whatever its weights are."""
        return self.state in ("stale", "serving")

    def status(self) -> EngineStatus:
        """For reports."""
        return EngineStatus(
            self.name,
            self.server.address.url,
            self.state,
            self.version,
            num_running=self.num_running,
            num_restarts=self.num_restarts,
            last_failure=self.last_failure,
        )

    def set_serving(self, version: int | None) -> None:
        """It works, with the current weights."""
        self.state, self.version, self.is_given_up = "serving", version, False

    def set_stale(self) -> None:
        """It works, but must be given weights."""
        self.state, self.version, self.is_given_up = "stale", None, False

    def set_down(self, reason: str) -> None:
        """It failed: what is on its way to it ends now, for a server that hangs never answers."""
        self.state = "dead"
        self.version = None
        self.last_failure = reason
        self.num_lives += 1
        self.num_failures = 0
        self.down.set()
        for call in self._calls:
            call.cancel()

    def call(self, request: GenerationRequest) -> asyncio.Task[Completion]:
        """Send a request; `answer` waits for what comes."""
        call = asyncio.create_task(self.server.generate(request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def answer(self, call: asyncio.Task[Completion], timeout_s: float) -> Completion:
        """The answer of a call. `EngineUnavailable` where none comes in time, or the server is taken out meanwhile."""
        try:
            await asyncio.wait({call}, timeout=timeout_s)
            if not call.done():
                raise EngineUnavailable(f"{self.name} ({self.server.address.url}): no answer within {timeout_s:g} s")
            if call.cancelled():
                raise EngineUnavailable(f"{self.name}: the request was given up: {self.last_failure or 'cancelled'}")
            return call.result()
        finally:
            call.cancel()

    async def probe(self, timeout_s: float) -> Finding:
        """Does a generation work? Nothing else proves it: a server that cannot generate may call itself healthy."""
        self._num_probes += 1
        request = GenerationRequest(f"probe/{self.name}/{self._num_probes}", (0,), max_new_tokens=1)
        try:
            await self.answer(self.call(request), timeout_s)
        except EngineStale:
            return "stale"
        except RolloutError as error:
            self.last_complaint = str(error)
            return "fails"
        return "works"

    async def wait_down(self, timeout_s: float) -> bool:
        """Wait for its death at most so long; True if it is dead."""
        # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.down.wait()
        return self.down.is_set()
