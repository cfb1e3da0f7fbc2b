"""The embedded engine against transformers, and its promises about batching, stopping and seeds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_shape
from megatron_klear.checkpoint.hf import open_folder
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.errors import RolloutError, WeightSyncError
from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.types import Completion, GenerationRequest, Piece

SEED = 11


def engine_shape(tied: bool) -> Qwen3Shape:
    """Tied: heads of 12, for which attention has products alone. Untied: heads of 16, which the C kernel takes."""
    return tiny_shape(True) if tied else tiny_shape(False).model_copy(update={"head_dim": 16})


Weights = Iterable[tuple[str, Tensor]]


@cache
def weights(tied: bool) -> dict[str, Tensor]:
    return random_tensors(engine_shape(tied), SEED)


def engine(tied: bool = True, *, max_running_requests: int = 3) -> EmbeddedEngine:
    made = EmbeddedEngine(engine_shape(tied), max_running_requests=max_running_requests)
    made.load_weights(weights(tied).items(), 7)
    return made


def requests(num: int = 11, *, temperature: float = 1.0) -> list[GenerationRequest]:
    """Ragged prompts of 1 to 9 tokens and 1 to 14 new tokens, no stop token."""
    generator = torch.Generator().manual_seed(2)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    return [
        GenerationRequest(
            f"r{i}",
            tuple(below(61) for _ in range(1 + below(9))),
            1 + below(14),
            temperature=temperature,
            seed=1000 + i,
        )
        for i in range(num)
    ]


@torch.no_grad()
def rescored(tied: bool, request: GenerationRequest, completion: Completion) -> Tensor:
    """transformers' log-probs of the completion's tokens under softmax(logits / temperature)."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    logits = hf_model(engine_shape(tied), weights(tied))(ids).logits[0]
    own = logits[len(request.token_ids) - 1 : -1] / (request.temperature or 1.0)
    return own.log_softmax(dim=-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_logprobs_are_those_of_transformers(tied: bool, temperature: float) -> None:
    """11 ragged requests on 3 slots: every slot is used again after a longer or shorter sequence."""
    jobs = requests(temperature=temperature)
    for request, completion in zip(jobs, engine(tied).generate(jobs), strict=True):
        expected = rescored(tied, request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_greedy_tokens_are_those_of_transformers(tied: bool) -> None:
    jobs = requests(temperature=0.0)
    model: Any = hf_model(engine_shape(tied), weights(tied))
    for request, completion in zip(jobs, engine(tied).generate(jobs), strict=True):
        prompt = torch.tensor([request.token_ids])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=request.max_new_tokens
        )
        assert completion.token_ids == tuple(theirs[0, prompt.size(1) :].tolist())
        # Greedy log-probs are those of temperature 1.
        expected = rescored(tied, request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_a_hugging_face_folder_serves_as_weights(tmp_path: Path) -> None:
    """What transformers saved, read back through shape and tensors."""
    hf_model(engine_shape(tied=True), weights(True)).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    made = EmbeddedEngine(shape, max_running_requests=3)
    with open_folder(tmp_path, shape) as source:
        made.load_weights(((name, source(name)) for name in shape.tensor_shapes()), 7)
    jobs = requests()
    assert made.generate(jobs) == engine(tied=True).generate(jobs)


@pytest.mark.parametrize("max_running_requests", (1, 2, 16, 64))
def test_the_number_of_slots_changes_nothing(max_running_requests: int) -> None:
    """At 16, trickles of free slots wait for each other before a prefill; at 64 none is needed twice."""
    jobs = requests(40)
    expected = engine(max_running_requests=3).generate(jobs)
    actual = engine(max_running_requests=max_running_requests).generate(jobs)
    assert_same(actual, expected)


def assert_same(actual: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Equal but for the rounding of log-probs in differently shaped products."""
    for one, other in zip(actual, expected, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_request_does_not_depend_on_its_company() -> None:
    jobs, made = requests(), engine()
    together = made.generate(jobs)
    assert_same([made.generate([job])[0] for job in jobs], together)
    assert_same(made.generate(jobs[::-1])[::-1], together)


def test_completions_come_in_the_order_of_the_requests() -> None:
    jobs = requests(40)
    completions = engine().generate(jobs)
    assert [c.request_id for c in completions] == [r.request_id for r in jobs]
    assert all(c.pieces == (Piece(len(c.token_ids), 7),) for c in completions)
    assert all(len(c.token_ids) == len(c.logprobs) for c in completions)


def test_seeds_decide_the_draws() -> None:
    job = GenerationRequest("a", (3, 4, 5), 12, seed=1)
    made = engine()
    first, again, other = made.generate([job, dataclasses.replace(job), dataclasses.replace(job, seed=2)])
    assert first == again
    assert first.token_ids != other.token_ids


def test_a_flat_model_draws_all_tokens_alike_and_each_anew() -> None:
    """An embedding of zeros makes every logit zero. One uniform number for a whole response would repeat its token."""
    shape = engine_shape(tied=True)
    flat = weights(True) | {"model.embed_tokens.weight": torch.zeros(61, 32)}
    made = EmbeddedEngine(shape, max_running_requests=16)
    made.load_weights(flat.items(), 1)
    jobs = [GenerationRequest(f"r{i}", (1,), 20, seed=i) for i in range(61)]
    rows = [completion.token_ids for completion in made.generate(jobs)]
    counts = torch.tensor([token for row in rows for token in row]).bincount(minlength=61)
    # 60 degrees of freedom: one fair run in 100,000 is above 117. Neighbours are equal by chance once in 61.
    assert ((counts - 20.0).square() / 20.0).sum() < 117
    repeats = sum(one == other for row in rows for one, other in itertools.pairwise(row))
    assert repeats < 3 * 61 * 19 / 61


def test_without_a_stop_token_every_response_has_its_full_length() -> None:
    jobs = requests()
    for request, completion in zip(jobs, engine().generate(jobs), strict=True):
        assert completion.stop_reason == "length"
        assert len(completion.token_ids) == request.max_new_tokens


def test_a_stop_token_ends_the_response_and_belongs_to_it() -> None:
    """With the same seeds, a response with stop tokens is the free one up to its first stop token."""
    jobs = requests(40)
    free = engine().generate(jobs)
    stops = (free[0].token_ids[0], free[1].token_ids[-1])
    stopped = engine().generate([dataclasses.replace(job, stop_token_ids=stops) for job in jobs])
    reasons = set()
    for long, short in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(long.token_ids) if token in stops]
        length = ends[0] + 1 if ends else len(long.token_ids)
        assert short.token_ids == long.token_ids[:length]
        assert len(short.logprobs) == length
        assert short.stop_reason == ("stop" if ends else "length")
        reasons.add((short.stop_reason, length == len(long.token_ids)))
    assert reasons == {("stop", True), ("stop", False), ("length", True)}


def test_a_stop_token_on_the_last_position_is_a_stop() -> None:
    job = GenerationRequest("a", (3, 4, 5), 5, seed=1)
    free = engine().generate([job])[0]
    assert free.token_ids[-1] not in free.token_ids[:-1]
    stopped = engine().generate([dataclasses.replace(job, stop_token_ids=(free.token_ids[-1],))])[0]
    assert (stopped.token_ids, stopped.stop_reason) == (free.token_ids, "stop")


def test_different_temperatures_share_a_batch() -> None:
    jobs = [dataclasses.replace(job, temperature=(0.0, 0.5, 1.0, 2.0)[i % 4]) for i, job in enumerate(requests())]
    together = engine().generate(jobs)
    assert_same(together, [engine().generate([job])[0] for job in jobs])
    for request, completion in zip(jobs, together, strict=True):
        expected = rescored(True, request, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)


def test_an_engine_can_generate_again_with_longer_sequences_and_new_weights() -> None:
    made = engine()
    short, long = requests()[:2], [GenerationRequest("long", tuple(range(50)), 78, seed=3)]
    before = made.generate(short)
    made.generate(long)
    assert_same(made.generate(short), before)
    made.load_weights(random_tensors(engine_shape(True), SEED + 1).items(), 8)
    after = made.generate(short)
    assert [c.pieces[0].weight_version for c in after] == [8, 8]
    assert after[0].token_ids != before[0].token_ids or after[0].logprobs != pytest.approx(before[0].logprobs, abs=0.1)


def test_no_requests_no_completions() -> None:
    assert engine().generate([]) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("a", (1, 61), 4), "request a holds token id 61, expected ids from 0 to 60"),
        (GenerationRequest("a", (1, -1), 4), "request a holds token id -1, expected ids from 0 to 60"),
        (GenerationRequest("a", (), 4), "request a needs at least one prompt token and one new token"),
        (GenerationRequest("a", (1,), 0), "request a needs at least one prompt token and one new token"),
        (
            GenerationRequest("a", (1,) * 100, 29),
            r"request a: 100 prompt tokens \+ 29 new tokens = 129, but max_position_embeddings is 128;"
            " shorten the prompt or the response",
        ),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(request_: GenerationRequest, message: str) -> None:
    made = engine()
    with pytest.raises(RolloutError, match=message):
        made.generate([*requests(), request_])
    # The engine goes on: one bad request has killed whole servers elsewhere.
    assert made.generate(requests()) == engine().generate(requests())


def test_the_longest_allowed_request_is_allowed() -> None:
    completion = engine().generate([GenerationRequest("a", (1,) * 100, 28)])[0]
    assert len(completion.token_ids) == 28


def test_an_engine_without_weights_says_so() -> None:
    made = EmbeddedEngine(engine_shape(tied=True))
    assert made.weight_version == -1
    with pytest.raises(RolloutError, match="no weights yet; call load_weights before generate"):
        made.generate(requests())


def without_one(tensors: dict[str, Tensor]) -> Weights:
    return [(name, t) for name, t in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"]


def with_another(tensors: dict[str, Tensor]) -> Weights:
    return [*tensors.items(), ("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32))]


def with_a_head(tensors: dict[str, Tensor]) -> Weights:
    return [*tensors.items(), ("lm_head.weight", torch.zeros(61, 32))]


def transposed(tensors: dict[str, Tensor]) -> Weights:
    return [(name, t.t() if name.endswith("0.mlp.up_proj.weight") else t) for name, t in tensors.items()]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_one, "1 of 24 weights did not come, first of them model.layers.1.mlp.up_proj.weight"),
        (with_another, "unknown weight model.layers.2.mlp.up_proj.weight; a Qwen3 of this shape has 24 weights"),
        (with_a_head, "unknown weight lm_head.weight"),
        (transposed, r"model.layers.0.mlp.up_proj.weight has shape \(32, 48\), expected \(48, 32\)"),
    ],
)
def test_bad_weights_are_refused_and_the_old_ones_stay(
    spoil: Callable[[dict[str, Tensor]], Weights], message: str
) -> None:
    made, jobs = engine(), requests()
    before = made.generate(jobs)
    with pytest.raises(WeightSyncError, match=message):
        made.load_weights(spoil(random_tensors(engine_shape(True), SEED + 1)), 8)
    assert made.weight_version == 7
    assert made.generate(jobs) == before


def test_weights_are_copied() -> None:
    """The trainer goes on changing its own tensors in place."""
    tensors = random_tensors(engine_shape(True), SEED)
    made = EmbeddedEngine(engine_shape(True), max_running_requests=3)
    made.load_weights(tensors.items(), 7)
    for tensor in tensors.values():
        tensor.zero_()
    assert made.generate(requests()) == engine().generate(requests())


def next_logits(shape: Qwen3Shape, tensors: dict[str, Tensor]) -> Tensor:
    """After a prefill of three tokens and a step: [1, V]."""
    decoder = Qwen3Decoder(shape, tensors.items())
    decoder.reset(4)
    decoder.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.zeros(0, dtype=torch.int64))
    return decoder.step(torch.tensor([8]))


def test_every_weight_matters() -> None:
    """A tensor that is read from the wrong place, or not at all, would leave the logits as they are."""
    shape = engine_shape(tied=False)
    plain = next_logits(shape, weights(False))
    for name, other in random_tensors(shape, SEED + 1).items():
        assert (next_logits(shape, weights(False) | {name: other}) - plain).abs().max() > 1e-2, name


def test_bfloat16_weights_stay_close_to_float32() -> None:
    shape = engine_shape(tied=True)
    made = EmbeddedEngine(shape, max_running_requests=3)
    made.load_weights(random_tensors(shape, SEED, torch.bfloat16).items(), 7)
    jobs = requests()
    for request, completion in zip(jobs, made.generate(jobs), strict=True):
        expected = rescored(True, request, completion)
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.05


def test_bfloat16_weights_still_give_float32_logits() -> None:
    """The trainer's head multiplies in float32. Logits of size 16 rounded to bfloat16 are 0.06 off, and so is the
    ratio between trainer and engine, with equal weights."""
    shape = engine_shape(tied=False)
    logits = next_logits(shape, random_tensors(shape, SEED, torch.bfloat16))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
