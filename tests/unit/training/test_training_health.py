"""Checks that stop a run."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers.micro_batches import micro_batch_of_lengths
from megatron_klear.config.recipe import HealthConfig
from megatron_klear.errors import TrainingError
from megatron_klear.training.health import (
    ConstantRewardAlarm,
    NonFiniteGuard,
    check_engine_agrees,
    check_first_update,
)
from megatron_klear.training.policy import Policy
from megatron_klear.types import StepReport, Topology, TrainBatch

HEALTHY = {
    "train/ratio_deviation_max": 1e-6,
    "train/ppo_kl": -1e-7,
    "train/logprob": -1.5,
    "train/entropy": 1.2,
    "train/loss": 0.0,
}


def test_a_healthy_first_update_passes() -> None:
    check_first_update(HEALTHY)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train/ratio_deviation_max", 0.01, "train/ratio_deviation_max = 0.01, expected <= 0.001"),
        ("train/ratio_deviation_max", math.nan, "train/ratio_deviation_max = nan, expected <= 0.001"),
        ("train/ppo_kl", 0.01, r"train/ppo_kl = 0.01, expected \|.\| <= 0.001"),
        ("train/ppo_kl", -0.01, r"train/ppo_kl = -0.01, expected \|.\| <= 0.001"),
        ("train/ppo_kl", math.nan, "train/ppo_kl = nan"),
        ("train/logprob", 0.0, "train/logprob = 0, expected < 0"),
        ("train/logprob", 123.0, "train/logprob = 123, expected < 0"),
        ("train/logprob", math.nan, "train/logprob = nan"),
        ("train/entropy", 0.0, "train/entropy = 0, expected > 0"),
        ("train/entropy", math.nan, "train/entropy = nan"),
    ],
)
def test_each_number_of_the_first_update_is_checked(name: str, value: float, message: str) -> None:
    with pytest.raises(TrainingError, match="health check of the first update failed: " + message) as caught:
        check_first_update(HEALTHY | {name: value})
    assert str(caught.value).count("expected") == 1
    assert "nothing was learnt from this run yet" in str(caught.value)


def test_ratios_to_an_engine_may_be_off_and_nothing_else() -> None:
    off = {"train/ratio_deviation_max": 0.5, "train/ppo_kl": 0.2}
    check_first_update(HEALTHY | off, on_policy=False)
    with pytest.raises(TrainingError, match=r"failed: train/logprob = 1, expected < 0\. The policy"):
        check_first_update(HEALTHY | off | {"train/logprob": 1.0}, on_policy=False)


def test_everything_that_is_wrong_is_listed() -> None:
    with pytest.raises(TrainingError) as caught:
        check_first_update(dict.fromkeys(HEALTHY, math.nan))
    assert str(caught.value).count("expected") == 4


def test_the_engine_may_differ_up_to_the_limit() -> None:
    check_engine_agrees(0.1, HealthConfig(max_train_rollout_logprob_abs_diff=0.1))


@pytest.mark.parametrize(("diff", "shown"), [(0.11, "0.11"), (math.nan, "nan"), (math.inf, "inf")])
def test_an_engine_that_disagrees_stops_the_run(diff: float, shown: str) -> None:
    message = rf"train_rollout_logprob_abs_diff is {shown}, limit 0.1 \(health.max_train_rollout_logprob_abs_diff\)"
    with pytest.raises(TrainingError, match=message):
        check_engine_agrees(diff, HealthConfig(max_train_rollout_logprob_abs_diff=0.1))


def test_a_constant_reward_warns_once_each_time_the_patience_ends() -> None:
    alarm = ConstantRewardAlarm(HealthConfig(constant_reward_alarm_steps=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not alarm.see(0.5) and not alarm.see(0.5)
    with pytest.warns(UserWarning, match=r"the mean reward has been 0\.5 for 3 steps in a row .*look at samples.jsonl"):
        assert alarm.see(0.5)
    assert not alarm.see(0.5) and not alarm.see(0.5)
    with pytest.warns(UserWarning, match="for 6 steps in a row"):
        assert alarm.see(0.5)


@pytest.mark.filterwarnings("error")
def test_a_reward_that_moves_starts_the_count_again() -> None:
    alarm = ConstantRewardAlarm(HealthConfig(constant_reward_alarm_steps=3))
    assert not any(alarm.see(reward) for reward in (0.5, 0.5, 0.25, 0.25, 0.5, 0.5, math.nan, math.nan, math.nan))


def fake_policy(weight: float, gradient: float) -> Policy:
    """What the guard reads of a policy: its rank and its parameters with Megatron's gradients.

    `gradient` is of the first layer, `weight` in the second.
    """
    first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    second.weight.data[0, 1] = weight
    for layer in (first, second):
        layer.weight.main_grad = torch.zeros(1, 2)  # type: ignore[attr-defined]
    first.weight.main_grad[0, 0] = gradient  # type: ignore[attr-defined]
    core = torch.nn.Sequential(first, second)
    fake: Any = SimpleNamespace(context=SimpleNamespace(topology=Topology(rank=2)), stage=core)
    return cast(Policy, fake)


def report(*, skipped: bool) -> StepReport:
    return StepReport({"train/loss": math.nan}, grad_norm=math.inf, lr=0.1, skipped=skipped)


BATCH = TrainBatch([micro_batch_of_lengths([3, 2]), micro_batch_of_lengths([5])], 4, 2)


@pytest.mark.parametrize(
    ("weight", "gradient", "culprit"),
    [
        (math.nan, 0.0, "weight 1.weight"),
        (0.0, math.inf, "gradient of 0.weight"),
        (math.nan, math.nan, "weight 1.weight"),  # the cause, not what it did to the layers before it
        (0.0, 0.0, r"none on this rank \(the loss itself, or another rank\)"),
    ],
)
def test_a_skipped_update_is_explained_and_dumped(tmp_path: Path, weight: float, gradient: float, culprit: str) -> None:
    guard = NonFiniteGuard(HealthConfig(), tmp_path / "nonfinite")
    message = rf"step 5: loss nan, gradient norm inf; update skipped\. First bad tensor: {culprit}\. Batch saved to"
    with pytest.warns(UserWarning, match=message):
        guard.check(5, report(skipped=True), fake_policy(weight, gradient), BATCH)
    saved = torch.load(tmp_path / "nonfinite" / "step_5_rank_2.pt")
    assert len(saved) == 2
    assert torch.equal(saved[0]["positions"], BATCH.micro_batches[0].positions)


def test_too_many_skipped_updates_in_a_row_stop_the_run(tmp_path: Path) -> None:
    guard, policy = NonFiniteGuard(HealthConfig(max_nonfinite_steps=1), tmp_path), fake_policy(math.nan, 0.0)
    with pytest.warns(UserWarning, match="update skipped"):
        guard.check(1, report(skipped=True), policy, BATCH)
    guard.check(2, report(skipped=False), policy, BATCH)
    with pytest.warns(UserWarning, match="update skipped"):
        guard.check(3, report(skipped=True), policy, BATCH)
    with pytest.raises(TrainingError, match=r"That were 2 in a row, more than health\.max_nonfinite_steps = 1"):
        guard.check(4, report(skipped=True), policy, BATCH)


def test_a_finite_update_leaves_no_trace(tmp_path: Path) -> None:
    NonFiniteGuard(HealthConfig(), tmp_path / "nonfinite").check(1, report(skipped=False), fake_policy(0, 0), BATCH)
    assert not (tmp_path / "nonfinite").exists()
