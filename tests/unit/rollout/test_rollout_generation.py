"""How the embedded engine runs a batch: its samples' distribution, what it shares, what it holds, how it is cut up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_moe_shape, tiny_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.models.qwen3 import decode, kv_cache
from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.rollout import generation
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.rollout.generation import Generation
from megatron_klear.types import Completion, GenerationRequest
from megatron_klear_kernels.linear import autograd

SHAPE = tiny_shape(tied=True)
VOCAB = 61
NUM_DRAWS = 6000


@cache
def weights() -> dict[str, Tensor]:
    return random_tensors(SHAPE, 5)


def engine(*, slots: int = 8) -> EmbeddedEngine:
    made = EmbeddedEngine(SHAPE, max_running_requests=slots)
    made.load_weights(weights().items(), 0)
    return made


def groups(num: int = 6, size: int = 4) -> list[GenerationRequest]:
    """`num` prompts of 1 to 23 tokens, `size` requests each, of 1 to 40 new tokens."""
    numbers = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (1 + i * 22 // (num - 1),), generator=numbers).tolist() for i in range(num)]
    limits = torch.randint(1, 41, (num * size,), generator=numbers).tolist()
    return [GenerationRequest(f"r{i}", tuple(prompts[i // size]), limit, seed=77 + i) for i, limit in enumerate(limits)]


@torch.no_grad()
def assert_rescored(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> None:
    """The engine's log-probs are those of transformers."""
    model = hf_model(SHAPE, weights())
    for request, done in zip(requests, completions, strict=True):
        assert len(done.token_ids) == request.max_new_tokens
        ids = torch.tensor([[*request.token_ids, *done.token_ids]])
        logprobs = model(ids).logits[0, len(request.token_ids) - 1 : -1].log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), wanted, rtol=0, atol=1e-4)


