"""Jobs on credit.py: advantages made of values and KLs that are known, wherever their tokens lie."""

from __future__ import annotations

from dataclasses import dataclass

from dist.jobs_law import law_samples, noise
from dist.world import Arrays, Layout, World, rows_by_sample, world
from megatron_klear.config.loss import AdvantageConfig, CriticConfig, KlConfig
from megatron_klear.data.packing import split_updates
from megatron_klear.losses.advantages import build_advantage
from megatron_klear.training.credit import gae_advantages, penalised_advantages
from megatron_klear.types import Sample, SampleGroup, TrainBatch

CRITIC = CriticConfig(gamma=0.98, lam=0.9)
KL = KlConfig(kl_coef=0.2, kl_in="reward")
SAMPLES_PER_UPDATE = 7


@dataclass(frozen=True)
class Credited:
    """By sample, from the ranks that have a loss; the samples' shaped rewards, from rank 0."""

    advantages: Arrays
    returns: Arrays
    shaped: dict[str, float | None]


def gae(rank: int, world_size: int, layout: Layout, max_tokens: int, with_kl: bool) -> Credited:
    with world(layout) as here:
        updates = split_updates(law_samples(), SAMPLES_PER_UPDATE)
        batches = _batches(here, updates, max_tokens)
        gae_advantages(batches, CRITIC, KL if with_kl else None, here.context)
        return _credited(here, batches, updates)


def penalised(rank: int, world_size: int, layout: Layout, max_tokens: int, overlong: float) -> Credited:
    """Rewards less KL. One sample of each group was too long and lost `overlong` already."""
    with world(layout) as here:
        samples = law_samples()
        groups = [SampleGroup(a.prompt, (a, b)) for a, b in zip(samples[::2], samples[1::2], strict=True)]
        for group in groups:
            first = group.samples[0]
            assert first.reward is not None
            first.shaped_reward = first.reward - overlong if overlong else None
        updates = split_updates(samples, SAMPLES_PER_UPDATE)
        batches = _batches(here, updates, max_tokens)
        advantage_fn = build_advantage(AdvantageConfig())
        assert advantage_fn is not None
        main = here.context.is_main
        penalised_advantages(
            batches,
            groups if main else (),
            updates if main else (),
            kl=KL,
            advantage_fn=advantage_fn,
            context=here.context,
        )
        return _credited(here, batches, updates)


def _batches(here: World, updates: list[list[Sample]], max_tokens: int) -> list[TrainBatch]:
    """With values and log-probs where a last stage would have put them."""
    batches = [here.batch(update, max_tokens) for update in updates]
    for batch in batches if here.context.topology.is_last_stage else ():
        for micro_batch in batch.micro_batches:
            micro_batch.values = noise(micro_batch, 1, 0.5)
            micro_batch.old_logprobs = noise(micro_batch, 2, 0.5)
            micro_batch.reference_logprobs = noise(micro_batch, 3, 0.5)
    return batches


def _credited(here: World, batches: list[TrainBatch], updates: list[list[Sample]]) -> Credited:
    advantages: Arrays = {}
    returns: Arrays = {}
    for batch, samples in zip(batches, updates, strict=True):
        advantages |= rows_by_sample(here.context, batch, [mb.advantages for mb in batch.micro_batches], samples)
        returns |= rows_by_sample(here.context, batch, [mb.returns for mb in batch.micro_batches], samples)
    shaped = {sample.sample_id: sample.shaped_reward for update in updates for sample in update}
    return Credited(advantages, returns, shaped if here.context.is_main else {})
