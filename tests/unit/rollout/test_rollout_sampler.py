"""From prompts to selected samples, around an engine and a reward made by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from torch import Tensor

from megatron_klear.config.recipe import AdvantageConfig, SelectionConfig
from megatron_klear.losses.advantages import GroupAdvantage
from megatron_klear.metrics import results
from megatron_klear.rollout.sampler import SamplingPlan, assign_advantages, draw, sample, score, select
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RewardRequest,
    RolloutBatch,
    Sample,
    SampleGroup,
    Score,
)

PLAN = SamplingPlan(3, 5, 0.7, (60,), seed=1, step=4)
PROMPTS = [Prompt("p", (1, 2)), Prompt("q", (3,)), Prompt("r", (4, 5, 6))]


class EchoEngine:
    """Answers with the prompt's last token, as often as a request comes late in its call: 1, 2, 3 ... times."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    @property
    def weight_version(self) -> int:
        return 9

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.requests += requests
        completions = []
        for i, request in enumerate(requests):
            ids = (request.token_ids[-1],) * (i + 1)
            reason = "length" if i % 2 else "stop"
            completions.append(Completion(request.request_id, ids, (-0.5,) * (i + 1), reason, self.weight_version))
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError


class ListedReward:
    """Gives out these scores, one after the other."""

    def __init__(self, scores: Sequence[Score]) -> None:
        self.scores = list(scores)
        self.requests: list[RewardRequest] = []

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        self.requests += requests
        assert len(requests) == len(self.scores)
        return self.scores

    def close(self) -> None:
        pass


def decode(ids: Sequence[int]) -> str:
    return "".join(str(i) for i in ids)


def right(reward: float = 1.0) -> Score:
    return Score(reward, "correct")


def wrong(reward: float = -1.0) -> Score:
    return Score(reward, "incorrect")


def lost() -> Score:
    return Score(None, "timeout", failure="the verifier was killed")


def scored(*rewards: Sequence[float]) -> RolloutBatch:
    """A group for each list of rewards."""
    groups = []
    for g, group_rewards in enumerate(rewards):
        prompt = Prompt(f"p{g}", (1, 2))
        samples = []
        for i, reward in enumerate(group_rewards):
            one = Sample(f"{g}.{i}", prompt, reward=reward, reward_reason="correct" if reward > 0 else "incorrect")
            one.append_response(
                [7] * (i + 1), [-0.1] * (i + 1), weight_version=1, stop_reason="length" if i else "stop"
            )
            samples.append(one)
        groups.append(SampleGroup(prompt, tuple(samples)))
    return RolloutBatch(tuple(groups), dropped=Counter({"prompt_too_long": 2}))


def rewards_of(rollout: RolloutBatch) -> list[float | None]:
    return [one.reward for one in rollout.samples]


def test_every_prompt_gets_its_own_group_of_completions() -> None:
    engine = EchoEngine()
    rollout = sample(engine, PROMPTS, PLAN)
    assert [group.prompt for group in rollout.groups] == PROMPTS
    for i, group in enumerate(rollout.groups):
        assert [len(one.response_ids) for one in group.samples] == [3 * i + 1, 3 * i + 2, 3 * i + 3]
        for one in group.samples:
            assert one.prompt == group.prompt
            assert set(one.response_ids) == {group.prompt.token_ids[-1]}
            assert one.rollout_logprobs == [0.0] * len(group.prompt.token_ids) + [-0.5] * len(one.response_ids)
            assert one.weight_version_min == one.weight_version_max == 9
    assert [one.stop_reason for one in rollout.samples] == ["stop", "length"] * 4 + ["stop"]


def test_the_plan_reaches_the_engine() -> None:
    engine = EchoEngine()
    sample(engine, PROMPTS, PLAN)
    assert len(engine.requests) == 9
    for request in engine.requests:
        assert (request.max_new_tokens, request.temperature, request.stop_token_ids) == (5, 0.7, (60,))


def test_draw_keeps_prompt_and_completion_together() -> None:
    drawn = draw(EchoEngine(), PROMPTS, PLAN)
    assert [prompt.prompt_id for prompt, _ in drawn] == ["p"] * 3 + ["q"] * 3 + ["r"] * 3
    assert all(set(completion.token_ids) == {prompt.token_ids[-1]} for prompt, completion in drawn)


def seeds(plan: SamplingPlan, prompts: Sequence[Prompt] = PROMPTS) -> list[int]:
    engine = EchoEngine()
    sample(engine, prompts, plan)
    return [request.seed for request in engine.requests]


def test_seeds_are_reproducible_and_never_the_same_twice() -> None:
    plans = [dataclasses.replace(PLAN, step=step, seed=seed) for step in range(20) for seed in (1, 2)]
    drawn = [seed for plan in plans for seed in seeds(plan)]
    assert len(set(drawn)) == len(drawn) == 20 * 2 * 9
    assert seeds(PLAN) == seeds(dataclasses.replace(PLAN))


