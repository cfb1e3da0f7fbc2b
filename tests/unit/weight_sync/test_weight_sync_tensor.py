"""Buckets: bounded, in order, complete; and memory over many pushes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import psutil
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.fresh_process import number_of
from helpers.shelf_servers import Exported, ShelfControl, ShelfServer
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync
from megatron_klear.weight_sync.tensor import TensorTransport, buckets

MIB = 1024**2


@given(sizes=st.lists(st.integers(0, 20), max_size=30), limit=st.integers(1, 30))
def test_buckets_hold_all_in_order_and_no_more_than_they_may(sizes: list[int], limit: int) -> None:
    tensors = [(f"w{i}", torch.zeros(size, dtype=torch.int8)) for i, size in enumerate(sizes)]
    found = list(buckets(tensors, limit))
    assert [name for bucket in found for name, _ in bucket] == [name for name, _ in tensors]
    filled = [sum(tensor.numel() for _, tensor in bucket) for bucket in found]
    assert all(full <= limit or len(bucket) == 1 for full, bucket in zip(filled, found, strict=True))
    # As few as an order allows: the next tensor would not have gone in.
    firsts = [bucket[0][1].numel() for bucket in found[1:]]
    assert all(full + first > limit for full, first in zip(filled[:-1], firsts, strict=True))


def test_a_server_that_fails_in_a_bucket_gets_no_more_and_others_get_all() -> None:
    class Full(ShelfServer):
        async def update_from_tensors(self, bucket: list[tuple[str, Tensor]]) -> None:  # type: ignore[override]
            if self.tensors:
                self.breaks.add("update_from_tensors")
            await super().update_from_tensors(bucket)

    full, good = Full("full"), ShelfServer("good")
    exported = Exported(num=5)
    with RemoteSync(setup([full, good], 16)) as sync:
        report = sync.push(exported, 1)
    assert list(report.failed) == ["full"]
    assert full.calls.count("update_from_tensors") == 2 and good.calls.count("update_from_tensors") == 5
    assert good.tensors.keys() == exported.tensors.keys()


def setup(servers: list[ShelfServer], bucket_bytes: int) -> PushSetup:
    by_name = {server.name: server for server in servers}
    return PushSetup(
        control=ShelfControl(servers),
        connect=lambda address: by_name[address.name],
        transport=TensorTransport(bucket_bytes=bucket_bytes),
        pause_mode="abort",
        timeout_s=60.0,
        max_probe_diff=1e-3,
    )


class OneByte(ShelfServer):
    """Looks at each bucket and keeps nothing of it."""

    async def update_from_tensors(self, bucket: list[tuple[str, Tensor]]) -> None:  # type: ignore[override]
        self.tensors = {name: tensor[:1].clone() for name, tensor in bucket}
        self.largest = max(vars(self).get("largest", 0), sum(tensor.nbytes for _, tensor in bucket))


def fresh_tensors(value: int) -> Iterator[tuple[str, Tensor]]:
    """64 MiB in tensors of 4, each made when it is asked for."""
    for i in range(16):
        yield f"w{i}", torch.full((MIB,), float(value + i))


def growth_over_pushes() -> float:
    """MiB that 20 pushes of 64 MiB left, after the first four."""
    process = psutil.Process()
    server = OneByte("a")
    used = []
    with RemoteSync(setup([server], 16 * MIB)) as sync:
        for version in range(24):
            assert sync.push(fresh_tensors(version), version).num_bytes == 64 * MIB
            gc.collect()
            used.append(process.memory_info().rss)
    assert server.largest == 16 * MIB
    return (max(used[-4:]) - max(used[:4])) / MIB


def test_memory_does_not_grow_over_20_pushes() -> None:
    # One kept bucket a push would be 320 MiB.
    assert number_of(__file__, "growth_over_pushes") < 24
