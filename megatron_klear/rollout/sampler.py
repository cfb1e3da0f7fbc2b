"""From prompts to scored, selected samples with advantages. Pure bookkeeping around an engine and a reward."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_klear.config.recipe import SelectionConfig
from megatron_klear.metrics import Metric, merge
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
    round: int = 0


def draw(engine: RolloutEngine, prompts: Sequence[Prompt], plan: SamplingPlan) -> list[tuple[Prompt, Completion]]:
    """`n_samples_per_prompt` completions of every prompt, prompt after prompt."""
    requests = [
        (prompt, request)
        for i, prompt in enumerate(prompts)
        for request in group_requests(prompt, f"{plan.step}.{plan.round}/{prompt.prompt_id}/{i}", plan)
    ]
    completions = engine.generate([request for _, request in requests])
    return [(prompt, completion) for (prompt, _), completion in zip(requests, completions, strict=True)]


def group_requests(prompt: Prompt, name: str, plan: SamplingPlan) -> tuple[GenerationRequest, ...]:
    """The requests of one group. Seeds depend on the run's seed and on `name`, which must be new in the run."""
    return tuple(
        GenerationRequest(
            f"{name}.{j}",
            prompt.token_ids,
            plan.max_new_tokens,
            temperature=plan.temperature,
            stop_token_ids=plan.stop_token_ids,
            seed=zlib.crc32(f"{plan.seed}/{name}.{j}".encode()),
        )
        for j in range(plan.n_samples_per_prompt)
    )


def sample(engine: RolloutEngine, prompts: Sequence[Prompt], plan: SamplingPlan) -> RolloutBatch:
    """One group a prompt. A prompt that occurs twice in a step makes two groups."""
    drawn = draw(engine, prompts, plan)
    groups = []
    for i, prompt in enumerate(prompts):
        own = drawn[i * plan.n_samples_per_prompt : (i + 1) * plan.n_samples_per_prompt]
        groups.append(SampleGroup(prompt, tuple(to_sample(prompt, completion) for _, completion in own)))
    return RolloutBatch(tuple(groups))


def to_sample(prompt: Prompt, completion: Completion) -> Sample:
    """A completion as a trainable sequence, piece by piece."""
    sample, begin = Sample(completion.request_id, prompt), 0
    for piece in completion.pieces:
        end = begin + piece.num_tokens
        sample.append_response(
            completion.token_ids[begin:end],
            completion.logprobs[begin:end],
            weight_version=piece.weight_version,
            stop_reason=completion.stop_reason,
            engine=piece.engine,
        )
        begin = end
    assert begin == len(completion.token_ids), f"{completion.request_id}: pieces of {begin} tokens"
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


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """What the rules of a step refer to: the trainer's weight version, the longest response, a seed for the control."""

    weight_version: int
    max_response_len: int
    seed: int


def select(rollout: RolloutBatch, rules: SelectionConfig, context: SelectionContext) -> RolloutBatch:
    """Leave out what cannot teach anything; every sample that goes has a counted reason."""
    if rules.shuffle_rewards:
        _shuffle_rewards(rollout.samples, context.seed)
    metrics = merge([rollout.metrics, _rollout_metrics(rollout)])
    dropped = Counter(rollout.dropped)
    kept = []
    for group in rollout.groups:
        samples = tuple(s for s in group.samples if not _faulty(s, rules, context, dropped))
        for sample in samples:
            _penalise_length(sample, rules, context.max_response_len)
        if not samples:
            continue
        if rules.drop_zero_std_groups and not _has_spread(samples, rules.zero_std_metric):
            dropped["zero_std"] += len(samples)
        else:
            kept.append(replace(group, samples=samples))
    return RolloutBatch(tuple(kept), metrics, dropped)


def _faulty(sample: Sample, rules: SelectionConfig, context: SelectionContext, dropped: Counter[str]) -> bool:
    """True, with the reason counted, for a sample that is left out by itself."""
    if rules.drop_truncated and sample.stop_reason == "length":
        dropped["truncated"] += 1
        return True
    oldest = context.weight_version if sample.weight_version_min is None else sample.weight_version_min
    if rules.max_staleness is not None and context.weight_version - oldest > rules.max_staleness:
        dropped["stale"] += 1
        return True
    return False


def _penalise_length(sample: Sample, rules: SelectionConfig, max_response_len: int) -> None:
    """DAPO's soft over-long penalty (arXiv 2503.14476 Eq. 13): linear inside the buffer, full at the longest."""
    if rules.overlong_buffer_len == 0 or sample.reward is None:
        return
    excess = len(sample.response_ids) - (max_response_len - rules.overlong_buffer_len)
    if excess > 0:
        penalty = min(excess / rules.overlong_buffer_len, 1.0) * rules.overlong_penalty_factor
        sample.shaped_reward = sample.reward - penalty


def _has_spread(samples: Sequence[Sample], metric: Literal["reward", "accuracy"]) -> bool:
    if metric == "accuracy":
        return len({sample.reward_reason == "correct" for sample in samples}) > 1
    return len({sample.training_reward for sample in samples}) > 1


def merged(first: RolloutBatch, second: RolloutBatch) -> RolloutBatch:
    """Both rounds of a step together."""
    return RolloutBatch(
        first.groups + second.groups, merge([first.metrics, second.metrics]), first.dropped + second.dropped
    )


def assign_advantages(rollout: RolloutBatch, advantage_fn: AdvantageFn) -> list[Sample]:
    """Set the advantage of every sample, group by group; the samples."""
    for group, advantages in zip(rollout.groups, advantage_fn(rollout.groups), strict=True):
        for sample, advantage in zip(group.samples, advantages, strict=True):
            sample.advantage = advantage
    return rollout.samples


def _shuffle_rewards(samples: Sequence[Sample], seed: int) -> None:
    verdicts = [(sample.reward, sample.reward_reason) for sample in samples]
    random.Random(seed).shuffle(verdicts)
    for sample, (reward, reason) in zip(samples, verdicts, strict=True):
        sample.reward, sample.reward_reason = reward, reason


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
