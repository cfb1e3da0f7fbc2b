"""New weights for a real SGLang server, by each way: what it draws afterwards is theirs alone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from helpers.fake_servers import free_port
from megatron_klear.errors import RequestRefused
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GroupAddress, TensorSpec
from servers.sglang.process import Bench, Weights
from servers.sglang.requests import batch, draw, prompt

pytestmark = pytest.mark.servers
PROBE = prompt(40)
GROUP = "weights"
Send = Callable[[SglangServer, Weights], Awaitable[None]]


async def send_folder(server: SglangServer, weights: Weights) -> None:
    await server.update_from_disk(str(weights.folder), 2)


async def send_tensors(server: SglangServer, weights: Weights) -> None:
    """In two buckets, as a large model would go."""
    named = list(weights.tensors.items())
    await server.begin_update()
    for bucket in (named[:7], named[7:]):
        await server.update_from_tensors(bucket)
    await server.end_update()
    await server.set_version(2)


async def send_broadcast(server: SglangServer, weights: Weights) -> None:
    address = GroupAddress(GROUP, "127.0.0.1", free_port(), world_size=2, rank_offset=1, backend="gloo")
    _, group = await asyncio.gather(server.join_group(address), asyncio.to_thread(found_group, address))
    specs = [
        TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.tensors.items()
    ]
    try:
        await server.begin_update()
        receiving = asyncio.create_task(server.update_from_broadcast(specs, GROUP))
        await asyncio.to_thread(broadcast, group, list(weights.tensors.values()))
        await receiving
        await server.end_update()
        await server.set_version(2)
        await server.leave_group(GROUP)
    finally:
        dist.destroy_process_group(group)


def found_group(address: GroupAddress) -> dist.ProcessGroup:
    """Rank 0's side, by the same steps as the server's."""
    timeout = timedelta(seconds=60)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address.host, address.port, address.world_size, is_master=True, timeout=timeout, wait_for_workers=False
    )
    group, _ = c10d._new_process_group_helper(
        address.world_size,
        0,
        [],
        dist.Backend(address.backend),
        c10d.PrefixStore(address.name, store),
        group_name=c10d.GroupName(address.name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def broadcast(group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        group.broadcast([tensor], dist.BroadcastOptions()).wait()


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As SGLang holds them: queries, keys and values in one matrix, gate and up in another."""
    order = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    order |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    parts: dict[str, list[Tensor]] = {name: [tensor] for name, tensor in tensors.items() if part_of(name) not in order}
    for part, whole in order.items():
        for name in (name for name in tensors if part_of(name) == part):
            parts.setdefault(name.replace(part, whole), []).append(tensors[name])
    return {name: torch.cat(rows) for name, rows in parts.items()}


def part_of(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2]


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()[:16]
        for name, tensor in fused(tensors).items()
    }


@pytest.mark.parametrize("send", (send_folder, send_tensors, send_broadcast), ids=("disk", "tensor", "broadcast"))
def test_after_an_update_it_draws_from_the_new_weights(bench: Bench, send: Send) -> None:
    """Nothing is left of the old ones: neither in a tensor, nor in the cache of prefixes."""
    requests = batch((0.0, 1.0, 0.7, 1.0) * 2)

    async def body(server: SglangServer) -> list[Completion]:
        assert await server.weight_version() == 1
        assert await server.checksum() == checksums(bench.first.tensors)
        before = await server.score(PROBE)
        torch.testing.assert_close(torch.tensor(before), bench.first.scores(PROBE), rtol=0, atol=1e-4)
        await draw(server, requests)
        await server.pause("abort")
        await send(server, bench.second)
        await server.flush_cache()
        assert await server.weight_version() == 2
        assert await server.checksum() == checksums(bench.second.tensors)
        await server.resume()
        after = await server.score(PROBE)
        torch.testing.assert_close(torch.tensor(after), bench.second.scores(PROBE), rtol=0, atol=1e-4)
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 1
        return await draw(server, requests)

    for request, completion in zip(requests, bench.run(body), strict=True):
        assert [piece.weight_version for piece in completion.pieces] == [2]
        expected = bench.second.rescored(request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_a_cache_that_was_not_flushed_would_show(bench: Bench) -> None:
    """The control of the test above: log-probs after the old weights' prefix are off by far more than its limit."""
    request = batch((0.0,) * 12, num_new=1)[-1]

    async def body(server: SglangServer) -> tuple[Completion, Completion]:
        await server.generate(request)
        await send_folder(server, bench.second)
        stale = await server.generate(request)
        await server.flush_cache()
        return stale, await server.generate(request)

    stale, fresh = bench.run(body)
    assert abs(stale.logprobs[0] - bench.second.rescored(request, stale).item()) > 1e-2
    assert abs(fresh.logprobs[0] - bench.second.rescored(request, fresh).item()) < 1e-4


def test_a_bucket_may_mix_dtypes(bench: Bench) -> None:
    """Every other tensor in bfloat16, so that float32 ones begin where they cannot be viewed without a gap."""
    odd = torch.ones(1, dtype=torch.bfloat16)  # Not of the model; moves everything behind it by two bytes.
    sent = {
        name: tensor.bfloat16() if number % 2 else tensor
        for number, (name, tensor) in enumerate(bench.second.tensors.items())
    }

    async def body(server: SglangServer) -> Mapping[str, str]:
        await server.begin_update()
        await server.update_from_tensors([("rotary_emb.inv_freq", odd), *sent.items()])
        await server.end_update()
        return await server.checksum()

    assert bench.run(body) == checksums(sent)


def test_tensors_outside_a_session_are_refused(bench: Bench) -> None:
    """Why `brackets_updates` has to be asked for."""

    async def body(server: SglangServer) -> Mapping[str, str]:
        with pytest.raises(RequestRefused, match="must run between begin_weight_update"):
            await server.update_from_tensors(list(bench.second.tensors.items()))
        with pytest.raises(RequestRefused, match="no weight-update session is open"):
            await server.end_update()
        return await server.checksum()

    assert bench.run(body) == checksums(bench.first.tensors)


def test_a_session_that_a_broken_push_left_open_does_no_harm(bench: Bench) -> None:
    async def body(server: SglangServer) -> Mapping[str, str]:
        await server.begin_update()
        await send_tensors(server, bench.second)
        return await server.checksum()

    assert bench.run(body) == checksums(bench.second.tensors)


def test_a_folder_that_is_not_there_changes_nothing(bench: Bench) -> None:
    async def body(server: SglangServer) -> tuple[Mapping[str, str], int | None]:
        with pytest.raises(RequestRefused, match="update_weights_from_disk: status 400"):
            await server.update_from_disk(str(bench.second.folder / "nowhere"), 2)
        return await server.checksum(), await server.weight_version()

    assert bench.run(body) == (checksums(bench.first.tensors), 1)
