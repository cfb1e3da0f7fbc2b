"""Weights that travel with requests, in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_klear.types import Transport
from megatron_klear.weight_sync.crew import Crew

Bucket = list[tuple[str, Tensor]]


def buckets(named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Tensors in order, as many together as `max_bytes` hold; a larger tensor is a bucket of its own."""
    bucket: Bucket = []
    room = max_bytes
    for name, tensor in named_tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and size > room:
            yield bucket
            # Not cleared but let go: what took it may still hold it.
            bucket, room = [], max_bytes
        bucket.append((name, tensor))
        room -= size
    if bucket:
        yield bucket


class TensorTransport:
    """At most `bucket_bytes` travel at a time (plus one tensor, if it is larger), to all servers at once."""

    kind: Transport = "tensor"

    def __init__(self, *, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes

    def stage(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing: what is not held cannot be sent before servers are paused."""

    async def send(self, crew: Crew, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Bucket after bucket, each to all live servers; ends early when none is left."""
        for bucket in buckets(named_tensors, self.bucket_bytes):
            await crew.each("update_from_tensors", lambda member, some=bucket: member.server.update_from_tensors(some))
            if not crew.live:
                return

    async def close(self) -> None:
        """Nothing to leave."""
