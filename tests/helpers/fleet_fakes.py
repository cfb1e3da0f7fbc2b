"""Servers without a network for tests of the fleet: token i of a sequence is i, its log-prob minus its version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from megatron_klear.errors import EngineStale, EngineUnavailable
from megatron_klear.rollout.fleet import Fleet
from megatron_klear.rollout.member import Member
from megatron_klear.rollout.supervisor import Pace
from megatron_klear.types import Completion, GenerationRequest, Piece, ServerAddress, ServerFacts

T = TypeVar("T")
PACE = Pace(
    start_timeout_s=5.0,
    request_timeout_s=5.0,
    max_requests_per_server=8,
    max_restarts=3,
    poll_s=0.005,
    probe_timeout_s=0.2,
    quiet_s=10.0,
    pause_s=0.01,
    max_pause_s=0.04,
    cancel_timeout_s=0.5,
)


def run(test: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    return asyncio.run(asyncio.wait_for(test, timeout_s))


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    for _ in range(int(timeout_s / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError(f"waited {timeout_s} s for: {what}")


class FakeEngine:
    """An `EngineServer`. `version` None: weights that are not of this run."""

    def __init__(self, name: str, *, version: int | None = None, token_s: float = 0.0) -> None:
        self.address = ServerAddress(name, f"http://{name}", "sglang")
        self.version = version
        self.token_s = token_s
        self.is_up = True
        self.hangs = False
        self.is_paused = False
        self.errors: list[Exception] = []
        """Raised by the next generations that are no probes."""
        self.requests: list[GenerationRequest] = []
        self.num_probes = self.num_running = self.most_running = self.num_aborts = 0
        self.is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        is_probe = request.request_id.startswith("probe/")
        self.num_probes += is_probe
        if not is_probe:
            self.requests.append(request)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if self.errors and not is_probe:
                raise self.errors.pop(0)
            return await self._draw(request)
        finally:
            self.num_running -= 1

    async def _draw(self, request: GenerationRequest) -> Completion:
        drawn: list[int | None] = []
        aborts = self.num_aborts
        while len(drawn) < request.max_new_tokens and self.num_aborts == aborts:
            self._check_up()
            if self.hangs or self.is_paused:
                await asyncio.Event().wait()
            await asyncio.sleep(self.token_s)
            if self.num_aborts == aborts:
                drawn.append(self.version)
        self._check_up()
        if None in drawn:
            raise EngineStale(f"{self.address.name}: weights of somebody else")
        versions = [version for version in drawn if version is not None]
        pieces = [Piece(versions.count(v), v, self.address.name) for v in sorted(set(versions))]
        begin = len(request.token_ids)
        return Completion(
            request.request_id,
            tuple(range(begin, begin + len(drawn))),
            tuple(-float(version) for version in versions),
            "abort" if len(drawn) < request.max_new_tokens else "length",
            tuple(pieces),
        )

    def _check_up(self) -> None:
        if not self.is_up:
            raise EngineUnavailable(f"{self.address.name}: connection refused")

    async def weight_version(self) -> int | None:
        self._check_up()
        return self.version

    async def abort_all(self) -> None:
        self._check_up()
        self.num_aborts += 1

    async def resume(self) -> None:
        self._check_up()
        self.is_paused = False

    async def close(self) -> None:
        self.is_closed = True

    # The rest of the protocol: the fleet never calls it.

    async def facts(self) -> ServerFacts:
        raise AssertionError

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        raise AssertionError

    async def checksum(self) -> Mapping[str, str]:
        raise AssertionError

    async def nothing(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    pause = flush_cache = update_from_disk = begin_update = end_update = update_from_tensors = nothing
    join_group = leave_group = update_from_broadcast = set_version = sleep = wake = nothing


class FakeLauncher:
    """Starts a `FakeEngine`; as any new server it comes without weights of the run."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        engine.is_up = False
        self.num_starts = 0
        self.num_stops = 0
        self.start_error: EngineUnavailable | None = None
        self._exit = asyncio.Event()

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.num_starts += 1
        self.engine.is_up, self.engine.version, self.engine.hangs = True, None, False
        self._exit = asyncio.Event()

    async def ended(self) -> str:
        await self._exit.wait()
        return f"{self.engine.address.name} ended with exit code 1"

    async def stop(self) -> None:
        self.num_stops += 1
        self.engine.is_up = False

    def die(self) -> None:
        self.engine.is_up = False
        self._exit.set()


class FleetBench:
    """A fleet of fakes, and what a trainer does to it."""

    def __init__(self, fleet: Fleet, engines: Sequence[FakeEngine]) -> None:
        self.fleet = fleet
        self.engines = {engine.address.name: engine for engine in engines}
        self.num_asked = 0

    def state(self, name: str) -> str:
        return next(one.state for one in self.fleet.status().engines if one.name == name)

    async def wait_state(self, name: str, state: str) -> None:
        await until(lambda: self.state(name) == state, f"{name} to be {state}")

    async def push(self, version: int, failed: Mapping[str, str] | None = None) -> list[str]:
        """Abort, new weights, resume; the names of the listed."""
        listed = [address.name for address in await self.fleet.begin_push(version)]
        for name in listed:
            self.engines[name].num_aborts += 1
            self.engines[name].version = version
        await asyncio.sleep(0.01)
        self.fleet.end_push(version, failed or {})
        return listed

    def ask(self, count: int, *, tokens: int = 4, first: int = 0) -> list[asyncio.Task[Completion]]:
        return [self.fleet.generate(wish(f"r{first + i}", tokens)) for i in range(count)]


def wish(name: str, tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(name, (0, 1, 2), tokens, seed=7)


@asynccontextmanager
async def fleet_of(
    *engines: FakeEngine,
    launchers: Sequence[FakeLauncher] = (),
    pace: Pace = PACE,
    router: FakeEngine | None = None,
) -> AsyncIterator[FleetBench]:
    starts = {launcher.engine.address.name: launcher for launcher in launchers}
    bench: FleetBench

    def asked() -> None:
        bench.num_asked += 1

    fleet = Fleet(
        [Member(engine, starts.get(engine.address.name)) for engine in engines],
        pace=pace,
        router=None if router is None else Member(router, is_router=True),
        on_weights_wanted=asked,
    )
    bench = FleetBench(fleet, engines)
    running = asyncio.create_task(fleet.run())
    try:
        yield bench
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=5)
    assert running.cancelled(), f"the fleet ended by itself: {running.exception()}"
