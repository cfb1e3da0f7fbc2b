"""From prompts to scored, selected samples with advantages. Pure bookkeeping around an engine and a reward."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_klear.config.recipe import SelectionConfig
from megatron_klear.metrics import Metric
from megatron_klear.protocols import AdvantageFn, RewardFn, RolloutEngine
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RewardRequest,
    RolloutBatch,
    Sample,
    SampleGroup,
)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How responses of one step are drawn. `seed` and `step` make the draws reproducible and never the same twice."""

    n_samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    step: int


def draw(engine: RolloutEngine, prompts: Sequence[Prompt], plan: SamplingPlan) -> list[tuple[Prompt, Completion]]:
    """`n_samples_per_prompt` completions of every prompt, prompt after prompt."""
    jobs = [
        (prompt, f"{plan.step}/{prompt.prompt_id}/{i}.{j}")
        for i, prompt in enumerate(prompts)
        for j in range(plan.n_samples_per_prompt)
    ]
    requests = [
        GenerationRequest(
            name,
            prompt.token_ids,
            plan.max_new_tokens,
            temperature=plan.temperature,
            stop_token_ids=plan.stop_token_ids,
            seed=zlib.crc32(f"{plan.seed}/{name}".encode()),
        )
        for prompt, name in jobs
    ]
    completions = engine.generate(requests)
    return [(prompt, completion) for (prompt, _), completion in zip(jobs, completions, strict=True)]


def sample(engine: RolloutEngine, prompts: Sequence[Prompt], plan: SamplingPlan) -> RolloutBatch:
    """One group a prompt. A prompt that occurs twice in a step makes two groups."""
    drawn = draw(engine, prompts, plan)
    groups = []
    for i, prompt in enumerate(prompts):
        own = drawn[i * plan.n_samples_per_prompt : (i + 1) * plan.n_samples_per_prompt]
        groups.append(SampleGroup(prompt, tuple(_to_sample(prompt, completion) for _, completion in own)))
    return RolloutBatch(tuple(groups))


def _to_sample(prompt: Prompt, completion: Completion) -> Sample:
    sample = Sample(completion.request_id, prompt)
    sample.append_response(
        completion.token_ids,
        completion.logprobs,
        weight_version=completion.weight_version,
        stop_reason=completion.stop_reason,
    )
    return sample


def score(rollout: RolloutBatch, reward_fn: RewardFn, decode: Callable[[Sequence[int]], str]) -> RolloutBatch:
    """Set rewards. Samples whose scoring failed are dropped and counted: they are neither right nor wrong."""
    requests = [
        RewardRequest(s.prompt, decode(s.response_ids), truncated=s.stop_reason == "length") for s in rollout.samples
    ]
    dropped = Counter(rollout.dropped)
    failed: set[str] = set()
    for sample, result in zip(rollout.samples, reward_fn(requests), strict=True):
        if result.failure:
            failed.add(sample.sample_id)
            dropped[f"reward_{result.reason}"] += 1
        else:
            sample.reward, sample.reward_reason = result.reward, result.reason
    groups = [
        replace(group, samples=tuple(s for s in group.samples if s.sample_id not in failed)) for group in rollout.groups
    ]
    return replace(rollout, groups=tuple(group for group in groups if group.samples), dropped=dropped)


def select(rollout: RolloutBatch, rules: SelectionConfig, *, seed: int) -> RolloutBatch:
    """Leave out what cannot teach anything; every sample that goes has a counted reason."""
    if rules.shuffle_rewards:
        _shuffle_rewards(rollout.samples, seed)
    metrics = dict(rollout.metrics) | _rollout_metrics(rollout)
    dropped = Counter(rollout.dropped)
    kept = []
    for group in rollout.groups:
        if rules.drop_zero_std_groups and len({sample.reward for sample in group.samples}) == 1:
            dropped["zero_std"] += len(group.samples)
        else:
            kept.append(group)
    return RolloutBatch(tuple(kept), metrics, dropped)


def assign_advantages(rollout: RolloutBatch, advantage_fn: AdvantageFn) -> list[Sample]:
    """Set the advantage of every sample, group by group; the samples."""
    for group in rollout.groups:
        for sample, advantage in zip(group.samples, advantage_fn(group), strict=True):
            sample.advantage = advantage
    return rollout.samples


def _shuffle_rewards(samples: Sequence[Sample], seed: int) -> None:
    rewards = [sample.reward for sample in samples]
    random.Random(seed).shuffle(rewards)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


def _rollout_metrics(rollout: RolloutBatch) -> dict[str, Metric]:
    samples = rollout.samples
    lengths = [len(sample.response_ids) for sample in samples]
    spreads = [len({sample.reward for sample in group.samples}) > 1 for group in rollout.groups]

    def mean(values: Sequence[float]) -> Metric:
        return Metric(float(sum(values)), "sample_mean", float(len(values)))

    return {
        "rollout/reward": mean([sample.reward or 0.0 for sample in samples]),
        "rollout/accuracy": mean([sample.reward_reason == "correct" for sample in samples]),
        "rollout/response_len_mean": mean(lengths),
        "rollout/response_len_max": Metric(float(max(lengths, default=0)), "max"),
        "rollout/truncated_ratio": mean([sample.stop_reason == "length" for sample in samples]),
        "rollout/zero_std_groups": Metric(float(len(spreads) - sum(spreads)), "sum"),
        "rollout/num_samples": Metric(float(len(samples)), "sum"),
        "rollout/num_tokens": Metric(float(sum(lengths)), "sum"),
    }
