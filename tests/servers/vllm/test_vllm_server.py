"""A real vLLM on this host, against transformers' log-probs in float32."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megatron_klear.data.arithmetic import END, vocabulary
from megatron_klear.errors import EngineUnavailable, RolloutError
from megatron_klear.rollout.vllm import VllmServer
from megatron_klear.types import Completion, Piece
from servers.vllm.process import RunningVllm, Weights, make_weights, max_diff, request, running_vllm

pytestmark = pytest.mark.servers

PROMPT = (5, 6, 7, 20, 33)
MAX_DIFF = 1e-4


@dataclass(frozen=True)
class Bench:
    server: RunningVllm
    first_answer: str
    old: Weights
    new: Weights


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    old, new = make_weights(folder / "old", 1), make_weights(folder / "new", 2)
    with running_vllm(old.folder, folder / "vllm.log") as (server, first_answer):
        yield Bench(server, first_answer, old, new)


async def push(server: VllmServer, weights: Weights, version: int) -> None:
    """All that a push does, in its order."""
    await server.pause("abort")
    await server.update_from_disk(str(weights.folder), version)
    await server.flush_cache()
    await server.resume()


async def start_long(server: VllmServer, num_new: int) -> asyncio.Task[Completion]:
    """A request in the midst of its tokens: another one, which came after it, has had some of its own."""
    task = asyncio.create_task(server.generate(request(PROMPT, num_new)))
    await asyncio.sleep(0.02)
    await server.generate(request(PROMPT, 8, seed=2))
    return task


def test_weights_it_started_with_are_not_ours(bench: Bench) -> None:
    assert "labelled 'default'" in bench.first_answer and "push the weights again" in bench.first_answer


def test_facts(bench: Bench) -> None:
    facts = bench.server.talk(lambda server: server.facts())
    assert facts.release.startswith("0.32.") and facts.stamps_tokens and not facts.brackets_updates
    assert facts.transports == {"disk"} and facts.pause_modes == {"abort", "wait", "retract"}
    # Its CPU engine has no sleep mode.
    assert not facts.sleeps and not facts.has_checksum


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers_at_that_temperature(bench: Bench, temperature: float) -> None:
    """Prompts and answers of many lengths in one batch, with stop tokens."""
    asked = [
        request(PROMPT * (1 + i % 4), 8 + 11 * (i % 5), temperature=temperature, stop=(9, 10), seed=i)
        for i in range(16)
    ]

    async def talk(server: VllmServer) -> list[Completion]:
        await push(server, bench.old, 1)
        return await asyncio.gather(*map(server.generate, asked))

    answers = bench.server.talk(talk)
    worst = max(max_diff(bench.old, one, answer) for one, answer in zip(asked, answers, strict=True))
    print(f"temperature {temperature}: worst difference {worst:.1e} of {sum(len(a.token_ids) for a in answers)} tokens")
    assert worst <= MAX_DIFF
    # The check has power: at the next temperature the same log-probs are far off.
    colder = [request(one.token_ids, 1, temperature=(temperature or 1.0) * 0.95) for one in asked]
    assert max(max_diff(bench.old, one, answer) for one, answer in zip(colder, answers, strict=True)) > 100 * MAX_DIFF


def test_the_stop_token_is_the_last_token_with_its_logprob(bench: Bench) -> None:
    stops = tuple(range(8, 40))

    async def talk(server: VllmServer) -> Completion:
        await push(server, bench.old, 1)
        return await server.generate(request(PROMPT, 200, stop=stops))

    answer = bench.server.talk(talk)
    assert answer.stop_reason == "stop" and answer.token_ids[-1] in stops
    assert not set(answer.token_ids[:-1]) & set(stops)
    assert len(answer.logprobs) == len(answer.token_ids) and max_diff(bench.old, request(PROMPT, 200), answer) < 1e-4


def test_only_the_request_says_where_a_response_ends(bench: Bench) -> None:
    """The model's own end of text, which the server knows from its files, is a token like others."""
    end = vocabulary()[END]

    async def talk(server: VllmServer) -> list[Completion]:
        await push(server, bench.old, 1)
        return await asyncio.gather(*(server.generate(request(PROMPT, 300, temperature=2, seed=i)) for i in range(4)))

    answers = bench.server.talk(talk)
    assert any(end in answer.token_ids[:-1] for answer in answers)
    assert all(answer.stop_reason == "length" and len(answer.token_ids) == 300 for answer in answers)


def test_a_seed_gives_its_tokens_whatever_shares_the_batch(bench: Bench) -> None:
    async def talk(server: VllmServer) -> tuple[Completion, list[Completion]]:
        await push(server, bench.old, 1)
        alone = await server.generate(request(PROMPT, 30, seed=3))
        return alone, await asyncio.gather(*(server.generate(request(PROMPT, 30, seed=i)) for i in range(8)))

    alone, together = bench.server.talk(talk)
    assert together[3].token_ids == alone.token_ids
    assert max(Counter(answer.token_ids for answer in together).values()) == 1


def test_scores_are_those_of_transformers(bench: Bench) -> None:
    tokens = tuple(3 + (7 * i) % 60 for i in range(300))

    async def talk(server: VllmServer) -> tuple[list[float], list[float]]:
        await push(server, bench.old, 1)
        # Once more with the prefix in the cache.
        return await server.score(tokens), await server.score(tokens)

    expected = bench.old.logprobs(tokens)
    for scores in bench.server.talk(talk):
        assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) <= MAX_DIFF


