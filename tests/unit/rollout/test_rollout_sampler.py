"""From prompts to selected samples, around an engine and a reward made by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from torch import Tensor

from megatron_klear.config.loss import AdvantageConfig
from megatron_klear.config.recipe import SelectionConfig
from megatron_klear.losses.advantages import GroupAdvantage
from megatron_klear.metrics import results
from megatron_klear.rollout.sampler import (
    SamplingPlan,
    SelectionContext,
    assign_advantages,
    draw,
    merged,
    sample,
    score,
    select,
)
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    Piece,
    Prompt,
    RewardRequest,
    RolloutBatch,
    Sample,
    SampleGroup,
    Score,
    StopReason,
)

PLAN = SamplingPlan(3, 5, 0.7, (60,), seed=1, step=4)
AT = SelectionContext(weight_version=1, max_response_len=8, seed=0)
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
            pieces = (Piece(1, self.weight_version),) * (i + 1)
            completions.append(Completion(request.request_id, ids, (-0.5,) * (i + 1), reason, pieces))
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
    after = select(scored([1, 1, 1], [1, -1, -1], [-1, -1, -1]), SelectionConfig(), AT)
    assert [group.prompt.prompt_id for group in after.groups] == ["p1"]
    assert after.dropped == {"prompt_too_long": 2, "zero_std": 6}


def test_a_group_that_shrank_to_one_sample_has_no_spread() -> None:
    after = select(scored([1], [1, -1]), SelectionConfig(), AT)
    assert [group.prompt.prompt_id for group in after.groups] == ["p1"]
    assert after.dropped["zero_std"] == 1


def test_select_can_keep_groups_without_spread() -> None:
    rollout = scored([1, 1, 1], [1, -1, -1])
    after = select(rollout, SelectionConfig(drop_zero_std_groups=False), AT)
    assert after.groups == rollout.groups
    assert after.dropped == {"prompt_too_long": 2}


def test_metrics_tell_of_all_samples_before_the_selection() -> None:
    numbers = results(select(scored([1, 1, 1], [1, -1]), SelectionConfig(), AT).metrics)
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
    first, again, other = (
        rewards_of(select(scored(*rewards), rules, dataclasses.replace(AT, seed=seed))) for seed in (3, 3, 4)
    )
    assert Counter(first) == Counter(other) == Counter(plain)
    assert first == again
    assert len({tuple(plain), tuple(first), tuple(other)}) == 3


def test_shuffling_crosses_the_borders_of_groups() -> None:
    """Within a group the advantages would stay as good as they are: the control would not control."""
    rules = SelectionConfig(shuffle_rewards=True, drop_zero_std_groups=False)
    after = select(scored([1.0] * 8, [-1.0] * 8), rules, AT)
    assert all(len({one.reward for one in group.samples}) == 2 for group in after.groups)


def test_advantages_reach_their_samples() -> None:
    rollout = scored([1, -1, -1, -1], [2, 2, -2, -2])
    samples = assign_advantages(rollout, GroupAdvantage(AdvantageConfig(std="none")))
    assert [one.sample_id for one in samples] == [one.sample_id for one in rollout.samples]
    assert [one.advantage for one in samples] == [1.5, -0.5, -0.5, -0.5, 2.0, 2.0, -2.0, -2.0]


def long_sample(name: str, length: int, *, reward: float, reason: str = "", stop: StopReason = "stop") -> Sample:
    sample = Sample(name, Prompt("p", (1, 2)), reward=reward, reward_reason=reason)
    sample.append_response([7] * length, [-0.1] * length, weight_version=1, stop_reason=stop)
    return sample


def one_group(*samples: Sample) -> RolloutBatch:
    return RolloutBatch((SampleGroup(samples[0].prompt, samples),))


def names(rollout: RolloutBatch) -> list[str]:
    return [one.sample_id for one in rollout.samples]


def test_spread_is_of_rewards_or_of_right_and_wrong() -> None:
    """Partial rewards have spread, yet nothing is right: Klear's released code drops the group, the paper keeps it."""

    def rollout() -> RolloutBatch:
        partial = [long_sample(f"a{i}", 2, reward=r, reason="incorrect") for i, r in enumerate((-1.0, -0.5))]
        mixed = [long_sample(f"b{i}", 2, reward=1.0, reason=r) for i, r in enumerate(("correct", "incorrect"))]
        return RolloutBatch(one_group(*partial).groups + one_group(*mixed).groups)

    by_reward = select(rollout(), SelectionConfig(zero_std_metric="reward"), AT)
    by_accuracy = select(rollout(), SelectionConfig(zero_std_metric="accuracy"), AT)
    assert (names(by_reward), by_reward.dropped) == (["a0", "a1"], {"zero_std": 2})
    assert (names(by_accuracy), by_accuracy.dropped) == (["b0", "b1"], {"zero_std": 2})


