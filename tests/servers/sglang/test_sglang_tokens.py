"""What a real SGLang server draws, token by token, against transformers in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_klear.errors import EngineStale, RequestRefused, RolloutError
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GenerationRequest, Piece, ServerFacts
from servers.sglang.process import Bench
from servers.sglang.requests import NUM_NEW_TOKENS, batch, draw, prompt

pytestmark = pytest.mark.servers
END = 1
MIXED = (0.0, 0.7, 1.0)


@pytest.mark.parametrize(
    "temperatures",
    ((0.0,) * 12, (1.0,) * 12, (0.7,) * 12, MIXED * 6),
    ids=("greedy", "1", "0.7", "all in one batch"),
)
def test_logprobs_are_those_of_transformers(bench: Bench, temperatures: tuple[float, ...]) -> None:
    """Over whole responses. Log-probs of greedy requests are those of temperature 1."""
    requests = batch(temperatures)
    for request, completion in zip(requests, bench.run(lambda server: draw(server, requests)), strict=True):
        assert completion.request_id == request.request_id
        assert completion.stop_reason == "length"
        assert completion.pieces == (Piece(NUM_NEW_TOKENS, 1, "sglang-0"),)
        expected = bench.first.rescored(request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
        if request.temperature == 0:
            rows = bench.first.logprobs((*request.token_ids, *completion.token_ids))[len(request.token_ids) - 1 :]
            assert completion.token_ids == tuple(rows.argmax(dim=-1).tolist())


def test_scores_are_those_of_transformers(bench: Bench) -> None:
    sequences = [prompt(length) for length in (2, 3, 17, 300)]

    async def body(server: SglangServer) -> list[list[float]]:
        # Twice: the second time the prefix lies in the cache.
        return [await server.score(ids) for ids in sequences * 2]

    for ids, scores in zip(sequences * 2, bench.run(body), strict=True):
        torch.testing.assert_close(torch.tensor(scores), bench.first.scores(ids), rtol=0, atol=1e-4)


def test_the_stop_token_is_kept_as_the_last_token_with_its_logprob(bench: Bench) -> None:
    requests = batch((1.0,) * 40, (END,))
    completions = bench.run(lambda server: draw(server, requests))
    reasons = [completion.stop_reason for completion in completions]
    assert reasons.count("stop") > 10 and reasons.count("length") > 0
    for request, completion in zip(requests, completions, strict=True):
        place = completion.token_ids.index(END) if END in completion.token_ids else None
        assert place == (len(completion.token_ids) - 1 if completion.stop_reason == "stop" else None)
        expected = bench.first.rescored(request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_without_stop_tokens_the_models_own_do_not_stop_it(bench: Bench) -> None:
    completions = bench.run(lambda server: draw(server, batch((1.0,) * 12)))
    assert any(END in completion.token_ids[:-1] for completion in completions)
    assert {len(completion.token_ids) for completion in completions} == {NUM_NEW_TOKENS}


def test_a_bad_id_is_refused_before_it_is_sent(bench: Bench) -> None:
    """The server would die of it."""

    async def body(server: SglangServer) -> Completion:
        with pytest.raises(RolloutError, match="request bad holds token id 64, expected ids from 0 to 63"):
            await server.generate(GenerationRequest("bad", (5, 64), 1))
        with pytest.raises(RolloutError, match="sequence to score holds token id 99999"):
            await server.score((5, 99999))
        return await server.generate(GenerationRequest("good", (5, 63), 1))

    assert len(bench.run(body).token_ids) == 1
    assert bench.process.poll() is None


def test_what_the_server_finds_too_long_is_refused(bench: Bench) -> None:
    """Limits that are not the server's: it answers 400, which no other server of its kind would do otherwise."""

    async def body(server: SglangServer) -> None:
        wide = SglangServer(
            server.address, bench.labels, timeout_s=60, max_connections=1, limits=ModelLimits(64, 100_000)
        )
        try:
            with pytest.raises(RequestRefused, match="maximum context length"):
                await wide.generate(GenerationRequest("long", (5,), 600))
        finally:
            await wide.close()

    bench.run(body)


def test_tokens_of_foreign_weights_are_stale(bench: Bench) -> None:
    async def body(server: SglangServer) -> None:
        stranger = bench.connect(VersionLabels())
        try:
            assert await stranger.weight_version() is None
            with pytest.raises(EngineStale, match=f"weights called '{bench.labels.text(1)}'"):
                await stranger.generate(GenerationRequest("r", (5,), 4))
        finally:
            await stranger.close()

    bench.run(body)


def test_the_same_request_may_run_twice_at_a_time(bench: Bench) -> None:
    """A retry must not meet its first attempt. Its seed is the same, and means nothing to a server like this one."""
    request = GenerationRequest("again", (5, 6), NUM_NEW_TOKENS)
    one, other = bench.run(lambda server: draw(server, [request, request]))
    assert one.request_id == other.request_id == "again"
    assert one.token_ids != other.token_ids


def test_facts_are_those_of_the_release(bench: Bench) -> None:
    facts = bench.run(lambda server: server.facts())
    assert dataclasses.replace(facts, release="") == ServerFacts(
        release="",
        transports=frozenset({"disk", "tensor", "broadcast"}),
        pause_modes=frozenset({"abort", "retract", "in_place"}),
        brackets_updates=True,
        stamps_tokens=True,
        has_checksum=True,
        sleeps=False,  # It runs without its memory saver.
        num_ranks=1,
    )
    assert facts.release == "0.5.23"
