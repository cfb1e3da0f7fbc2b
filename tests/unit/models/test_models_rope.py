"""Rotary positions are transformers': tables bit for bit, a trainer's logits and an engine's log-probs by rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import hf_config, hf_model, random_tensors, tiny_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.rope import RopeConfig
from megatron_klear.models.qwen3.attention import MAX_DENSE_LENGTH
from megatron_klear.models.qwen3.rope import inverse_frequencies, rope_table
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.training.convert import megatron_logits
from megatron_klear.types import GenerationRequest


def yarn(**changes: Any) -> RopeConfig:
    settings = {"rope_theta": 1e6, "factor": 2.5, "original_max_position_embeddings": 32768, **changes}
    return RopeConfig(rope_type="yarn", **settings)


ROPES = [
    RopeConfig(rope_theta=1e6),
    RopeConfig(),
    yarn(),
    yarn(factor=4, original_max_position_embeddings=40960),
    yarn(factor=1),
    yarn(rope_theta=1000, original_max_position_embeddings=64),
    yarn(attention_factor=1.7),
    yarn(beta_fast=20, beta_slow=3, truncate=False),
    yarn(mscale=0.7, mscale_all_dim=1.3),
    yarn(mscale=0.7),
    # Both ends of the ramp on one pair, and an original context so short that no pair keeps its frequency.
    yarn(original_max_position_embeddings=7, beta_fast=1.0),
    yarn(original_max_position_embeddings=2),
]


def shape_with(rope: RopeConfig, **changes: Any) -> Qwen3Shape:
    positions = round((rope.factor or 1) * (rope.original_max_position_embeddings or 1024))
    return tiny_shape(True).model_copy(update={"rope": rope, "max_position_embeddings": positions, **changes})


@pytest.mark.parametrize("head_dim", [12, 128])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_the_table_is_that_of_transformers(rope: RopeConfig, head_dim: int) -> None:
    theirs = Qwen3RotaryEmbedding(hf_config(shape_with(rope, head_dim=head_dim)))
    frequencies, scaling = inverse_frequencies(rope, head_dim, "cpu")
    assert frequencies.dtype == torch.float32 and torch.equal(frequencies, theirs.inv_freq)
    assert scaling == theirs.attention_scaling
    positions = torch.tensor([0, 1, 2, 63, 64, 1000, 32767, 32768, 65535, 81919])
    for dtype in (torch.float32, torch.bfloat16):
        wanted = theirs(torch.zeros(1, dtype=dtype), positions[None])
        for mine, other in zip(rope_table(positions, rope, head_dim, dtype), wanted, strict=True):
            assert mine.dtype == dtype and mine.shape == (10, head_dim // 2)
            assert torch.equal(mine, other[0, :, : head_dim // 2])


def test_yarn_in_closed_form() -> None:
    """The ends of the ramp by hand: 128 dimensions, theta 1e6, 32768 positions."""
    frequencies, scaling = inverse_frequencies(yarn(), 128, "cpu")
    plain, one = inverse_frequencies(RopeConfig(rope_theta=1e6), 128, "cpu")
    assert scaling == pytest.approx(1 + 0.1 * 0.9162907) and one == 1.0
    ratio = plain / frequencies
    # 32 turns within 32768 positions at pair 23.6, one at 39.6.
    assert torch.equal(ratio[:24], torch.ones(24))
    torch.testing.assert_close(ratio[40:], torch.full((24,), 2.5))
    assert (ratio[24:40].diff() > 0).all()


# Small enough that most positions below lie beyond the original context.
SHORT = yarn(rope_theta=1000.0, original_max_position_embeddings=64)
WRONG = {
    "attention factor left out": SHORT.model_copy(update={"attention_factor": 1.0}),
    "factor one too large": SHORT.model_copy(update={"factor": 3.5}),
    "factor one too small": SHORT.model_copy(update={"factor": 1.5}),
    # The ends of the ramp are rounded to whole pairs, so that 63 would be the same.
    "another original context": SHORT.model_copy(update={"original_max_position_embeddings": 32}),
    "no scaling at all": RopeConfig(rope_theta=1000.0),
}
TENSORS = random_tensors(shape_with(SHORT), seed=4)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as here:
        yield here


def rows(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(61, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def wanted_logits(ids: list[Tensor]) -> Tensor:
    model = hf_model(shape_with(SHORT), TENSORS)
    return torch.cat([model(row[None]).logits[0] for row in ids])


def distance(rope: RopeConfig, ids: list[Tensor], context: ParallelContext) -> float:
    """Largest difference of logits to transformers' YaRN, as a share of the largest logit."""
    wanted = wanted_logits(ids)
    found = megatron_logits(stage_on_cpu(shape_with(rope), TENSORS, context), ids, context)
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    "lengths", [(MAX_DENSE_LENGTH, 5, 90), (MAX_DENSE_LENGTH + 100, 160)], ids=["dense", "one by one"]
)
def test_the_trainers_logits_are_those_of_transformers(lengths: tuple[int, ...], context: ParallelContext) -> None:
    assert distance(SHORT, rows(*lengths), context) <= 1e-5


@pytest.mark.parametrize("mistake", WRONG)
def test_another_rope_shows_in_the_trainers_logits(mistake: str, context: ParallelContext) -> None:
    assert distance(WRONG[mistake], rows(160, 5, 90), context) > 1e-3


@torch.no_grad()
def engine_distance(rope: RopeConfig) -> float:
    """Largest difference of an engine's log-probs to those of transformers' YaRN."""
    shape = shape_with(rope, max_position_embeddings=160)
    engine = EmbeddedEngine(shape, max_running_requests=2)
    engine.load_weights(TENSORS.items(), 1)
    prompts = (tuple(row.tolist()) for row in rows(100, 3, 70))
    jobs = [GenerationRequest(f"r{i}", ids, 60, seed=i) for i, ids in enumerate(prompts)]
    model, worst = hf_model(shape_with(SHORT), TENSORS), 0.0
    for job, done in zip(jobs, engine.generate(jobs), strict=True):
        logits = model(torch.tensor([[*job.token_ids, *done.token_ids]])).logits[0, len(job.token_ids) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(done.logprobs) - wanted).abs().max()))
    return worst


def test_the_engines_logprobs_are_those_of_transformers() -> None:
    assert engine_distance(SHORT) <= 1e-4


@pytest.mark.parametrize("mistake", WRONG)
def test_another_rope_shows_in_the_engines_logprobs(mistake: str) -> None:
    assert engine_distance(WRONG[mistake]) > 1e-3