def test_an_abort_keeps_the_tokens_made_so_far(bench: Bench) -> None:
    async def talk(server: VllmServer) -> tuple[Completion, bool, Completion]:
        await push(server, bench.old, 1)
        running = await start_long(server, 400)
        await server.pause("abort")
        cut = await running
        waiting = asyncio.create_task(server.generate(request(PROMPT, 4)))
        await asyncio.sleep(1)
        answered_while_paused = waiting.done()
        await server.resume()
        return cut, answered_while_paused, await waiting

    cut, answered_while_paused, after = bench.server.talk(talk)
    assert cut.stop_reason == "abort" and 0 < len(cut.token_ids) < 400
    assert cut.pieces == (Piece(len(cut.token_ids), 1, "vllm-0"),)
    assert max_diff(bench.old, request(PROMPT, 400), cut) <= MAX_DIFF
    assert not answered_while_paused and after.stop_reason == "length"


def test_abort_all_does_not_pause(bench: Bench) -> None:
    async def talk(server: VllmServer) -> tuple[Completion, Completion]:
        await push(server, bench.old, 1)
        running = await start_long(server, 400)
        await server.abort_all()
        return await running, await server.generate(request(PROMPT, 4))

    cut, after = bench.server.talk(talk)
    assert cut.stop_reason == "abort" and len(cut.token_ids) < 400 and after.stop_reason == "length"


def test_waiting_lets_running_requests_end(bench: Bench) -> None:
    async def talk(server: VllmServer) -> tuple[bool, Completion]:
        await push(server, bench.old, 1)
        running = await start_long(server, 300)
        await server.pause("wait")
        await asyncio.sleep(0.2)
        return running.done(), await running

    ended_when_paused, answer = bench.server.talk(talk)
    assert ended_when_paused and answer.stop_reason == "length" and len(answer.token_ids) == 300


def test_an_update_changes_the_outputs_to_those_of_the_new_weights(bench: Bench) -> None:
    prompt = tuple(3 + (5 * i) % 60 for i in range(300))

    async def talk(server: VllmServer) -> tuple[int | None, Completion, Completion, int | None]:
        await push(server, bench.old, 6)
        named_before, before = await server.weight_version(), await server.generate(request(prompt, 20))
        await push(server, bench.new, 7)
        return named_before, before, await server.generate(request(prompt, 20)), await server.weight_version()

    named_before, before, after, named_after = bench.server.talk(talk)
    assert (named_before, named_after) == (6, 7)
    assert before.pieces == (Piece(20, 6, "vllm-0"),) and after.pieces == (Piece(20, 7, "vllm-0"),)
    assert max_diff(bench.old, request(prompt, 20), before) <= MAX_DIFF
    assert max_diff(bench.new, request(prompt, 20), after) <= MAX_DIFF
    assert max_diff(bench.new, request(prompt, 20), before) > 100 * MAX_DIFF


def test_a_cache_that_was_not_flushed_shows(bench: Bench) -> None:
    """The control of the test above: prefixes of the old weights spoil what the new ones draw."""
    prompt = tuple(3 + (11 * i) % 60 for i in range(300))

    async def talk(server: VllmServer) -> Completion:
        await push(server, bench.old, 1)
        await server.generate(request(prompt, 20))
        # Not paused either: vLLM empties the cache of a server that it pauses.
        await server.update_from_disk(str(bench.new.folder), 2)
        return await server.generate(request(prompt, 20))

    assert max_diff(bench.new, request(prompt, 20), bench.server.talk(talk)) > 100 * MAX_DIFF


def test_retracted_requests_go_on_from_their_tokens_under_the_new_weights(bench: Bench) -> None:
    async def talk(server: VllmServer) -> Completion:
        await push(server, bench.old, 1)
        running = await start_long(server, 400)
        await server.pause("retract")
        await server.update_from_disk(str(bench.new.folder), 2)
        await server.flush_cache()
        await server.resume()
        return await running

    answer = bench.server.talk(talk)
    first, second = answer.pieces
    assert (first.weight_version, second.weight_version) == (1, 2)
    assert answer.stop_reason == "length" and first.num_tokens + second.num_tokens == len(answer.token_ids) == 400
    whole = (*PROMPT, *answer.token_ids)
    for weights, own in ((bench.old, slice(first.num_tokens)), (bench.new, slice(first.num_tokens, None))):
        expected = weights.logprobs(whole)[len(PROMPT) - 1 :]
        assert max(abs(a - b) for a, b in zip(answer.logprobs[own], expected[own], strict=True)) <= MAX_DIFF


def test_a_folder_that_is_not_there_leaves_weights_of_no_version(bench: Bench) -> None:
    async def fail(server: VllmServer) -> None:
        await push(server, bench.old, 1)
        with pytest.raises(EngineUnavailable, match=r"vllm-0 .*collective_rpc"):
            await server.update_from_disk(str(bench.old.folder / "nothing"), 2)

    async def recover(server: VllmServer) -> tuple[int | None, Completion]:
        version = await server.weight_version()
        await push(server, bench.new, 2)
        return version, await server.generate(request(PROMPT, 20))

    bench.server.talk(fail)
    # By new connections: with a status of 500 vLLM closes the old one, and does not say so.
    version, after = bench.server.talk(recover)
    assert version is None
    assert max_diff(bench.new, request(PROMPT, 20), after) <= MAX_DIFF


def test_an_id_beyond_the_vocabulary_is_refused_before_it_is_sent(bench: Bench) -> None:
    """Sent, it ends the server."""

    async def talk(server: VllmServer) -> Completion:
        await push(server, bench.old, 1)
        with pytest.raises(RolloutError, match=r"seed 1 holds token id 64, expected ids from 0 to 63"):
            await server.generate(request((5, 64), 4))
        with pytest.raises(RolloutError, match=r"holds token id 99, expected ids from 0 to 63"):
            await server.score((5, 99))
        return await server.generate(request(PROMPT, 4))

    assert bench.server.talk(talk).stop_reason == "length"
