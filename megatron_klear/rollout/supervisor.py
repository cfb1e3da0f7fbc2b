"""Keeps servers up: waits until a new one works, notices one that fails, and brings it back with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_klear.errors import EngineUnavailable, RolloutError
from megatron_klear.rollout.member import Finding, Member

MAX_FAILURES_IN_A_ROW = 3
EXIT_NOTICE_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of time and number; the first four are settings of `servers`."""

    start_timeout_s: float
    request_timeout_s: float
    max_requests_per_server: int
    max_restarts: int
    poll_s: float = 0.5
    """Between two questions to a server that starts."""
    probe_timeout_s: float = 120.0
    """Longest one-token generation of a server that is up; it may have to wait behind others."""
    quiet_s: float = 120.0
    """A server that has requests and answered none for so long is probed."""
    pause_s: float = 1.0
    """Before the first restart; doubles with each until the server serves again."""
    max_pause_s: float = 60.0
    cancel_timeout_s: float = 5.0
    """Longest wait for what a request has after it was aborted."""

    def pause(self, num_setbacks: int) -> float:
        """Seconds to wait after so many failed lives in a row."""
        return min(self.pause_s * 2.0 ** min(num_setbacks, 20), self.max_pause_s)


class Supervisor:
    """Moves members between their states, except for what a push changes.

    Args:
        pace: limits.
        may_serve: may a member that has come back, and reports this version, serve at once?
        on_change: called after every change of a state.
    """

    def __init__(self, pace: Pace, may_serve: Callable[[int | None], bool], on_change: Callable[[], None]) -> None:
        self._pace = pace
        self._may_serve = may_serve
        self._on_change = on_change
        self._change = asyncio.Event()
        self.holds_still = False
        """During a push: a paused server answers nothing, and the push itself finds out who works."""

    async def change(self) -> None:
        """Wait for the next change of a member's state."""
        self._change.clear()
        await self._change.wait()

    async def keep(self, member: Member) -> None:
        """Keep a member up, until it is given up."""
        while not await self._is_given_up(member):
            if member.launcher is None:
                await self._live(member)
                continue
            try:
                await member.launcher.start()
            except EngineUnavailable as error:
                self.take_out(member, str(error))
                continue
            watch = asyncio.create_task(self._watch_process(member, member.num_lives))
            try:
                await self._live(member)
            finally:
                watch.cancel()
                await member.launcher.stop()

    async def _is_given_up(self, member: Member) -> bool:
        """After a death: pause, and count what follows."""
        if member.num_lives == 0:
            return False
        if member.launcher is not None and member.num_restarts >= self._pace.max_restarts:
            member.is_given_up = True
            log.error("%s is given up after %d restarts: %s", member.name, member.num_restarts, member.last_failure)
            self._changed()
            return True
        await asyncio.sleep(self._pace.pause(member.num_setbacks))
        member.num_setbacks += 1
        member.down.clear()
        if member.launcher is not None:
            member.num_restarts += 1
            member.state = "starting"
            self._changed()
        return False

    async def _live(self, member: Member) -> None:
        """From a start to the death."""
        if await self._comes_up(member):
            log.info("%s works: %s", member.name, member.state)
            while not await member.wait_down(self._pace.quiet_s):
                await self._listen(member)

    async def _comes_up(self, member: Member) -> bool:
        """Ask for generations until one works, with the patience of a start."""
        begin = time.monotonic()
        num_questions = 0
        while (left := begin + self._pace.start_timeout_s - time.monotonic()) > 0:
            if await self._lets_draw(member) and await member.probe(left) != "fails" and await self._settle(member):
                return True
            # A server that starts is asked often; a dead one, of somebody else, more and more rarely.
            pause = self._pace.poll_s if member.state == "starting" else self._pace.pause(num_questions)
            num_questions += 1
            if await member.wait_down(pause):
                return False
        waited = f"no generation worked within servers.start_timeout_s {self._pace.start_timeout_s:g}"
        # Somebody else's server is asked further, but nobody waits for it any more.
        member.is_given_up = member.launcher is None
        self.take_out(member, f"{waited}; the last one: {member.last_complaint}")
        self._changed()
        return False

    async def _lets_draw(self, member: Member) -> bool:
        """Somebody else's server may be paused by a run that died in a push: a probe of it would wait for ever."""
        if member.launcher is not None or member.is_router:
            return True
        try:
            await member.server.resume()
        except RolloutError as error:
            member.last_complaint = str(error)
            return False
        return True

    async def _settle(self, member: Member) -> bool:
        """A generation has worked: with which weights? False if the member failed meanwhile."""
        asks = not (member.is_router or member.is_distrusted)
        try:
            version = await member.server.weight_version() if asks else None
        except RolloutError as error:
            member.last_complaint = str(error)
            return False
        if member.down.is_set():
            return False
        if member.is_router or self._may_serve(version):
            member.set_serving(version)
        else:
            member.set_stale()
        self._changed()
        return True

    async def _watch_process(self, member: Member, life: int) -> None:
        assert member.launcher is not None
        how = await member.launcher.ended()
        if member.num_lives == life:
            self.take_out(member, how)

    async def _listen(self, member: Member) -> None:
        """A server that hangs keeps its requests; those without requests may sleep, and are left alone."""
        answers = member.num_answers
        if member.num_running > 0 and not await member.wait_down(self._pace.quiet_s) and member.num_answers == answers:
            self.suspect(member, f"{member.name} has requests, but answered none for {self._pace.quiet_s:g} s")

    def suspect(self, member: Member, reason: str) -> None:
        """A request failed on a member: a probe tells whether it still works. It gets no requests until then.

        What fails at the same time is one failure.
        """
        if member.is_up and member.examination is None and not self.holds_still:
            member.examination = asyncio.create_task(self._examine(member, reason))
            member.examination.add_done_callback(lambda _: self._end_examination(member))

    def _end_examination(self, member: Member) -> None:
        member.examination = None
        self._changed()

    async def _examine(self, member: Member, reason: str) -> None:
        log.warning("%s is suspect: %s", member.name, reason)
        life, state = member.num_lives, member.state
        member.num_failures += 1
        member.last_failure = reason
        finding: Finding = "fails"
        if member.num_failures < MAX_FAILURES_IN_A_ROW:
            finding = await member.probe(self._pace.probe_timeout_s)
        if finding == "fails" and member.launcher is not None:
            # Where its process has ended, that says more than a refused connection.
            await member.wait_down(EXIT_NOTICE_S)
        if member.num_lives != life:
            return
        if finding == "fails":
            self.take_out(member, reason)
        elif finding == "stale" and member.state == state == "serving":
            member.set_stale()

    async def check_version(self, member: Member, version: int | None) -> None:
        """Ask a serving member which weights it has; it is stale if they are not `version`."""
        if member.state != "serving":
            return
        try:
            found = await member.server.weight_version()
        except RolloutError as error:
            self.suspect(member, str(error))
            return
        if found != version and member.state == "serving":
            member.last_failure = f"reports weights {found}, expected {version}"
            member.set_stale()
            self._changed()

    def take_out(self, member: Member, reason: str) -> None:
        """It is dead; what comes next is `keep`'s."""
        if member.state == "dead":
            return
        log.warning("%s is dead: %s", member.name, reason)
        member.set_down(reason)
        self._changed()

    def _changed(self) -> None:
        self._change.set()
        self._on_change()