def test_a_prompt_that_occurs_twice_makes_two_different_groups() -> None:
    rollout = sample(EchoEngine(), [PROMPTS[0], PROMPTS[0]], PLAN)
    assert len(rollout.groups) == 2
    assert len({one.sample_id for one in rollout.samples}) == 6
    assert len(set(seeds(PLAN, [PROMPTS[0], PROMPTS[0]]))) == 6


def test_scores_reach_their_samples() -> None:
    rollout = sample(EchoEngine(), PROMPTS, PLAN)
    listed = [right(), wrong(), wrong(-0.5), right(), right(), wrong(), wrong(), wrong(), right()]
    reward = ListedReward(listed)
    after = score(rollout, reward, decode)
    assert rewards_of(after) == [one.reward for one in listed]
    assert [one.reward_reason for one in after.samples] == [one.reason for one in listed]
    assert [request.response for request in reward.requests[:4]] == ["2", "22", "222", "3333"]
    assert [request.truncated for request in reward.requests] == [False, True] * 4 + [False]
    assert [request.prompt.prompt_id for request in reward.requests] == ["p"] * 3 + ["q"] * 3 + ["r"] * 3


def test_failed_scores_are_dropped_and_counted_and_are_neither_right_nor_wrong() -> None:
    rollout = sample(EchoEngine(), PROMPTS, PLAN)
    reward = ListedReward([right(), lost(), wrong(), lost(), lost(), lost(), right(), wrong(), wrong()])
    after = score(rollout, reward, decode)
    assert rewards_of(after) == [1.0, -1.0, 1.0, -1.0, -1.0]
    assert [(group.prompt.prompt_id, len(group.samples)) for group in after.groups] == [("p", 2), ("r", 3)]
    assert after.dropped == {"reward_timeout": 4}
    assert rollout.dropped == {}


def test_select_drops_groups_without_spread_and_counts_their_samples() -> None:
    after = select(scored([1, 1, 1], [1, -1, -1], [-1, -1, -1]), SelectionConfig(), seed=0)
    assert [group.prompt.prompt_id for group in after.groups] == ["p1"]
    assert after.dropped == {"prompt_too_long": 2, "zero_std": 6}


def test_a_group_that_shrank_to_one_sample_has_no_spread() -> None:
    after = select(scored([1], [1, -1]), SelectionConfig(), seed=0)
    assert [group.prompt.prompt_id for group in after.groups] == ["p1"]
    assert after.dropped["zero_std"] == 1


def test_select_can_keep_groups_without_spread() -> None:
    rollout = scored([1, 1, 1], [1, -1, -1])
    after = select(rollout, SelectionConfig(drop_zero_std_groups=False), seed=0)
    assert after.groups == rollout.groups
    assert after.dropped == {"prompt_too_long": 2}


def test_metrics_tell_of_all_samples_before_the_selection() -> None:
    numbers = results(select(scored([1, 1, 1], [1, -1]), SelectionConfig(), seed=0).metrics)
    assert numbers == {
        "rollout/reward": pytest.approx(3 / 5),
        "rollout/accuracy": pytest.approx(4 / 5),
        "rollout/response_len_mean": pytest.approx((1 + 2 + 3 + 1 + 2) / 5),
        "rollout/response_len_max": 3.0,
        "rollout/truncated_ratio": pytest.approx(3 / 5),
        "rollout/zero_std_groups": 1.0,
        "rollout/num_samples": 5.0,
        "rollout/num_tokens": 9.0,
    }


def test_shuffled_rewards_are_the_same_rewards_elsewhere() -> None:
    rewards = [[1.0, -1.0, -1.0, 0.5], [-1.0, -1.0, 1.0, 1.0], [0.5, 0.25, -1.0, 1.0]]
    rules = SelectionConfig(shuffle_rewards=True, drop_zero_std_groups=False)
    plain = [reward for group in rewards for reward in group]
    first, again, other = (rewards_of(select(scored(*rewards), rules, seed=seed)) for seed in (3, 3, 4))
    assert Counter(first) == Counter(other) == Counter(plain)
    assert first == again
    assert len({tuple(plain), tuple(first), tuple(other)}) == 3


def test_shuffling_crosses_the_borders_of_groups() -> None:
    """Within a group the advantages would stay as good as they are: the control would not control."""
    rules = SelectionConfig(shuffle_rewards=True, drop_zero_std_groups=False)
    after = select(scored([1.0] * 8, [-1.0] * 8), rules, seed=0)
    assert all(len({one.reward for one in group.samples}) == 2 for group in after.groups)


def test_advantages_reach_their_samples() -> None:
    rollout = scored([1, -1, -1, -1], [2, 2, -2, -2])
    samples = assign_advantages(rollout, GroupAdvantage(AdvantageConfig(std="none")))
    assert [one.sample_id for one in samples] == [one.sample_id for one in rollout.samples]
    assert [one.advantage for one in samples] == [1.5, -0.5, -0.5, -0.5, 2.0, 2.0, -2.0, -2.0]