def test_truncated_responses_are_left_out_before_groups_are_judged() -> None:
    rollout = one_group(
        long_sample("a", 2, reward=1.0),
        long_sample("b", 3, reward=-1.0, stop="length"),
        long_sample("c", 2, reward=1.0),
    )
    after = select(rollout, SelectionConfig(drop_truncated=True), AT)
    assert (names(after), after.dropped) == ([], {"truncated": 1, "zero_std": 2})
    kept = select(rollout, SelectionConfig(drop_truncated=True, drop_zero_std_groups=False), AT)
    assert (names(kept), kept.dropped) == (["a", "c"], {"truncated": 1})
    assert names(select(rollout, SelectionConfig(), AT)) == ["a", "b", "c"]


def test_a_group_of_truncated_responses_is_gone_and_counted_once() -> None:
    rollout = one_group(*(long_sample(str(i), 2, reward=float(i), stop="length") for i in range(3)))
    after = select(rollout, SelectionConfig(drop_truncated=True, drop_zero_std_groups=False), AT)
    assert (after.groups, after.dropped) == ((), {"truncated": 3})


@pytest.mark.parametrize(("limit", "kept"), [(None, "01234"), (4, "01234"), (2, "234"), (0, "4")])
def test_stale_samples_are_judged_by_their_oldest_token(limit: int | None, kept: str) -> None:
    samples = [long_sample(str(i), 1, reward=float(i)) for i in range(5)]
    for i, one in enumerate(samples):
        one.pieces = [Piece(1, 9), Piece(1, 5 + i)]
    at = dataclasses.replace(AT, weight_version=9)
    rules = SelectionConfig(max_staleness=limit, drop_zero_std_groups=False)
    after = select(one_group(*samples), rules, at)
    assert "".join(names(after)) == kept
    assert after.dropped["stale"] == 5 - len(kept)


def test_a_sample_of_unknown_age_is_fresh() -> None:
    samples = [Sample(str(i), Prompt("p", (1,)), reward=float(i)) for i in range(2)]
    assert names(select(one_group(*samples), SelectionConfig(max_staleness=0), AT)) == ["0", "1"]


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12, 0.0), (13, 0.125), (16, 0.5), (19, 0.875), (20, 1.0), (23, 1.0)]
)
def test_the_soft_penalty_is_linear_inside_its_buffer(length: int, penalty: float) -> None:
    """DAPO Eq. 13 with a longest response of 20 and a buffer of 8; a response that ran over sinks no further."""
    sample = long_sample("a", length, reward=1.0)
    rules = SelectionConfig(overlong_buffer_len=8, overlong_penalty_factor=0.6, drop_zero_std_groups=False)
    select(one_group(sample), rules, dataclasses.replace(AT, max_response_len=20))
    assert sample.reward == 1.0
    assert sample.training_reward == pytest.approx(1.0 - 0.6 * penalty)
    assert (sample.shaped_reward is None) == (penalty == 0)


def test_without_a_buffer_no_response_is_too_long() -> None:
    sample = long_sample("a", 20, reward=1.0)
    select(one_group(sample), SelectionConfig(drop_zero_std_groups=False), AT)
    assert sample.shaped_reward is None


def test_a_penalty_is_spread_for_the_advantages_and_none_for_accuracy() -> None:
    rules = SelectionConfig(overlong_buffer_len=8)

    def rollout() -> RolloutBatch:
        return one_group(*(long_sample(str(n), n, reward=1.0, reason="correct") for n in (2, 8)))

    assert names(select(rollout(), rules, AT)) == ["2", "8"]
    assert names(select(rollout(), rules.model_copy(update={"zero_std_metric": "accuracy"}), AT)) == []


def test_metrics_show_the_raw_reward() -> None:
    rules = SelectionConfig(overlong_buffer_len=8, drop_zero_std_groups=False)
    after = select(one_group(long_sample("a", 8, reward=1.0)), rules, AT)
    assert after.samples[0].shaped_reward == 0.0
    assert results(after.metrics)["rollout/reward"] == 1.0


def test_rounds_of_a_step_are_merged_with_their_counts_and_metrics() -> None:
    first, second = (select(scored(*rows), SelectionConfig(), AT) for rows in ([[1, 1, 1], [1, -1]], [[-1, 1, 1, 1]]))
    both = merged(merged(RolloutBatch(()), first), second)
    assert both.groups == first.groups + second.groups
    assert both.dropped == {"prompt_too_long": 4, "zero_std": 3}
    numbers = results(both.metrics)
    assert numbers["rollout/num_samples"] == 9.0
    assert numbers["rollout/reward"] == pytest.approx((3 + 0 + 2) / 9)
    assert numbers["rollout/response_len_max"] == 4.0
    assert numbers["rollout/zero_std_groups"] == 1.0
    assert first.dropped == {"prompt_too_long": 2, "zero_std": 3}


def test_rounds_draw_different_responses() -> None:
    assert not set(seeds(PLAN)) & set(seeds(dataclasses.replace(PLAN, round=1)))
