"""Servers that live in the test: an `EngineServer` that keeps what it is given, and does wrong what it is told to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_klear.errors import EngineUnavailable
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    GroupAddress,
    PauseMode,
    ServerAddress,
    ServerFacts,
    TensorSpec,
)

FACTS = ServerFacts(
    release="1",
    transports=frozenset({"disk", "tensor", "broadcast"}),
    pause_modes=frozenset({"abort", "retract", "in_place"}),
    brackets_updates=True,
    stamps_tokens=True,
    has_checksum=True,
    sleeps=True,
)


class ShelfServer:
    """`breaks` and `hangs` name calls that fail or never end; `skips_push` keeps old weights and says done."""

    def __init__(
        self,
        name: str,
        *,
        breaks: Iterable[str] = (),
        hangs: Iterable[str] = (),
        skips_push: bool = False,
        facts: ServerFacts = FACTS,
    ) -> None:
        self.name = name
        self.breaks, self.hangs, self.skips_push = set(breaks), set(hangs), skips_push
        self.known_facts = facts
        self.calls: list[str] = []
        self.version: int | None = None
        self.tensors: dict[str, Tensor] = {}
        self.is_paused = self.is_asleep = self.is_updating = self.is_closed = False

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(self.name, f"http://{self.name}", "sglang")

    async def _called(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if call in self.hangs:
            await asyncio.sleep(1000)
        if call in self.breaks:
            raise EngineUnavailable(f"{self.name}: {call} does not work")

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.is_paused and not self.is_asleep
        if not self.skips_push:
            self.tensors |= {name: tensor.clone() for name, tensor in tensors.items()}

    async def facts(self) -> ServerFacts:
        await self._called("facts")
        return self.known_facts

    async def generate(self, request: GenerationRequest) -> Completion:
        raise NotImplementedError

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The mean of its weights, at each token."""
        await self._called("score")
        assert not self.is_paused
        return [mean(self.tensors)] * (len(token_ids) - 1)

    async def weight_version(self) -> int | None:
        await self._called("weight_version")
        return self.version

    async def pause(self, mode: PauseMode) -> None:
        await self._called("pause")
        self.is_paused = True

    async def resume(self) -> None:
        await self._called("resume")
        self.is_paused = False

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def abort_all(self) -> None:
        await self._called("abort_all")

    async def flush_cache(self) -> None:
        await self._called("flush_cache")

    async def update_from_disk(self, folder: str, version: int) -> None:
        await self._called("update_from_disk")
        self._load(load_file(f"{folder}/model.safetensors"))
        self.version = version

    async def begin_update(self) -> None:
        await self._called("begin_update")
        self.is_updating = True

    async def end_update(self) -> None:
        await self._called("end_update")
        self.is_updating = False

    async def update_from_tensors(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        await self._called("update_from_tensors")
        assert self.is_updating
        self._load(dict(bucket))

    async def join_group(self, group: GroupAddress) -> None:
        await self._called("join_group")

    async def leave_group(self, name: str) -> None:
        await self._called("leave_group")

    async def update_from_broadcast(self, bucket: Sequence[TensorSpec], group: str) -> None:
        await self._called("update_from_broadcast")

    async def set_version(self, version: int) -> None:
        await self._called("set_version")
        self.version = version

    async def checksum(self) -> Mapping[str, str]:
        await self._called("checksum")
        return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in self.tensors.items()}

    async def sleep(self) -> None:
        await self._called("sleep")
        assert self.is_paused
        self.is_asleep = True

    async def wake(self) -> None:
        await self._called("wake")
        self.is_asleep = False
        self.tensors = {}

    async def close(self) -> None:
        self.is_closed = True


class ShelfControl:
    """A `PushControl` over some servers."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self.addresses: list[ServerAddress] = [server.address for server in servers]
        self.begun: list[int] = []
        self.ended: list[tuple[int, dict[str, str]]] = []

    def begin_push(self, version: int) -> list[ServerAddress]:
        self.begun.append(version)
        return self.addresses

    def end_push(self, version: int, failed: Mapping[str, str]) -> None:
        self.ended.append((version, dict(failed)))


class Exported:
    """The trainer's tensors, of values around `value`; knows whether it came to its end, as a collective must."""

    def __init__(self, value: float = 0.0, *, fails_after: int | None = None, num: int = 3) -> None:
        self.tensors = {f"w{i}": torch.full((4,), value + i) for i in range(num)}
        self.fails_after = fails_after
        self.is_exhausted = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for i, (name, tensor) in enumerate(self.tensors.items()):
            if i == self.fails_after:
                raise RuntimeError("a rank of the trainer is gone")
            yield name, tensor
        self.is_exhausted = True


def mean(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().mean() for tensor in tensors.values()]).mean()) if tensors else 0.0
