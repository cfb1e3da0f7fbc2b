"""The servers of one push: who is still there, what each is doing, and why others are not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_klear.errors import KlearError
from megatron_klear.protocols import EngineServer
from megatron_klear.types import ServerFacts, Transport

CLEANUP_TIMEOUT_S = 10.0
"""Longest wait for a failed server to be set aside, beyond the push's own timeout."""

NO_VERSION = -1
"""What the weights of a failed server are called: never current, so that it cannot serve by its label."""


@dataclass(slots=True, eq=False)
class Member:
    """A server during a push, and what it was asked for and has not undone since (whether it did it or not)."""

    server: EngineServer
    failure: str = ""
    asked_to_sleep: bool = False
    asked_to_pause: bool = False
    asked_to_begin: bool = False
    is_touched: bool = False
    known_facts: ServerFacts | None = None

    @property
    def name(self) -> str:
        """As in errors and reports."""
        return self.server.address.name

    @property
    def facts(self) -> ServerFacts:
        """What it can do; known once it is connected."""
        assert self.known_facts is not None
        return self.known_facts


class Crew:
    """All servers of a push under one deadline (of the running loop's clock)."""

    def __init__(self, servers: Sequence[EngineServer], timeout_s: float) -> None:
        self.members = [Member(server) for server in servers]
        self.timeout_s = timeout_s
        self.deadline = 0.0
        self.restart()

    def restart(self) -> None:
        """From now on the timeout counts."""
        self.deadline = asyncio.get_running_loop().time() + self.timeout_s

    @property
    def live(self) -> list[Member]:
        """Those that did not fail."""
        return [member for member in self.members if not member.failure]

    @property
    def failures(self) -> dict[str, str]:
        """Why the others did, by name."""
        return {member.name: member.failure for member in self.members if member.failure}

    def patience(self) -> float:
        """Seconds to wait where one server can hold up others: half of what is left; all of it for a single one."""
        left = max(0.0, self.deadline - asyncio.get_running_loop().time())
        return left / 2 if len(self.live) > 1 else left

    async def each(
        self, phase: str, call: Callable[[Member], Awaitable[None]], members: Sequence[Member] | None = None
    ) -> None:
        """Do a phase on live members (or those given), all at once; one that fails in it is out, with the reason.

        Who is not ready at the deadline fails; so does who lets others wait, once one of them is ready, for longer
        than half of what is left. An error that is not of ours is a bug: it is raised.
        """
        started = asyncio.get_running_loop().time()
        chosen = self.live if members is None else members
        tasks = {asyncio.ensure_future(call(member)): member for member in chosen}
        try:
            await self._wait(set(tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        waited = asyncio.get_running_loop().time() - started
        for task, member in tasks.items():
            error = None if task.cancelled() else task.exception()
            if task.cancelled():
                member.failure = (
                    f"{phase}: no answer within {waited:.1f} s (push_timeout_s is {self.timeout_s:g} in all)"
                )
            elif isinstance(error, KlearError):
                member.failure = f"{phase}: {error}"
            elif error is not None:
                raise error

    async def _wait(self, pending: set[asyncio.Future[None]]) -> None:
        is_one_ready = False
        while pending:
            left = max(0.0, self.deadline - asyncio.get_running_loop().time())
            limit = left / 2 if is_one_ready else left
            done, pending = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            is_one_ready = is_one_ready or any(task.exception() is None for task in done)

    async def set_aside(self) -> None:
        """Let no failed server stay asleep or paused, nor serve by its label; what cannot be done is added to why."""
        await asyncio.gather(*(_set_aside(member) for member in self.members if member.failure))


async def _set_aside(member: Member) -> None:
    server = member.server
    if not (member.asked_to_sleep or member.is_touched):
        return
    problems: list[str] = []

    async def tried(call: Awaitable[None]) -> bool:
        try:
            await call
        except KlearError as error:
            problems.append(str(error))
            return False
        return True

    try:
        async with asyncio.timeout(CLEANUP_TIMEOUT_S):
            if member.asked_to_sleep:
                await tried(server.wake())
            # Its label may be the current one already: only under another may it draw again.
            is_marked = await tried(server.set_version(NO_VERSION))
            if member.asked_to_begin:
                await tried(server.end_update())
            await tried(server.abort_all())
            if member.asked_to_pause and is_marked:
                await tried(server.resume())
    except TimeoutError:
        problems.append(f"no answer within {CLEANUP_TIMEOUT_S:g} s")
    if problems:
        member.failure += f"; setting it aside, paused or asleep as it may be, failed too: {'; '.join(problems)}"


class WeightTransport(Protocol):
    """How tensors get from rank 0 to servers."""

    @property
    def kind(self) -> Transport:
        """What a server must offer for it."""
        ...

    def stage(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What can be done before any server is paused."""
        ...

    async def send(self, crew: Crew, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the tensors into every live server. The iterator is read in the caller's thread: it is a collective."""
        ...

    async def close(self) -> None:
        """Leave groups, where there are any."""
        ...
