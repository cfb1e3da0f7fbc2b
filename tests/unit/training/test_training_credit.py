"""Advantages that need the reference or the critic, on one rank, against plain numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from helpers.stages import cpu_context
from megatron_klear.config.loss import AdvantageConfig, CriticConfig, KlConfig
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.losses.advantages import build_advantage
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.credit import gae_advantages, penalised_advantages
from megatron_klear.types import MicroBatch, Prompt, Sample, SampleGroup, TrainBatch

REWARDS = ((1.0, -1.0, 0.5), (0.0, 1.0), (-1.0, 0.25, 1.0))


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


def make_groups(rewards: Sequence[Sequence[float]] = REWARDS) -> list[SampleGroup]:
    """Responses of 1 to 5 tokens; the second token of a response of four is not trained."""
    groups, counter = [], itertools.count()
    for g, row in enumerate(rewards):
        prompt = Prompt(f"p{g}", (1, 2, 3)[: g % 3 + 1])
        samples = []
        for i, reward in enumerate(row):
            length = 1 + next(counter) % 5
            sample = Sample(f"{g}.{i}", prompt, reward=reward)
            sample.append_response([7] * length, [-1.0] * length, weight_version=0, stop_reason="stop")
            if length == 4:
                sample.loss_mask[len(prompt.token_ids) + 1] = 0
            samples.append(sample)
        groups.append(SampleGroup(prompt, tuple(samples)))
    return groups


def updates_of(groups: Sequence[SampleGroup]) -> list[list[Sample]]:
    """Two updates, whose border lies inside a group."""
    samples = [sample for group in groups for sample in group.samples]
    return [samples[:4], samples[4:]]


def packed(updates: Sequence[Sequence[Sample]]) -> list[TrainBatch]:
    """Several micro-batches an update, with padding, and every annotated row random."""
    generator = torch.Generator().manual_seed(0)
    batches = [pack(samples, PackSpec(1, max_tokens=12, multiple_of=4))[0] for samples in updates]
    assert all(len(batch.micro_batches) > 1 for batch in batches)
    for one in micro_batches(batches):
        one.old_logprobs, one.reference_logprobs, one.values = (
            torch.randn(one.token_ids.numel(), generator=generator) for _ in range(3)
        )
    return batches


def micro_batches(batches: Sequence[TrainBatch]) -> list[MicroBatch]:
    return [one for batch in batches for one in batch.micro_batches]


def places(batch: TrainBatch, index: int) -> tuple[MicroBatch, list[int]]:
    """Where the trained positions of a sample of the update are."""
    for one in batch.micro_batches:
        if index in one.sample_index.tolist():
            number = one.sample_index.tolist().index(index)
            on = (one.sequence_ids == number) & (one.token_scale != 0)
            return one, on.nonzero()[:, 0].tolist()
    raise AssertionError(f"sample {index} is nowhere")


def k1(one: MicroBatch, t: int) -> float:
    return one.old_logprobs[t].item() - one.reference_logprobs[t].item()


def penalise(
    groups: list[SampleGroup], context: ParallelContext, kl: KlConfig
) -> tuple[list[list[Sample]], list[TrainBatch]]:
    advantage_fn = build_advantage(AdvantageConfig(type="grpo", std="none"))
    assert advantage_fn is not None
    updates = updates_of(groups)
    batches = packed(updates)
    penalised_advantages(batches, groups, updates, kl=kl, advantage_fn=advantage_fn, context=context)
    return updates, batches


def test_a_reward_is_charged_with_the_kl_of_the_whole_response(context: ParallelContext) -> None:
    groups = make_groups()
    updates, batches = penalise(groups, context, KlConfig(kl_coef=0.3, kl_type="k1", kl_in="reward"))
    shaped: dict[str, float] = {}
    for samples, batch in zip(updates, batches, strict=True):
        for index, sample in enumerate(samples):
            one, steps = places(batch, index)
            assert len(steps) == sample.num_loss_tokens and sample.reward is not None
            shaped[sample.sample_id] = sample.reward - 0.3 * math.fsum(k1(one, t) for t in steps)
    for group in groups:
        mean = math.fsum(shaped[s.sample_id] for s in group.samples) / len(group.samples)
        for sample in group.samples:
            assert sample.shaped_reward == pytest.approx(shaped[sample.sample_id], rel=1e-5, abs=1e-6)
            assert sample.advantage == pytest.approx(shaped[sample.sample_id] - mean, rel=1e-5, abs=1e-6)
    assert [[s.reward for s in group.samples] for group in groups] == [list(row) for row in REWARDS]


def test_advantages_reach_the_trained_positions_alone(context: ParallelContext) -> None:
    updates, batches = penalise(make_groups(), context, KlConfig(kl_coef=0.3, kl_type="k2", kl_in="reward"))
    total = sum(one.advantages.count_nonzero().item() for one in micro_batches(batches))
    assert total == sum(sample.num_loss_tokens for samples in updates for sample in samples)
    for samples, batch in zip(updates, batches, strict=True):
        for index, sample in enumerate(samples):
            one, steps = places(batch, index)
            assert one.advantages[steps].tolist() == pytest.approx([sample.advantage] * len(steps), rel=1e-6)


@pytest.mark.parametrize("kind", ("k2", "k3", "k3+"))
def test_any_estimator_can_be_charged(kind: str, context: ParallelContext) -> None:
    config = KlConfig.model_validate({"kl_coef": 0.1, "kl_type": kind, "kl_in": "reward"})
    (updates, batches) = penalise(make_groups(), context, config)
    one, steps = places(batches[0], 0)
    value = {"k2": lambda d: d * d / 2}.get(kind, lambda d: math.exp(-d) - 1 + d)
    expected = 1.0 - 0.1 * math.fsum(value(k1(one, t)) for t in steps)
    assert updates[0][0].shaped_reward == pytest.approx(expected, rel=1e-5)


def test_an_over_long_penalty_is_charged_as_well(context: ParallelContext) -> None:
    """Both are penalties on one reward: the KL must not bring back what the length has cost."""
    plain, long = make_groups(), make_groups()
    for group in long:
        for sample in group.samples:
            assert sample.reward is not None
            sample.shaped_reward = sample.reward - 0.5
    config = KlConfig(kl_coef=0.3, kl_type="k1", kl_in="reward")
    for groups in (plain, long):
        penalise(groups, context, config)
    for one, other in zip(plain, long, strict=True):
        for sample, shorter in zip(one.samples, other.samples, strict=True):
            assert sample.shaped_reward is not None
            assert shorter.shaped_reward == pytest.approx(sample.shaped_reward - 0.5, abs=1e-6)


def gae_by_hand(
    batches: Sequence[TrainBatch], updates: Sequence[Sequence[Sample]], config: CriticConfig, kl_coef: float
) -> list[tuple[MicroBatch, int, float]]:
    """(micro-batch, position, advantage before normalisation) of every trained token."""
    found = []
    for samples, batch in zip(updates, batches, strict=True):
        for index, sample in enumerate(samples):
            one, steps = places(batch, index)
            assert sample.training_reward is not None
            running = following = 0.0
            for t in reversed(steps):
                reward = (sample.training_reward if t == steps[-1] else 0.0) - kl_coef * k1(one, t)
                value = one.values[t].item()
                running = reward + config.gamma * following - value + config.gamma * config.lam * running
                following = value
                found.append((one, t, running))
    return found


@pytest.mark.parametrize("kl_coef", (0.0, 0.3))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_gae_is_normalised_over_the_tokens_of_the_step(
    gamma: float, lam: float, kl_coef: float, context: ParallelContext
) -> None:
    groups = make_groups()
    groups[0].samples[0].shaped_reward = 0.125
    updates = updates_of(groups)
    batches = packed(updates)
    config = CriticConfig(gamma=gamma, lam=lam)
    expected = gae_by_hand(batches, updates, config, kl_coef)
    kl = KlConfig(kl_coef=kl_coef, kl_type="k1", kl_in="reward") if kl_coef else None
    gae_advantages(batches, config, kl, context)
    raw = [a for _, _, a in expected]
    mean = math.fsum(raw) / len(raw)
    scale = math.sqrt(math.fsum((a - mean) ** 2 for a in raw) / len(raw))
    for one, t, a in expected:
        assert one.advantages[t].item() == pytest.approx((a - mean) / scale, rel=1e-4, abs=1e-5)
        assert one.returns[t].item() == pytest.approx(a + one.values[t].item(), rel=1e-4, abs=1e-5)
    for one in micro_batches(batches):
        off = one.token_scale == 0
        assert not one.advantages[off].any() and not one.returns[off].any()
    tokens = torch.cat([one.advantages[one.token_scale != 0] for one in micro_batches(batches)])
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert tokens.square().mean().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("num_samples", (13, 100, 400))
@pytest.mark.parametrize("reward", (-1.0, 0.0, 0.1, 0.7))
def test_a_step_of_equal_advantages_teaches_nothing(reward: float, num_samples: int, context: ParallelContext) -> None:
    """Every answer wrong, and a critic that still says zero: the noise of float32 once became advantages of six."""
    samples = [sample for group in make_groups([[reward] * num_samples]) for sample in group.samples]
    batches = pack(samples, PackSpec(1, max_tokens=4096))
    gae_advantages(batches, CriticConfig(), None, context)
    for one in micro_batches(batches):
        assert one.advantages.isfinite().all()
        assert one.advantages.abs().max().item() < 0.01
