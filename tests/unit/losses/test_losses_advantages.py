"""Advantages of every estimator against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_klear.config.loss import AdvantageConfig
from megatron_klear.losses.advantages import GroupAdvantage, build_advantage
from megatron_klear.types import Prompt, Sample, SampleGroup

Std = Literal["population", "unbiased", "none"]
Kind = Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
KINDS: tuple[Kind, ...] = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
Rows = list[list[float]]
STDS: tuple[Std, ...] = ("population", "unbiased", "none")


def group_of(rewards: Sequence[float | None]) -> SampleGroup:
    prompt = Prompt("p", (1, 2))
    return SampleGroup(prompt, tuple(Sample(f"s{i}", prompt, reward=reward) for i, reward in enumerate(rewards)))


def of_step(kind: Kind, rows: Sequence[Sequence[float]], *, std: Std = "population", eps: float = 0.0) -> Rows:
    """Advantages of a step's groups under a recipe's estimator."""
    estimator = build_advantage(AdvantageConfig(type=kind, std=std, eps=eps))
    assert estimator is not None
    return estimator([group_of(row) for row in rows])


def advantages(rewards: Sequence[float | None], *, std: Std = "population", eps: float = 0.0) -> list[float]:
    (row,) = GroupAdvantage(AdvantageConfig(std=std, eps=eps))([group_of(rewards)])
    return row


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("population", [1.5 / math.sqrt(0.75), -0.5 / math.sqrt(0.75)]),
        ("unbiased", [1.5, -0.5]),
        ("none", [1.5, -0.5]),
    ],
)
def test_one_right_answer_of_four(std: Std, expected: list[float]) -> None:
    right, wrong = expected
    assert advantages([1.0, -1.0, -1.0, -1.0], std=std) == pytest.approx([right, wrong, wrong, wrong])


def test_unbiased_and_none_differ_where_the_std_is_not_one() -> None:
    assert advantages([2.0, 0.0, 0.0, 0.0], std="none") == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages([4.0, 0.0, 0.0, 0.0], std="unbiased") == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_eps_is_added_to_the_std() -> None:
    assert advantages([1.0, -1.0], eps=1.0) == pytest.approx([0.5, -0.5])
    assert advantages([1.0, -1.0], std="none", eps=1.0) == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("reward", (0.0, 1.0, -1.0, 0.1, 0.7, 1 / 3))
@pytest.mark.parametrize("size", (1, 2, 3, 7, 16))
def test_equal_rewards_give_zeros(std: Std, reward: float, size: int) -> None:
    """0.1 summed and divided again is not 0.1: without care the rounding would become an advantage of order one."""
    assert advantages([reward] * size, std=std) == [0.0] * size


@settings(deadline=None)
@given(
    rewards=st.lists(st.sampled_from((-1.0, -0.5, 0.0, 0.1, 0.3, 1.0)), min_size=2, max_size=16),
    shift=st.sampled_from((-3.0, 0.0, 2.0)),
    factor=st.sampled_from((0.25, 1.0, 8.0)),
)
def test_they_sum_to_zero_and_ignore_shift_and_scale(rewards: list[float], shift: float, factor: float) -> None:
    assume(len(set(rewards)) > 1)
    plain = advantages(rewards)
    assert math.fsum(plain) == pytest.approx(0.0, abs=1e-12)
    assert math.fsum(a * a for a in plain) / len(plain) == pytest.approx(1.0)
    assert advantages([factor * r + shift for r in rewards]) == pytest.approx(plain, abs=1e-9)


def test_a_sample_without_a_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match="sample s1 has no reward; score and select before advantages"):
        advantages([1.0, None])


RAGGED = [[1.0, -1.0, 0.5], [0.0, 0.0], [2.0], [-1.0, 1.0, 1.0, -0.5]]


def close(rows: Rows) -> list[list[Any]]:
    """What compares as near."""
    return [[pytest.approx(value, rel=1e-12, abs=1e-15) for value in row] for row in rows]


def spread(values: Sequence[float], std: Std) -> float:
    """Root mean square, over n or n - 1."""
    return math.sqrt(sum(v * v for v in values) / (len(values) - (std == "unbiased")))


@pytest.mark.parametrize("std", STDS)
def test_grpo_sees_each_group_alone(std: Std) -> None:
    expected = []
    for row in RAGGED:
        centred = [r - sum(row) / len(row) for r in row]
        scale = 1.0 if std == "none" or len(set(row)) == 1 else spread(centred, std) + 0.1
        expected.append([c / scale for c in centred])
    assert of_step("grpo", RAGGED, std=std, eps=0.1) == close(expected)


@pytest.mark.parametrize("std", STDS)
def test_rloo_is_against_the_mean_of_the_others(std: Std) -> None:
    expected = [
        [r - sum(row[:j] + row[j + 1 :]) / (len(row) - 1) if len(row) > 1 else 0.0 for j, r in enumerate(row)]
        for row in RAGGED
    ]
    assert of_step("rloo", RAGGED, std=std) == close(expected)
    assert expected[0] == pytest.approx([1.25, -1.75, 0.5])


@pytest.mark.parametrize("std", STDS)
def test_reinforce_pp_is_against_the_whole_step(std: Std) -> None:
    flat = [r for row in RAGGED for r in row]
    mean = sum(flat) / len(flat)
    scale = 1.0 if std == "none" else spread([r - mean for r in flat], std) + 0.1
    assert of_step("reinforce_pp", RAGGED, std=std, eps=0.1) == close(
        [[(r - mean) / scale for r in row] for row in RAGGED]
    )


@pytest.mark.parametrize("std", STDS)
def test_reinforce_pp_baseline_takes_the_groups_mean_and_the_steps_std(std: Std) -> None:
    centred = [[r - sum(row) / len(row) for r in row] for row in RAGGED]
    scale = 1.0 if std == "none" else spread([c for row in centred for c in row], std) + 0.1
    assert of_step("reinforce_pp_baseline", RAGGED, std=std, eps=0.1) == close(
        [[c / scale for c in row] for row in centred]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("reward", (0.0, 1.0, -1.0, 0.1, 0.7, 1 / 3))
def test_equal_rewards_teach_nothing_whatever_the_estimator(kind: Kind, std: Std, reward: float) -> None:
    """With eps 0 the rounding of a mean would be blown up to advantages of order one."""
    rows = of_step(kind, [[reward] * 3, [reward] * 6, [reward]], std=std)
    assert [len(row) for row in rows] == [3, 6, 1]
    assert all(abs(value) < 1e-15 for row in rows for value in row)


@pytest.mark.parametrize("std", STDS)
def test_groups_that_are_each_equal_have_no_baseline_advantage(std: Std) -> None:
    assert of_step("reinforce_pp_baseline", [[0.1] * 3, [0.7] * 6, [1.0]], std=std) == [[0.0] * 3, [0.0] * 6, [0.0]]


def test_a_group_of_one_learns_from_the_step_alone() -> None:
    ones = [[1.0], [-1.0], [0.5], [0.5]]
    for kind in ("grpo", "rloo", "reinforce_pp_baseline"):
        assert of_step(kind, ones) == [[0.0]] * 4
    assert of_step("reinforce_pp", ones, std="none") == close([[0.75], [-1.25], [0.25], [0.25]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_groups_and_one_of_a_single_sample(kind: Kind) -> None:
    assert of_step(kind, []) == []
    assert of_step(kind, [[0.3]], std="unbiased") == [[0.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_made_of_the_shaped_reward(kind: Kind) -> None:
    group = group_of([1.0, 1.0, 1.0])
    for sample, shaped in zip(group.samples, (0.5, None, -0.5), strict=True):
        sample.shaped_reward = shaped
    estimator = build_advantage(AdvantageConfig(type=kind, std="none"))
    assert estimator is not None
    assert estimator([group]) == of_step(kind, [[0.5, 1.0, -0.5]], std="none")


@pytest.mark.parametrize("kind", KINDS)
def test_every_estimator_refuses_a_sample_without_a_reward(kind: Kind) -> None:
    estimator = build_advantage(AdvantageConfig(type=kind))
    assert estimator is not None
    with pytest.raises(ValueError, match="sample s2 has no reward"):
        estimator([group_of([1.0, 0.0]), group_of([1.0, 0.0, None])])


def test_gae_is_no_estimator_of_groups() -> None:
    assert build_advantage(AdvantageConfig(type="gae")) is None