def assert_same(ones: Sequence[Completion], others: Sequence[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.token_ids == other.token_ids and one.stop_reason == other.stop_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def chi_square(tokens: Tensor, probs: Tensor) -> tuple[float, int]:
    """The sum and its degrees of freedom; tokens that are expected less than 8 times count as one."""
    expected = probs * NUM_DRAWS
    counts, rare = tokens.bincount(minlength=VOCAB).double(), expected < 8
    if rare.any():
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    return float(((counts - expected).square() / expected).sum()), expected.numel() - 1


@torch.no_grad()
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_samples_follow_transformers_distribution(temperature: float) -> None:
    """The first token comes from a shared prefill, the second from a step: its distribution is over all first ones."""
    prompt = (3, 50, 17, 8)
    jobs = [GenerationRequest(f"r{i}", prompt, 2, temperature=temperature, seed=i) for i in range(NUM_DRAWS)]
    first, second = torch.tensor([done.token_ids for done in engine(slots=256).generate(jobs)]).t()
    model = hf_model(SHAPE, weights())
    ids = torch.cat([torch.tensor(prompt).expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
    logits = model(ids).logits.double()

    def probs(divisor: float) -> tuple[Tensor, Tensor]:
        one = (logits[0, -2] / divisor).softmax(-1)
        return one, one @ (logits[:, -1] / divisor).softmax(-1)

    for tokens, right, wrong in zip((first, second), probs(temperature), probs(temperature * 1.3), strict=True):
        found, freedom = chi_square(tokens, right)
        # 5 standard deviations; a temperature that is 30 % off is outside.
        assert found < freedom + 5 * (2 * freedom) ** 0.5
        assert chi_square(tokens, wrong)[0] > freedom + 5 * (2 * freedom) ** 0.5


class CountingDecoder(Qwen3Decoder):
    """Keeps what was prefilled and the most memory that the cache had."""

    def __init__(self) -> None:
        super().__init__(SHAPE, weights().items())
        self.prefills: list[tuple[int, int]] = []
        self.num_bytes = 0
        self.rows: list[int] = []

    def prefill(self, prompts: Tensor, lengths: Tensor, copies: Tensor) -> Tensor:
        self.prefills.append((prompts.size(0), copies.numel()))
        return super().prefill(prompts, lengths, copies)

    def step(self, token_ids: Tensor) -> Tensor:
        self.rows.append(token_ids.size(0))
        logits = super().step(token_ids)
        self.num_bytes = max(self.num_bytes, self.cache.num_bytes)
        return logits


def test_a_prompt_that_requests_share_goes_through_the_model_once() -> None:
    decoder, jobs = CountingDecoder(), groups()
    assert_rescored(jobs, Generation(decoder, jobs, 0, 24).run())
    assert decoder.prefills == [(6, 18)]


def test_the_batch_shrinks_as_requests_end() -> None:
    decoder = CountingDecoder()
    jobs = [GenerationRequest(f"r{i}", (5, 6), 1 + i, seed=i) for i in range(32)]
    Generation(decoder, jobs, 0, 32).run()
    # A row may run on to the end of the burst that it ends in.
    assert sum(decoder.rows) <= sum(i + generation.BURST - 1 for i in range(32))
    assert len(decoder.rows) == 31


def test_memory_is_that_of_the_rows_that_run_and_their_longest() -> None:
    """400 requests through 8 rows, the longest of 100 positions."""
    decoder = CountingDecoder()
    jobs = [GenerationRequest(f"r{i}", (7,) * (1 + i % 20), 1 + i * 7 % 80, seed=i) for i in range(400)]
    Generation(decoder, jobs, 0, 8).run()
    column = SHAPE.num_hidden_layers * 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * 4
    assert 0 < decoder.num_bytes <= 8 * (100 + generation.BURST + kv_cache.BLOCK) * column


@pytest.mark.parametrize("burst", (1, 3, 16))
@pytest.mark.parametrize("slots", (5, 64))
def test_bursts_change_nothing(burst: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        GenerationRequest(r.request_id, r.token_ids, r.max_new_tokens, stop_token_ids=(i, 9), seed=r.seed)
        for i, r in enumerate(groups())
    ]
    expected = engine(slots=slots).generate(jobs)
    assert {done.stop_reason for done in expected} == {"stop", "length"}
    monkeypatch.setattr(generation, "BURST", burst)
    assert_same(engine(slots=slots).generate(jobs), expected)


@pytest.mark.parametrize("slots", (5, 64))
def test_the_memory_is_made_anew_without_a_trace(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine(slots=slots).generate(groups())
    monkeypatch.setattr(kv_cache, "BLOCK", 1)
    assert_same(engine(slots=slots).generate(groups()), expected)


@pytest.mark.parametrize(("positions", "columns"), [(30, 512), (8192, 5), (1, 1)])
def test_prompts_are_prefilled_in_parts(positions: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PREFILL_POSITIONS", positions)
    monkeypatch.setattr(decode, "PREFILL_COLUMNS", columns)
    jobs = groups()
    assert_rescored(jobs, engine().generate(jobs))


def test_a_long_prompt_may_follow_short_ones() -> None:
    """Sorting puts it first in one call; rows that run while longer ones come need their columns moved to the right."""
    decoder = Qwen3Decoder(SHAPE, weights().items())
    decoder.reset(40)
    nothing = torch.zeros(0, dtype=torch.int64)
    long = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(3))

    def alone(ids: Tensor) -> Tensor:
        decoder.reset(40)
        return decoder.prefill(ids, torch.tensor([ids.size(1)]), nothing)

    wanted = torch.cat([alone(torch.tensor([[4, 5, 6]])), alone(torch.cat([long, torch.tensor([[8]])], 1))])
    decoder.reset(40)
    decoder.prefill(torch.tensor([[4, 5]]), torch.tensor([2]), nothing)
    decoder.prefill(long, torch.tensor([30]), nothing)
    torch.testing.assert_close(decoder.step(torch.tensor([6, 8])), wanted, rtol=0, atol=1e-4)


@pytest.mark.skipif(autograd._find_fast_product() is None, reason="this torch has no oneDNN product")
@pytest.mark.parametrize("shape", (SHAPE, tiny_moe_shape()), ids=("dense", "moe"))
def test_onednn_and_mkl_give_the_same(shape: Qwen3Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    def completions(fast_from: int) -> list[Completion]:
        monkeypatch.setattr(autograd, "FAST_FROM", fast_from)
        made = EmbeddedEngine(shape)
        made.load_weights(random_tensors(shape, 5).items(), 0)
        return made.generate(groups())

    assert_same(completions(0), completions(1 << 60))


def test_a_call_leaves_nothing_for_the_next() -> None:
    made, jobs = engine(), groups()
    first = made.generate(jobs)
    made.generate([GenerationRequest("long", (1,) * 90, 38)])
    assert made.generate(jobs) == first
