"""RL with a critic, a reference, a loss of one's own, saved rollouts and resampling; and going on with such runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from e2e.runs import Bench
from helpers.checkpoints import tensors_of
from megatron_klear.report.samples import read_samples

# One update a step: its first numbers are those of the weights the step began with.
ONE_UPDATE = {"batch.global_batch_size": 16}
GAE = {"advantage.type": "gae", "critic.lr": 1.0e-3, "critic.warmup_steps": 1}
KL_IN_REWARD = {"kl.kl_coef": 0.5, "kl.kl_in": "reward", "kl.ref_update_interval": 2}
KL_IN_LOSS = {"kl.kl_coef": 0.5, "kl.ref_update_interval": 2}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def test_a_critic_learns_first_alone_and_then_beside_the_policy(sft: Bench) -> None:
    sft.succeed("rl", sft.recipe("rl", "rl_gae", GAE))
    first, *others = sft.metrics("rl_gae")
    assert first["critic/loss"] > 0 and "train/loss" not in first
    # Its values start at zero.
    assert abs(first["critic/value_mean"]) < abs(first["critic/return_mean"])
    for line in others:
        assert line["critic/loss"] > 0 and "train/loss" in line and "critic/return_mean" in line
    # The policy did not move while the critic warmed up, and moved after.
    versions = {step: sample.versions for step, sample in read_samples(sft.folder / "rl_gae")}
    assert versions[2] == (0,) and versions[3] == (others[0]["train/num_updates"],) > (0,)
    assert (sft.folder / "rl_gae" / "checkpoints" / "iter_0000003" / "critic").is_dir()
    assert not (sft.folder / "rl_gae" / "checkpoints" / "iter_0000003" / "reference").exists()


@pytest.mark.parametrize(
    ("name", "changes", "companions", "world_size"),
    [
        ("gae", GAE | KL_IN_REWARD, ("critic", "reference"), 1),
        ("gae", GAE | KL_IN_REWARD, ("critic", "reference"), 2),
        ("kl", KL_IN_LOSS, ("reference",), 1),
        ("kl_in_reward", KL_IN_REWARD, ("reference",), 2),
    ],
    ids=["gae", "gae, 2 stages", "kl in loss", "kl in reward, 2 stages"],
)
def test_a_run_with_companions_that_goes_on_is_the_unbroken_run(
    sft: Bench, name: str, changes: dict[str, Any], companions: tuple[str, ...], world_size: int
) -> None:
    if world_size == 2:
        changes = changes | {"parallel.pipeline_model_parallel_size": 2}
    whole, parts = f"rl_{name}_whole{world_size}", f"rl_{name}_parts{world_size}"
    sft.succeed("rl", sft.recipe("rl", whole, changes), "rollout.num_rollout=4", world_size=world_size)
    recipe = sft.recipe("rl", parts, changes)
    # Stops after the reference was renewed, at step 2, and before it will be again.
    sft.succeed("rl", recipe, "rollout.num_rollout=3", world_size=world_size)
    sft.succeed("rl", recipe, "rollout.num_rollout=4", "checkpoint.resume=true", world_size=world_size)
    assert sft.metrics(parts) == sft.metrics(whole)
    assert_equal(sft.exported(parts), sft.exported(whole))
    for companion in ("", *companions):
        found, wanted = (
            tensors_of(sft.folder / run / "checkpoints" / "iter_0000004" / companion) for run in (parts, whole)
        )
        assert len(wanted) > 10
        assert_equal(found, wanted)


def test_the_penalty_in_the_loss_is_measured_from_the_reference(sft: Bench) -> None:
    sft.succeed("rl", sft.recipe("rl", "rl_kl", KL_IN_LOSS | ONE_UPDATE | {"rollout.num_rollout": 4}))
    kl = [line["train/kl"] for line in sft.metrics("rl_kl")]
    # The reference is the policy at the start, and again after step 2.
    assert kl[0] < 1e-9 and kl[1] > 1e-6 and kl[2] < 1e-9 and kl[3] > 1e-6


def test_a_penalty_in_the_reward_changes_what_is_learnt(sft: Bench) -> None:
    sft.succeed("rl", sft.recipe("rl", "rl_free", ONE_UPDATE))
    sft.succeed("rl", sft.recipe("rl", "rl_charged", KL_IN_REWARD | ONE_UPDATE | {"kl.ref_update_interval": None}))
    free, charged = sft.metrics("rl_free"), sft.metrics("rl_charged")
    # Nothing to charge on the first step; the samples of the second are the same, their advantages are not.
    assert free[0] == charged[0] and free[1]["rollout/reward"] == charged[1]["rollout/reward"]
    assert free[1]["train/grad_norm"] != charged[1]["train/grad_norm"]


def test_the_reference_can_be_loaded_from_either_form_of_a_model(rl: Bench) -> None:
    lines = {}
    for run in ("sft", "rl"):
        for form in ("checkpoints", "hf"):
            load = {"kl.kl_coef": 0.1, "kl.ref_load": str(rl.folder / run / form), "rollout.num_rollout": 1}
            rl.succeed("rl", rl.recipe("rl", f"rl_from_{run}_{form}", ONE_UPDATE | load))
            (lines[run, form],) = rl.metrics(f"rl_from_{run}_{form}")
    assert lines["rl", "checkpoints"] == lines["rl", "hf"]
    # The policy starts from sft's weights, so these are its own.
    assert lines["sft", "checkpoints"]["train/kl"] < 1e-9 and lines["sft", "hf"]["train/kl"] < 1e-9
    other = lines["rl", "hf"]
    assert other["train/kl"] > 1e-6
    # The policy itself did not become the reference.
    assert other["train/ratio_deviation_max"] == 0 and other["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_saved_rollouts_train_the_same_weights(rl: Bench) -> None:
    rollouts = rl.folder / "rollouts"
    rl.succeed("rl", rl.recipe("rl", "rl_saved", {"debug.save_rollout_data": str(rollouts)}))
    assert_equal(rl.exported("rl_saved"), rl.exported("rl"))
    rl.succeed("rl", rl.recipe("rl", "rl_loaded", {"debug.load_rollout_data": str(rollouts)}))
    assert_equal(rl.exported("rl_loaded"), rl.exported("rl"))
    for found, wanted in zip(rl.metrics("rl_loaded"), rl.metrics("rl"), strict=True):
        assert {key: value for key, value in wanted.items() if not key.startswith("rollout/")} == found


def test_a_rollout_alone_trains_nothing_and_can_be_trained_on_later(rl: Bench) -> None:
    rollouts, once = rl.folder / "rollouts_alone", {"rollout.num_rollout": 1}
    alone = {"debug.save_rollout_data": str(rollouts), "debug.rollout_only": True}
    rl.succeed("rl", rl.recipe("rl", "rl_alone", alone))
    assert [line["train/num_updates"] for line in rl.metrics("rl_alone")] == [0, 0, 0]
    assert len(list(rollouts.iterdir())) == 3
    assert_equal(rl.exported("rl_alone"), rl.exported("sft"))
    rl.succeed("rl", rl.recipe("rl", "rl_later", {"debug.load_rollout_data": str(rollouts), **once}))
    rl.succeed("rl", rl.recipe("rl", "rl_direct", once))
    assert_equal(rl.exported("rl_later"), rl.exported("rl_direct"))
    assert rl.metrics("rl_later")[0]["train/loss"] == rl.metrics("rl_direct")[0]["train/loss"]


def test_a_soak_moves_nothing(sft: Bench) -> None:
    sft.succeed("rl", sft.recipe("rl", "rl_soak", {"optimizer.lr": 0.0, "rollout.num_rollout": 4}))
    assert_equal(sft.exported("rl_soak"), sft.exported("sft"))
    lines = sft.metrics("rl_soak")
    assert len(lines) == 4 and all(line["train/num_updates"] > 0 for line in lines)
    differences = [line["train/train_rollout_logprob_abs_diff"] for line in lines]
    assert max(differences) - min(differences) < 1e-6 and max(differences) < 1e-5


def test_resampling_fills_the_batch(sft: Bench) -> None:
    changes = {
        "reward.type": "helpers.rewards:half_of_the_prompts",
        # That of a cut-off response.
        "reward.incorrect": 0.5,
        "rollout.rollout_max_response_len": 16,
        "selection.max_resample_rounds": 8,
    }
    sft.succeed("rl", sft.recipe("rl", "rl_refilled", changes))
    lines = sft.metrics("rl_refilled")
    for line in lines:
        assert line["rollout/num_samples"] - line.get("rollout/dropped/zero_std", 0) == 16
        assert line["train/num_updates"] == 2
    assert any(line["rollout/num_samples"] > 16 for line in lines)
    samples = [(step, sample.sample_id) for step, sample in read_samples(sft.folder / "rl_refilled")]
    assert len(set(samples)) == len(samples)


def test_resampling_ends(sft: Bench) -> None:
    changes = {
        "reward.type": "helpers.rewards:equal_reward",
        "reward.incorrect": 0.5,
        "selection.max_resample_rounds": 2,
        "rollout.num_rollout": 1,
    }
    sft.succeed("rl", sft.recipe("rl", "rl_endless", changes))
    (line,) = sft.metrics("rl_endless")
    assert line["rollout/num_samples"] == line["rollout/dropped/zero_std"] == 3 * 16
    assert line["train/num_updates"] == 0


def test_a_loss_of_ones_own(sft: Bench) -> None:
    own = {"loss": {"type": "helpers.losses:reinforce"}}
    sft.succeed("rl", sft.recipe("rl", "rl_own", ONE_UPDATE | own))
    sft.succeed("rl", sft.recipe("rl", "rl_gppo", ONE_UPDATE))
    found, wanted = sft.metrics("rl_own"), sft.metrics("rl_gppo")
    assert len(found) == 3 and all(line["train/reinforce"] == line["train/loss"] for line in found)
    # At ratio 1 every clipped loss has its gradient.
    assert found[0]["train/grad_norm"] == pytest.approx(wanted[0]["train/grad_norm"], rel=1e-6)
    assert read_samples(sft.folder / "rl_own")


def test_a_policy_that_is_never_finite_stops_a_run_whose_critic_is_well(sft: Bench) -> None:
    changes = GAE | {
        "loss": {"type": "helpers.losses:nowhere"},
        "critic.warmup_steps": 0,
        "health.max_nonfinite_steps": 2,
    }
    text = sft.refuse("rl", sft.recipe("rl", "rl_nan", changes))
    assert "step 3: loss nan" in text and "That were 3 in a row, more than health.max_nonfinite_steps = 2" in text


def test_a_critic_that_is_not_finite_stops_the_run(sft: Bench) -> None:
    changes = GAE | {"critic.lr": 1.0e30, "health.max_nonfinite_steps": 0}
    text = sft.refuse("rl", sft.recipe("rl", "rl_wild_critic", changes))
    assert ": critic/loss nan" in text and "That were 1 in a row" in text


def test_a_run_killed_between_the_checkpoints_of_a_step_goes_on(sft: Bench) -> None:
    # Critic and reference of step 3 are written, the policy's tracker still says 2.
    changes = GAE | KL_IN_REWARD | {"checkpoint.save_interval": 2}
    recipe = sft.recipe("rl", "rl_between", changes)
    sft.succeed("rl", recipe)
    wanted, weights = sft.metrics("rl_between"), sft.exported("rl_between")
    (sft.folder / "rl_between" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    sft.succeed("rl", recipe, "checkpoint.resume=true")
    assert sft.metrics("rl_between") == wanted
    assert_equal(sft.exported("rl_between"), weights)


def test_an_overwritten_run_leaves_no_companions(sft: Bench) -> None:
    recipe = sft.recipe("rl", "rl_over", GAE | KL_IN_REWARD | {"rollout.num_rollout": 2})
    sft.succeed("rl", recipe)
    sft.succeed("rl", recipe, "checkpoint.overwrite=true", "rollout.num_rollout=1")
    folder = sft.folder / "rl_over" / "checkpoints"
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000001"]
    assert (folder / "iter_0000001" / "critic").is_dir() and (folder / "iter_0000001" / "reference").is_dir()
