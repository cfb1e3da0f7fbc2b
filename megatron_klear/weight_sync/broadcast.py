"""Weights by a process group of the trainer's first rank and all engines' ranks.

The group is kept from push to push. It is made anew when the servers are others, or one of them was restarted, and when
a broadcast broke: then with those that still answer, and the bucket is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_klear.errors import KlearError, WeightSyncError
from megatron_klear.parallel.engine_group import EngineGroup, EngineStore
from megatron_klear.protocols import EngineServer
from megatron_klear.types import GroupAddress, TensorSpec, Transport
from megatron_klear.weight_sync.crew import CLEANUP_TIMEOUT_S, Crew, Member
from megatron_klear.weight_sync.tensor import Bucket, buckets

_POLL_S = 0.02

Posts = dict[asyncio.Future[None], Member]


@dataclass(slots=True)
class _Joined:
    """A group that came together, with its servers, and the version it carried last."""

    group: EngineGroup
    servers: list[EngineServer]
    version: int | None = None


class BroadcastTransport:
    """`host` and `port`: where the servers reach the trainer's first rank. At most `bucket_bytes` travel at a time."""

    kind: Transport = "broadcast"

    def __init__(self, *, host: str, port: int, backend: Literal["gloo", "nccl"], bucket_bytes: int) -> None:
        self.host = host
        self.port = port
        self.backend: Literal["gloo", "nccl"] = backend
        self.bucket_bytes = bucket_bytes
        self._store: EngineStore | None = None
        self._joined: _Joined | None = None

    def stage(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing: what is not held cannot be sent before servers are paused."""

    async def send(self, crew: Crew, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bucket after bucket, each to all live servers; ends early when none is left."""
        if self._joined is not None and not await self._is_whole(crew, self._joined):
            await self._leave()
        for bucket in buckets(named_tensors, self.bucket_bytes):
            await self._send_bucket(crew, bucket)
            if not crew.live:
                return
        if self._joined is not None:
            self._joined.version = version

    async def close(self) -> None:
        """Let all leave the group."""
        await self._leave()
        if self._store is not None:
            self._store.close()

    async def _is_whole(self, crew: Crew, joined: _Joined) -> bool:
        """Whether the group is of just these servers, and none was restarted since: that one lost its version too."""
        if {id(member.server) for member in crew.live} != {id(server) for server in joined.servers}:
            return False
        versions: list[int | None] = []

        async def ask(member: Member) -> None:
            versions.append(await member.server.weight_version())

        await crew.each("weight_version", ask)
        return versions == [joined.version] * len(joined.servers)

    async def _send_bucket(self, crew: Crew, bucket: Bucket) -> None:
        while crew.live:
            was_kept = self._joined is not None
            if self._joined is None:
                self._joined = await self._join(crew)
            if self._joined is not None:
                posts = await self._broadcast(crew, self._joined.group, bucket)
                if not posts:
                    return
                num_live = len(crew.live)
                await self._drop_dead(crew, posts)
                if len(crew.live) == num_live and not was_kept:
                    # All answer, but in a fresh group some could not receive: there is nothing else to try with them.
                    for post, member in posts.items():
                        member.failure = f"update_from_broadcast: {_reason(post)}"
                await self._leave()

    async def _broadcast(self, crew: Crew, group: EngineGroup, bucket: Bucket) -> Posts:
        """Send a bucket. The posts that failed; none if all went well. A group in which one failed is closed."""
        specs = [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in bucket
        ]
        limit = crew.patience()
        posts: Posts = {
            asyncio.ensure_future(member.server.update_from_broadcast(specs, group.name)): member
            for member in crew.live
        }
        # In a thread, for it blocks: this group is not one of the trainer's.
        tensors = [tensor for _, tensor in bucket]
        sending = asyncio.ensure_future(asyncio.to_thread(group.broadcast, tensors, limit))
        problem = await _all_done({*posts, sending}, limit)
        if problem:
            # Who still waits in the group is let go.
            await asyncio.to_thread(group.close)
        await _settle(posts, crew.patience())
        await asyncio.wait([sending])
        failed = {post: member for post, member in posts.items() if not _went_well(post)}
        if problem and not failed:
            raise sending.exception() or WeightSyncError(problem)
        return failed

    async def _drop_dead(self, crew: Crew, posts: Posts) -> None:
        """Of the servers whose post failed, those that do not even say their version are out."""
        reasons = {member.name: _reason(post) for post, member in posts.items()}
        await crew.each("weight_version", _ask_version, list(posts.values()))
        for member in posts.values():
            if member.failure:
                member.failure = f"update_from_broadcast: {reasons[member.name]}; then {member.failure}"

    async def _leave(self) -> None:
        """End the group here and on its servers, those that failed too: while they are in it, sends to them go on."""
        joined, self._joined = self._joined, None
        if joined is not None:
            await asyncio.to_thread(joined.group.close)
            await asyncio.gather(*(_left(server, joined.group.name) for server in joined.servers))

    async def _join(self, crew: Crew) -> _Joined | None:
        """Make a group with the live servers; who does not come is out. None if one was: there may be more to try."""
        members = crew.live
        ranks = _ranks(members)
        limit = crew.patience()
        world_size = 1 + sum(member.facts.num_ranks for member in members)
        name = f"weights-{secrets.token_hex(4)}"
        if self._store is None:
            self._store = EngineStore(self.host, self.port)
        group = EngineGroup(self._store, name, world_size=world_size, backend=self.backend, timeout_s=limit)
        posts: Posts = {}
        for member in members:
            address = GroupAddress(name, self.host, self.port, world_size, ranks[member.name].start, self.backend)
            posts[asyncio.ensure_future(member.server.join_group(address))] = member
        guilty = await self._absent(group, posts, ranks, limit)
        if not guilty:
            connecting = asyncio.ensure_future(asyncio.to_thread(group.connect))
            problem = await _all_done({*posts, connecting}, limit)
            await asyncio.wait([connecting])
            if not problem:
                return _Joined(group, [member.server for member in members])
            guilty = {member.name: _reason(post) for post, member in posts.items() if not _went_well(post)}
            guilty = guilty or dict.fromkeys(ranks, problem)
        # Without the store, those that came stop waiting for the others.
        self._store.close()
        self._store = None
        await asyncio.to_thread(group.close)
        await _settle(posts, crew.patience())
        for member in members:
            if member.name in guilty:
                member.failure = f"join_group: {guilty[member.name]}"
        return None

    async def _absent(self, group: EngineGroup, posts: Posts, ranks: dict[str, range], limit: float) -> dict[str, str]:
        """Wait until every server came, or one failed, or the time is over; who is to blame, and why, by name."""
        clock = asyncio.get_running_loop().time
        end = clock() + limit
        while True:
            failed = {
                member.name: _reason(post) for post, member in posts.items() if post.done() and not _went_well(post)
            }
            waiting = [
                member.name for post, member in posts.items() if not post.done() and group.absent(ranks[member.name])
            ]
            if failed or not waiting:
                return failed
            if clock() > end:
                where = f"{self.host}:{self.port}"
                return dict.fromkeys(
                    waiting, f"did not come to {where} within {limit:.1f} s: can it reach broadcast_host?"
                )
            await asyncio.sleep(_POLL_S)


async def _ask_version(member: Member) -> None:
    await member.server.weight_version()


def _ranks(members: list[Member]) -> dict[str, range]:
    """The ranks of each server in the group, by name: the trainer is rank 0, they follow one after another."""
    ranks, start = {}, 1
    for member in members:
        ranks[member.name] = range(start, start + member.facts.num_ranks)
        start += member.facts.num_ranks
    return ranks


async def _left(server: EngineServer, name: str) -> None:
    # It may be gone, or the group there: the next one has another name.
    with contextlib.suppress(KlearError, TimeoutError):
        await asyncio.wait_for(server.leave_group(name), CLEANUP_TIMEOUT_S)


async def _all_done(tasks: set[asyncio.Future[None]], limit: float) -> str:
    """Wait for all, at most until the first failure. What went wrong, or nothing."""
    done, pending = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
    failed = [_reason(task) for task in done if not _went_well(task)]
    return failed[0] if failed else f"not all were done within {limit:.1f} s" if pending else ""


async def _settle(posts: Posts, limit: float) -> None:
    """Let posts come to their end; those that do not are ended."""
    if posts:
        _, pending = await asyncio.wait(posts, timeout=limit)
        for post in pending:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


def _went_well(task: asyncio.Future[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _reason(task: asyncio.Future[None]) -> str:
    if not task.done() or task.cancelled():
        return "no answer in time"
    error = task.exception()
    if error is not None and not isinstance(error, KlearError):
        raise error
    return str(error)
