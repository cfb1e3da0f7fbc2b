"""The servers of a run as one: who gets which request, and what happens when a server fails or loses its weights.

A member is starting until a generation has worked, then stale until the current weights were pushed, then serving. One
that fails is dead: the run's own is started again after a pause, another one is asked again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_klear.errors import EngineStale, EngineUnavailable, RolloutError
from megatron_klear.rollout.draft import Draft
from megatron_klear.rollout.jobs import FleetStatus
from megatron_klear.rollout.member import Member
from megatron_klear.rollout.supervisor import Pace, Supervisor
from megatron_klear.types import Completion, GenerationRequest, ServerAddress

MAX_FAILURES_PER_REQUEST = 10
"""A request that ends every server it comes to must not end them all for ever."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Order:
    """A draft on its way: it waits for `ticket`, then for `call`."""

    draft: Draft
    ticket: asyncio.Future[Member | None]
    member: Member | None = None
    call: asyncio.Task[Completion] | None = None
    num_failures: int = 0
    is_cancelled: bool = False


class Fleet:
    """Generates on whichever members serve. Lives in one event loop, as long as `run` does.

    Args:
        members: they get the weights, and the requests where there is no router.
        router: gets all requests in their stead.
        pace: limits of time and number.
        on_weights_wanted: called when requests wait and nobody can serve before a push.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        pace: Pace,
        router: Member | None = None,
        on_weights_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.members = tuple(members)
        self.router = router
        self.version: int | None = None
        self._pace = pace
        self._on_weights_wanted = on_weights_wanted
        self._supervisor = Supervisor(pace, self._may_serve, self._hand_out)
        self._orders: dict[str, _Order] = {}
        self._waiting: deque[_Order] = deque()
        self._pushing: int | None = None
        self._listed: dict[str, int] = {}
        self._num_interrupts = 0
        self._has_asked = False
        self._interrupting = asyncio.Lock()
        self._num_retried = self._num_discarded = self._num_continued = self._num_tokens = 0

    async def run(self) -> None:
        """Bring the members up and keep them up, until this is cancelled; then end those that the run started."""
        try:
            async with asyncio.TaskGroup() as group:
                for member in self._everybody():
                    group.create_task(self._supervisor.keep(member))
        finally:
            await asyncio.gather(*(member.server.close() for member in self._everybody()))

    def _everybody(self) -> tuple[Member, ...]:
        return self.members if self.router is None else (*self.members, self.router)

    def status(self) -> FleetStatus:
        """How the members fare, and what was counted."""
        return FleetStatus(
            tuple(member.status() for member in self.members),
            self.version,
            num_waiting=sum(not order.ticket.done() for order in self._waiting),
            num_retried=self._num_retried,
            num_discarded=self._num_discarded,
            num_continued=self._num_continued,
            num_tokens=self._num_tokens,
        )

    # Requests

    def generate(self, request: GenerationRequest, started: Completion | None = None) -> asyncio.Task[Completion]:
        """Complete a request, from the tokens it has, on as many servers and versions as it takes.

        The task raises:
            RequestRefused: a server found the request wrong.
            RolloutError: no member is left, or the request failed too often. Raised at once if its id is in use.
        """
        name = request.request_id
        if name in self._orders:
            raise RolloutError(f"request {name} is already running; give every request an id of its own")
        order = _Order(Draft(request, started), asyncio.get_running_loop().create_future())
        self._orders[name] = order
        task = asyncio.create_task(self._complete(order))
        task.add_done_callback(lambda _: self._orders.pop(name))
        return task

    async def _complete(self, order: _Order) -> Completion:
        while not order.draft.is_done and not order.is_cancelled:
            await self._advance(order)
        return order.draft.completion()

    async def cancel(self, request_ids: Iterable[str]) -> None:
        """Let requests end with what they have; returns once they are off their servers."""
        orders = [self._orders[name] for name in request_ids if name in self._orders]
        for order in orders:
            order.is_cancelled = True
            if not order.ticket.done():
                order.ticket.set_result(None)
        # A request may reach its server after the first abort did.
        for _ in range(3):
            if not (calls := _calls(orders)):
                return
            # A router does not know which of its workers has a request.
            busy = self.members if self.router else {o.member.name: o.member for o in orders if o.member}.values()
            await self._abort([member for member in busy if member.is_up])
            await asyncio.wait(calls, timeout=self._pace.cancel_timeout_s)
        for call in _calls(orders):
            call.cancel()

    async def _abort(self, members: Iterable[Member]) -> None:
        """What others have running on these members is cut short too, and goes on from its tokens."""
        async with self._interrupting:
            # A push stops requests by itself; an abort could let the server draw again in the middle of it.
            if self._pushing is None:
                self._num_interrupts += 1
                await asyncio.gather(*(self._abort_all(member) for member in members))

    async def _abort_all(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._pace.cancel_timeout_s):
                await member.server.abort_all()
        except (TimeoutError, RolloutError) as error:
            # Its requests are given up soon, and whether it works is asked when one fails.
            log.warning("%s did not abort: %r", member.name, error)

    async def _advance(self, order: _Order) -> None:
        """One attempt on one member."""
        member = await self._assigned(order)
        if member is None:
            return
        floor, life, interrupts = self.version, member.num_lives, self._num_interrupts
        order.member, order.call = member, member.call(order.draft.rest())
        try:
            answer = await member.answer(order.call, self._pace.request_timeout_s)
            self._check_versions(member, answer, floor)
            if answer.stop_reason == "abort" and not answer.token_ids and interrupts == self._num_interrupts:
                raise EngineUnavailable(f"{member.name} aborted {order.draft.request.request_id} without being asked")
        except EngineStale as error:
            self._num_discarded += 1
            if life == member.num_lives and interrupts == self._num_interrupts:
                await self._found_stale(member, str(error))
            self._count_failure(order, error)
        except EngineUnavailable as error:
            if order.is_cancelled:
                return
            self._num_retried += 1
            if life == member.num_lives:
                self._supervisor.suspect(member, str(error))
            self._count_failure(order, error)
        else:
            member.num_answers += 1
            member.num_failures = 0
            self._num_tokens += len(answer.token_ids)
            self._num_continued += answer.stop_reason == "abort" and not order.is_cancelled
            order.draft.add(answer)
        finally:
            order.member = order.call = None
            member.num_running -= 1
            self._hand_out()

    def _check_versions(self, member: Member, answer: Completion, floor: int | None) -> None:
        """Tokens must be of the weights that were current when the request went out, or of later ones."""
        newest = self.version if self._pushing is None else self._pushing
        for piece in answer.pieces:
            if floor is None or newest is None or not floor <= piece.weight_version <= newest:
                raise EngineStale(
                    f"{member.name} drew tokens from version {piece.weight_version}; expected {floor} to {newest}"
                )

    async def _found_stale(self, member: Member, reason: str) -> None:
        log.warning("stale answer thrown away: %s", reason)
        if member is self.router:
            await asyncio.gather(*(self._supervisor.check_version(each, self.version) for each in self.members))
        elif member.state == "serving":
            member.last_failure = reason
            member.set_stale()

    def _count_failure(self, order: _Order, error: EngineUnavailable) -> None:
        order.num_failures += 1
        if order.num_failures >= MAX_FAILURES_PER_REQUEST:
            name = order.draft.request.request_id
            raise RolloutError(
                f"request {name} failed {order.num_failures} times; see the servers' logs; the last time: {error}"
            ) from error

    # Who gets a request

    async def _assigned(self, order: _Order) -> Member | None:
        """Wait for a member with room; None if the order is cancelled before."""
        order.ticket = asyncio.get_running_loop().create_future()
        # What has begun ends first: its group, and so its step, waits for it.
        if order.draft.num_attempts > 0 or order.draft.num_tokens > 0:
            self._waiting.appendleft(order)
        else:
            self._waiting.append(order)
        self._hand_out()
        try:
            return await order.ticket
        except asyncio.CancelledError:
            # Handed out and cancelled in the same turn of the loop.
            if not order.ticket.cancelled() and (member := order.ticket.result()) is not None:
                member.num_running -= 1
                self._hand_out()
            raise

    def _hand_out(self) -> None:
        """Give waiting requests out while there is room. Called whenever that may have changed."""
        while self._waiting:
            if self._waiting[0].ticket.done():
                self._waiting.popleft()
            elif (member := self._target()) is not None:
                member.num_running += 1
                self._waiting.popleft().ticket.set_result(member)
            else:
                self._say_why_nobody_serves()
                return

    def _target(self) -> Member | None:
        if self._pushing is not None:
            return None
        serving = [member for member in self.members if member.state == "serving" and member.examination is None]
        most = self._pace.max_requests_per_server
        if self.router is not None:
            # A router knows nothing of versions: it would send requests to stale members too.
            is_open = self.router.state == "serving" and not any(member.state == "stale" for member in self.members)
            return self.router if is_open and self.router.num_running < most * len(serving) else None
        free = [member for member in serving if member.num_running < most]
        return min(free, key=lambda member: member.num_running, default=None)

    def _say_why_nobody_serves(self) -> None:
        """Only a push may help, or nothing."""
        if self._pushing is not None:
            return
        if all(member.is_given_up for member in self.members) or (self.router and self.router.is_given_up):
            error = RolloutError(self._obituary())
            while self._waiting:
                if not (ticket := self._waiting.popleft().ticket).done():
                    ticket.set_exception(error)
            return
        states = {member.state for member in self.members}
        if "stale" in states and ("serving" not in states or self.router is not None) and not self._has_asked:
            self._has_asked = True
            log.info("requests wait, and no server serves before weights are pushed")
            self._on_weights_wanted()

    def _obituary(self) -> str:
        fates = "; ".join(
            f"{m.name} ({m.state}, {m.num_restarts} restarts): {m.last_failure}" for m in self._everybody()
        )
        return f"no server is left to generate on; see their logs, and servers.max_restarts. {fates}"

    # Pushes of weights

    async def begin_push(self, version: int) -> list[ServerAddress]:
        """Give no requests out, and list the members that work. Waits for some to start if there is none.

        Before the first push it waits for all that start: a run is planned for all its servers. Raises `RolloutError`
        if no member works nor will.
        """
        if self._pushing is not None:
            raise RolloutError(f"push of version {version} begun while that of {self._pushing} has not ended")
        while self._is_worth_waiting():
            await self._supervisor.change()
        up = [member for member in self.members if member.is_up]
        if not up:
            raise RolloutError(self._obituary())
        async with self._interrupting:
            self._pushing = version
            self._num_interrupts += 1
            self._has_asked = False
            self._listed = {member.name: member.num_lives for member in up}
            self._supervisor.holds_still = True
            for member in up:
                if member.examination is not None:
                    member.examination.cancel()
        log.info("push of version %d to %s", version, ", ".join(self._listed))
        return [member.server.address for member in up]

    def _is_worth_waiting(self) -> bool:
        if self.version is None and any(member.state == "starting" for member in self.members):
            return True
        return not any(member.is_up for member in self.members) and not all(m.is_given_up for m in self.members)

    def end_push(self, version: int, failed: Mapping[str, str]) -> None:
        """Members that took the weights serve; those in `failed` are dead, with the reason."""
        # Servers that sleep while the trainer trains are in a push all the while: its version is known at its end.
        if self._pushing is None or version < self._pushing:
            raise RolloutError(f"end of a push of version {version}, but the push that was begun is {self._pushing}")
        self.version = version
        self._num_interrupts += 1
        for member in self.members:
            # One that died meanwhile, even if it is up again, does not hold what was sent to it.
            if self._listed.get(member.name) != member.num_lives:
                continue
            if member.name in failed:
                member.is_distrusted = True
                self._supervisor.take_out(member, f"push of version {version}: {failed[member.name]}")
            else:
                member.is_distrusted = False
                member.num_failures = member.num_setbacks = 0
                member.set_serving(version)
        self._listed = {}
        self._pushing = None
        self._supervisor.holds_still = False
        self._hand_out()

    def _may_serve(self, version: int | None) -> bool:
        return self._pushing is None and version is not None and version == self.version


def _calls(orders: Iterable[_Order]) -> list[asyncio.Task[Completion]]:
    return [order.call for order in orders if order.call is not None and not order.call.done()]
