"""Pauses of a real SGLang server with requests in flight, and weights that change under them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from megatron_klear.errors import EngineUnavailable, RequestRefused
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GenerationRequest, PauseMode
from servers.sglang.process import Bench, Weights
from servers.sglang.requests import batch, draw, prompt

pytestmark = pytest.mark.servers
LONG = [GenerationRequest(f"long{i}", prompt(3 + i), 480, seed=i) for i in range(8)]


async def push_second(server: SglangServer, bench: Bench) -> None:
    await server.begin_update()
    await server.update_from_tensors(list(bench.second.tensors.items()))
    await server.end_update()
    await server.set_version(2)


async def in_flight(server: SglangServer) -> list[asyncio.Task[Completion]]:
    """The long requests, when they have drawn some tokens."""
    tasks = [asyncio.create_task(server.generate(request)) for request in LONG]
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in tasks)
    return tasks


def assert_rescored(weights: Weights, request: GenerationRequest, completion: Completion, tokens: slice) -> None:
    expected = weights.rescored(request, completion)[tokens]
    torch.testing.assert_close(torch.tensor(completion.logprobs)[tokens], expected, rtol=0, atol=1e-4)


def test_an_abort_keeps_the_tokens_so_far(bench: Bench) -> None:
    """And they go on under new weights, from prompt and tokens."""

    async def body(server: SglangServer) -> tuple[Sequence[Completion], Sequence[Completion]]:
        tasks = await in_flight(server)
        await server.pause("abort")
        parts = await asyncio.gather(*tasks)
        await push_second(server, bench)
        await server.flush_cache()
        await server.resume()
        return parts, await draw(server, [rest(*pair) for pair in zip(LONG, parts, strict=True)])

    def rest(request: GenerationRequest, part: Completion) -> GenerationRequest:
        return GenerationRequest("rest", (*request.token_ids, *part.token_ids), 16)

    parts, rests = bench.run(body)
    assert sum(len(part.token_ids) for part in parts) > 0
    for request, part, end in zip(LONG, parts, rests, strict=True):
        assert part.stop_reason == "abort" and 0 <= len(part.token_ids) < 480
        assert [piece.weight_version for piece in part.pieces] == [1] * bool(part.token_ids)
        assert [piece.weight_version for piece in end.pieces] == [2]
        if part.token_ids:
            assert_rescored(bench.first, request, part, slice(None))
        assert_rescored(bench.second, rest(request, part), end, slice(None))


def test_a_retracted_request_goes_on_under_the_new_weights(bench: Bench) -> None:
    """Each token's version is that of the weights that transformers finds its log-prob in."""

    async def body(server: SglangServer) -> Sequence[Completion]:
        tasks = await in_flight(server)
        await server.pause("retract")
        await push_second(server, bench)
        await server.flush_cache()
        await server.resume()
        return await asyncio.gather(*tasks)

    num_mixed = 0
    for request, completion in zip(LONG, bench.run(body), strict=True):
        assert completion.stop_reason == "length"
        versions = [piece.weight_version for piece in completion.pieces]
        assert versions in ([1, 2], [2])
        num_old = completion.pieces[0].num_tokens if versions == [1, 2] else 0
        num_mixed += num_old > 0
        if num_old:
            assert_rescored(bench.first, request, completion, slice(0, num_old))
        assert_rescored(bench.second, request, completion, slice(num_old, None))
    assert num_mixed > 0


def test_an_in_place_pause_keeps_the_cache_of_the_old_weights(bench: Bench) -> None:
    """The server refuses to flush it; the tokens say rightly which weights drew them, on a cache of older ones."""

    async def body(server: SglangServer) -> Sequence[Completion]:
        tasks = await in_flight(server)
        await server.pause("in_place")
        await push_second(server, bench)
        with pytest.raises(EngineUnavailable, match="prefix cache was not flushed"):
            await server.flush_cache()
        await server.resume()
        done = await asyncio.gather(*tasks)
        await server.flush_cache()
        return done

    completions = bench.run(body)
    mixed = [pair for pair in zip(LONG, completions, strict=True) if len(pair[1].pieces) == 2]
    assert mixed and all([piece.weight_version for piece in one.pieces] == [1, 2] for _, one in mixed)
    request, completion = mixed[0]
    num_old = completion.pieces[0].num_tokens
    assert_rescored(bench.first, request, completion, slice(0, num_old))
    new = torch.tensor(completion.logprobs)[num_old:] - bench.second.rescored(request, completion)[num_old:]
    assert new.abs().max() > 1e-2


@pytest.mark.parametrize("mode", ("abort", "retract", "in_place"))
def test_a_paused_server_answers_no_generation_and_no_score(bench: Bench, mode: PauseMode) -> None:
    """So a push can probe it only after it has resumed. abort_all does not reach those that wait."""

    async def body(server: SglangServer) -> None:
        await server.pause(mode)
        waiting = [
            asyncio.create_task(server.score((5, 6, 7))),
            asyncio.create_task(server.generate(GenerationRequest("r", (5,), 3))),
        ]
        await asyncio.sleep(1)
        await server.abort_all()
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        await server.resume()
        score, completion = await asyncio.gather(*waiting)
        assert len(score) == 2
        assert completion.stop_reason == "length"

    bench.run(body)


def test_abort_ends_the_request_that_is_named(bench: Bench) -> None:
    async def body(server: SglangServer) -> list[Completion]:
        tasks = await in_flight(server)
        await server.abort("long3")
        await server.abort("who?")
        first = await tasks[3]
        assert not any(task.done() for i, task in enumerate(tasks) if i != 3)
        await server.abort_all()
        return [first, *await asyncio.gather(*tasks)]

    completions = bench.run(body)
    assert [completion.stop_reason for completion in completions] == ["abort"] * 9
    assert completions[0].request_id == "long3"


def test_waiting_for_the_end_of_requests_is_no_mode_of_sglang(bench: Bench) -> None:
    with pytest.raises(RequestRefused, match="pauses by abort, in_place, retract, not wait; change rollout"):
        bench.run(lambda server: server.pause("wait"))


def test_a_server_that_slept_takes_weights_and_serves(bench: Bench) -> None:
    """Without its memory saver it gives nothing back, but the calls and their order are those of a GPU."""
    request = batch((0.0,))[0]

    async def body(server: SglangServer) -> Completion:
        await server.pause("abort")
        await server.flush_cache()
        await server.sleep()
        await server.wake()
        await push_second(server, bench)
        await server.resume()
        return await server.generate(request)

    completion = bench.run(body)
    assert_rescored(bench.second, request, completion, slice(None))
