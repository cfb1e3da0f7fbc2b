"""Weight sync to servers: one push, many servers, one timeout, and every failure has a name.

On rank 0 everything happens in the calling thread, by an event loop that runs during a call and rests between calls:
the iterator of tensors is a collective of the trainer, which may not be entered from another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from torch import Tensor

from megatron_klear.errors import EngineUnavailable, WeightSyncError
from megatron_klear.protocols import EngineServer, PushControl
from megatron_klear.types import PauseMode, Probe, ServerAddress, SyncReport
from megatron_klear.weight_sync.crew import Crew, Member, WeightTransport
from megatron_klear.weight_sync.verify import Checksums, Held, PushedTensors, check_probe, check_version


@dataclass(frozen=True, slots=True)
class PushSetup:
    """What rank 0 pushes with. `timeout_s` bounds a whole push over all servers; `max_probe_diff` is a log-prob's."""

    control: PushControl
    connect: Callable[[ServerAddress], EngineServer]
    transport: WeightTransport
    pause_mode: PauseMode
    timeout_s: float
    max_probe_diff: float


class RemoteSync:
    """Rank 0 has a `setup`; other ranks pass None and only take part in the collective that gives the tensors."""

    def __init__(self, setup: PushSetup | None) -> None:
        self._main = None if setup is None else _MainSync(setup)

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int, probe: Probe | None = None) -> SyncReport:
        """Bring the weights to every server. Wakes servers that `release` put to sleep.

        Exhausts the iterator also where it raises, so that other ranks do not wait; only rank 0 raises.

        Raises:
            WeightSyncError: no server is left; names each with its reason. Or the weights could not be written.
        """
        started = time.perf_counter()
        tensors = PushedTensors(named_tensors)
        failed: dict[str, str] = {}
        try:
            if self._main is None:
                for _ in tensors:
                    pass
            else:
                failed = self._main.push(tensors, version, probe)
        except Exception:
            tensors.exhaust()
            raise
        return SyncReport(version, tensors.num_tensors, tensors.num_bytes, time.perf_counter() - started, failed)

    def release(self, version: int) -> None:
        """Let servers that can sleep, until the push of `version`. They get no requests from here on (begin_push).

        A second call before the push finds them asleep and does nothing. One that fails is named in the push's report.
        """
        if self._main is not None:
            self._main.release(version)

    def close(self) -> None:
        """Wake who still sleeps (its weights are gone: it has no version), leave groups, close connections."""
        if self._main is not None:
            self._main.close()

    def __enter__(self) -> RemoteSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _MainSync:
    """Rank 0's side."""

    def __init__(self, setup: PushSetup) -> None:
        self.setup = setup
        self._runner = asyncio.Runner()
        self._servers: dict[ServerAddress, EngineServer] = {}
        self._checksums = Checksums()
        self._sleepers: Crew | None = None

    def push(self, tensors: PushedTensors, version: int, probe: Probe | None) -> dict[str, str]:
        """Who failed, and why."""
        # While servers still draw.
        self.setup.transport.stage(tensors, version)
        return self._runner.run(self._push(tensors, version, probe))

    def release(self, version: int) -> None:
        self._runner.run(self._release(version))

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _gather(self, version: int) -> Crew:
        """The servers to push to, connected."""
        addresses = self.setup.control.begin_push(version)
        for address in addresses:
            if address not in self._servers:
                self._servers[address] = self.setup.connect(address)
        crew = Crew([self._servers[address] for address in addresses], self.setup.timeout_s)
        await crew.each("connect", self._learn_facts)
        return crew

    async def _learn_facts(self, member: Member) -> None:
        facts = await member.server.facts()
        transport, mode = self.setup.transport.kind, self.setup.pause_mode
        if transport not in facts.transports:
            offered = ", ".join(sorted(facts.transports)) or "none"
            raise WeightSyncError(f"it takes no weights by transport={transport}, only: {offered}")
        if mode not in facts.pause_modes:
            offered = ", ".join(sorted(facts.pause_modes)) or "none"
            raise WeightSyncError(f"it knows no pause_mode={mode}, only: {offered}")
        member.known_facts = facts

    async def _release(self, version: int) -> None:
        if self._sleepers is not None:
            return
        self._sleepers = crew = await self._gather(version)
        able = [member for member in crew.live if member.facts.sleeps]
        await crew.each("sleep", _sleep, able)

    async def _push(self, tensors: PushedTensors, version: int, probe: Probe | None) -> dict[str, str]:
        crew = self._sleepers or await self._gather(version)
        crew.restart()
        self._sleepers = None
        try:
            await self._bring_up(crew, tensors, version, probe)
        except BaseException as error:
            for member in crew.live:
                member.failure = f"the push broke off, not by this server's fault: {error!r}"
            raise
        finally:
            try:
                await crew.set_aside()
                await self._forget(crew)
            finally:
                self.setup.control.end_push(version, crew.failures)
        if not crew.live:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in crew.failures.items())
            raise WeightSyncError(f"no server took the weights of version {version}:{reasons}")
        return crew.failures

    async def _bring_up(self, crew: Crew, tensors: PushedTensors, version: int, probe: Probe | None) -> None:
        await crew.each("wake", _wake, [member for member in crew.live if member.asked_to_sleep])
        await crew.each("pause", self._pause)
        await self._send(crew, tensors, version)
        # Whoever is left at the end of the collective, it must come to its end.
        tensors.exhaust()
        await crew.each("flush_cache", self._flush_cache)
        await crew.each("weight_version", lambda member: _check_version(member, version))
        # Before anything is drawn: who has not taken the weights at all, or stands alone against the others.
        held = await self._checksums_of(crew)
        self._compare(crew, held, tensors, is_last=probe is None)
        await crew.each("resume", _resume)
        # A paused server scores nothing; new requests come only after end_push.
        if probe is not None:
            await crew.each("probe", lambda member: self._check_probe(member, probe))
            # Where two differ, the probe knows who is wrong.
            self._compare(crew, held, tensors, is_last=True)

    async def _send(self, crew: Crew, tensors: PushedTensors, version: int) -> None:
        """Through the transport, between begin_update and end_update where a server wants it."""
        if self.setup.transport.kind == "disk":
            await self.setup.transport.send(crew, tensors, version)
            return
        await crew.each("begin_update", _begin_update, [one for one in crew.live if one.facts.brackets_updates])
        await self.setup.transport.send(crew, tensors, version)
        await crew.each("end_update", _end_update, [one for one in crew.live if one.asked_to_begin])
        await crew.each("set_version", lambda member: member.server.set_version(version))

    async def _pause(self, member: Member) -> None:
        # Who slept is paused.
        if not member.asked_to_pause:
            member.asked_to_pause = member.is_touched = True
            await member.server.pause(self.setup.pause_mode)

    async def _flush_cache(self, member: Member) -> None:
        try:
            await member.server.flush_cache()
        except EngineUnavailable:
            # in_place lets requests go on, on the cache of the old weights: while there are any, it cannot be flushed.
            if self.setup.pause_mode != "in_place":
                raise

    async def _checksums_of(self, crew: Crew) -> list[Held]:
        held: list[Held] = []

        async def ask(member: Member) -> None:
            sums = await member.server.checksum()
            layout = f"{member.server.address.kind} {member.facts.release}, {member.facts.num_ranks} ranks"
            held.append(Held(member.name, layout, sums))

        await crew.each("checksum", ask, [member for member in crew.live if member.facts.has_checksum])
        return held

    def _compare(self, crew: Crew, held: list[Held], tensors: PushedTensors, *, is_last: bool) -> None:
        live = {member.name: member for member in crew.live}
        of_live = [one for one in held if one.server in live]
        for name, reason in self._checksums.faults(of_live, tensors.fingerprint(), is_last=is_last).items():
            live[name].failure = f"checksum: {reason}"

    async def _check_probe(self, member: Member, probe: Probe) -> None:
        found = await member.server.score(probe.token_ids)
        check_probe(member.name, probe, list(found), self.setup.max_probe_diff)

    async def _forget(self, crew: Crew) -> None:
        """Connections to failed servers: a restarted one is asked anew what it can do."""
        for member in crew.members:
            if member.failure and self._servers.pop(member.server.address, None) is not None:
                await member.server.close()

    async def _close(self) -> None:
        if self._sleepers is not None:
            for member in self._sleepers.live:
                member.failure = "no push came while it slept"
            await self._sleepers.set_aside()
            self._sleepers = None
        await self.setup.transport.close()
        while self._servers:
            await self._servers.popitem()[1].close()


async def _sleep(member: Member) -> None:
    # Memory may be taken only from a server without running requests, whatever a push does to them.
    member.asked_to_pause = member.is_touched = True
    await member.server.pause("abort")
    await member.server.flush_cache()
    member.asked_to_sleep = True
    await member.server.sleep()


async def _wake(member: Member) -> None:
    await member.server.wake()
    member.asked_to_sleep = False


async def _begin_update(member: Member) -> None:
    member.asked_to_begin = True
    await member.server.begin_update()


async def _end_update(member: Member) -> None:
    await member.server.end_update()
    member.asked_to_begin = False


async def _check_version(member: Member, version: int) -> None:
    check_version(member.name, version, await member.server.weight_version())


async def _resume(member: Member) -> None:
    await member.server.resume()
    member.asked_to_pause = False
