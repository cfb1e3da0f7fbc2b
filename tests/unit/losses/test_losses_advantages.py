"""Group advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_klear.config.recipe import AdvantageConfig
from megatron_klear.losses.advantages import GroupAdvantage
from megatron_klear.types import Prompt, Sample, SampleGroup

Std = Literal["population", "unbiased", "none"]
STDS: tuple[Std, ...] = ("population", "unbiased", "none")


def advantages(rewards: Sequence[float | None], *, std: Std = "population", eps: float = 0.0) -> list[float]:
    prompt = Prompt("p", (1, 2))
    samples = tuple(Sample(f"s{i}", prompt, reward=reward) for i, reward in enumerate(rewards))
    return GroupAdvantage(AdvantageConfig(std=std, eps=eps))(SampleGroup(prompt, samples))


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
