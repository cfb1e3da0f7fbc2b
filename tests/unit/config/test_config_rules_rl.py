"""Each rule of config/rules_rl.py and each setting of rl without effect: what is said, and when nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_klear.config.load import load_recipe
from unit.config.config_files import RecipeFiles, change

GAE = {"advantage.type": "gae", "critic": {}}


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        (
            {"loss.loss_scale_factor": 64.0},
            "loss.loss_scale_factor",
            "with loss.loss_agg_mode token-mean, only with seq-mean-token-sum-norm",
        ),
        (
            {"loss.loss_agg_mode": "seq-mean-token-sum", "loss.loss_scale_factor": 64.0},
            "loss.loss_scale_factor",
            "with loss.loss_agg_mode seq-mean-token-sum, only with seq-mean-token-sum-norm",
        ),
        ({"kl.kl_type": "k1"}, "kl.kl_type", "while kl.kl_coef is 0"),
        ({"kl.kl_coef": 0.0, "kl.kl_in": "reward"}, "kl.kl_in", "while kl.kl_coef is 0"),
        ({"kl.ref_update_interval": 4}, "kl.ref_update_interval", "while kl.kl_coef is 0"),
        ({"correction.low": 0.1}, "correction.low", "with correction.type none, only with icepop or sequence_mask"),
        ({"correction.high": 3.0}, "correction.high", "with correction.type none"),
        (
            {"correction.type": "tis", "correction.low": 0.1},
            "correction.low",
            "with correction.type tis, only with icepop or sequence_mask",
        ),
        (
            {"correction.type": "mis", "correction.low": 0.1},
            "correction.low",
            "with correction.type mis, only with icepop or sequence_mask",
        ),
        ({"advantage.type": "rloo", "advantage.std": "none"}, "advantage.std", "with advantage.type rloo"),
        ({"advantage.type": "rloo", "advantage.eps": 0.1}, "advantage.eps", "with advantage.type rloo"),
        ({**GAE, "advantage.std": "none"}, "advantage.std", "with advantage.type gae"),
        ({**GAE, "advantage.eps": 0.1}, "advantage.eps", "with advantage.type gae"),
        ({"advantage.std": "none", "advantage.eps": 0.1}, "advantage.eps", "with advantage.std none"),
        (
            {"selection.overlong_penalty_factor": 0.5},
            "selection.overlong_penalty_factor",
            "without selection.overlong_buffer_len",
        ),
        (
            {"selection.drop_zero_std_groups": False, "selection.zero_std_metric": "accuracy"},
            "selection.zero_std_metric",
            "with selection.drop_zero_std_groups false",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(
    changes: dict[str, Any], key: str, reason: str, files: RecipeFiles
) -> None:
    (fault,) = files.faults(change(files.rl(), changes))
    assert (fault.key, fault.value) == (key, changes[key])
    assert fault.reason == f"would have no effect {reason}"
    assert fault.suggestion == "leave it out"


@pytest.mark.parametrize(
    "changes",
    [
        {"loss.loss_agg_mode": "seq-mean-token-sum-norm", "loss.loss_scale_factor": 64.0},
        {"kl.kl_coef": 0.1, "kl.kl_type": "k3+", "kl.kl_in": "reward", "kl.ref_update_interval": 4},
        {"correction.type": "tis", "correction.high": 3.0},
        {"correction.type": "mis", "correction.high": 0.3},
        {"correction.type": "icepop", "correction.low": 0.1, "correction.high": 3.0},
        {"correction.type": "sequence_mask", "correction.low": 0.99, "correction.high": 1.01},
        {"advantage.type": "reinforce_pp", "advantage.std": "unbiased", "advantage.eps": 0.1},
        {"advantage.type": "reinforce_pp_baseline", "advantage.std": "none"},
        {"advantage.type": "rloo"},
        GAE,
        {**GAE, "critic": {"value_clip": None, "lam": 0.95, "warmup_steps": 2}},
        {"selection.overlong_buffer_len": 8, "selection.overlong_penalty_factor": 0.5},
        {"selection.overlong_buffer_len": 64},
        {"selection.zero_std_metric": "accuracy"},
        {"loss.type": "my_package.losses:trained", "loss.sft_loss_coef": 0.1},
    ],
)
def test_settings_that_go_together(changes: dict[str, Any], files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), changes)) == []


def test_sum_norm_needs_its_constant(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"loss.loss_agg_mode": "seq-mean-token-sum-norm"}))
    assert str(fault) == (
        "loss.loss_scale_factor = <not given>: needed with loss_agg_mode seq-mean-token-sum-norm: the constant that"
        " sums over tokens are divided by (for example rollout.rollout_max_response_len)"
    )


@pytest.mark.parametrize("marker", ["latest_checkpointed_iteration.txt", "config.json"])
def test_the_reference_is_a_checkpoint_or_a_model_folder(marker: str, files: RecipeFiles, tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    recipe = change(files.rl(), {"kl.kl_coef": 0.1, "kl.ref_load": str(tmp_path / "referense")})
    (fault,) = files.faults(recipe)
    assert (fault.key, fault.reason) == ("kl.ref_load", "no such folder")
    folder.mkdir()
    (fault,) = files.faults(recipe)
    assert fault.suggestion == f"did you mean {folder}?"
    (fault,) = files.faults(change(recipe, {"kl.ref_load": str(folder)}))
    assert (fault.key, fault.suggestion) == ("kl.ref_load", "")
    assert fault.reason == (
        "holds neither latest_checkpointed_iteration.txt (a Megatron checkpoint) nor config.json (a Hugging Face"
        " folder)"
    )
    (folder / marker).touch()
    assert files.faults(recipe) == []


def test_one_iteration_of_a_reference_names_its_parent(files: RecipeFiles, tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()
    (fault,) = files.faults(change(files.rl(), {"kl.kl_coef": 0.1, "kl.ref_load": str(tmp_path / "iter_0000010")}))
    assert (fault.key, fault.suggestion) == ("kl.ref_load", "name the parent of iter_*")


@pytest.mark.parametrize("name", ["icepop", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(2.0, 2.0), (3.0, 2.0)])
def test_a_correction_keeps_a_range(name: str, low: float, high: float, files: RecipeFiles) -> None:
    given = {"type": name, "low": low, "high": high}
    (fault,) = files.faults(change(files.rl(), {"correction": given}))
    assert str(fault) == f"correction.low = {low}: must be below correction.high 2.0: {name} keeps what lies between"


def test_a_low_default_above_a_given_high_is_named(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"correction": {"type": "icepop", "high": 0.4}}))
    assert str(fault) == "correction.low = 0.5: must be below correction.high 0.4: icepop keeps what lies between"


@pytest.mark.parametrize("absent", [{}, {"critic": None}])
def test_gae_needs_a_critic(absent: dict[str, Any], files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"advantage.type": "gae", **absent}))
    assert str(fault) == (
        "critic = <not given>: needed with advantage.type gae, which learns values (critic: {} takes every default)"
    )
    assert load_recipe(files.write(change(files.rl(), GAE)), kind="rl").critic is not None


def test_a_critic_is_for_gae_alone(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"critic.lr": 1e-5}))
    assert str(fault) == (
        "critic = {'lr': 1e-05}: would have no effect with advantage.type grpo, only with gae"
        " (leave it out, or advantage.type: gae)"
    )


# One sample a prompt makes 4 samples a step.
ONE = {"rollout.n_samples_per_prompt": 1, "batch.global_batch_size": 4}


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("drop", [True, False])
def test_a_group_of_one_teaches_nothing_where_groups_are_compared(name: str, drop: bool, files: RecipeFiles) -> None:
    changes = {**ONE, "advantage.type": name, "selection.drop_zero_std_groups": drop}
    (fault,) = files.faults(change(files.rl(), changes))
    assert str(fault) == (
        f"rollout.n_samples_per_prompt = 1: with advantage.type {name} a group of one has no spread to learn from"
        " (at least 2, or advantage.type reinforce_pp or gae with selection.drop_zero_std_groups false)"
    )


@pytest.mark.parametrize("changes", [{**ONE, "advantage.type": "reinforce_pp"}, {**ONE, **GAE}])
def test_groups_of_one_are_kept_or_nothing_is(changes: dict[str, Any], files: RecipeFiles) -> None:
    expected = (
        "selection.drop_zero_std_groups = True: would leave out everything: with n_samples_per_prompt 1 no group has"
        " spread (set it to false)"
    )
    for drop in ({}, {"selection.drop_zero_std_groups": True}):
        assert [str(fault) for fault in files.faults(change(files.rl(), {**changes, **drop}))] == [expected]
    assert files.faults(change(files.rl(), {**changes, "selection.drop_zero_std_groups": False})) == []
    assert files.faults(change(files.rl(), {**changes, "rollout.n_samples_per_prompt": 2})) == []


def test_no_samples_at_all_are_refused(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"rollout.n_samples_per_prompt": 0}))
    assert str(fault) == "rollout.n_samples_per_prompt = 0: should be greater than 0"


def test_the_overlong_buffer_lies_in_the_response(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"selection.overlong_buffer_len": 65}))
    assert str(fault) == (
        "selection.overlong_buffer_len = 65: is more than rollout.rollout_max_response_len 64, at whose end it lies"
        " (at most 64)"
    )


def test_rollout_only_leaves_something_and_samples(files: RecipeFiles, tmp_path: Path) -> None:
    (fault,) = files.faults(change(files.rl(), {"debug.rollout_only": True}))
    assert str(fault) == (
        "debug.save_rollout_data = <not given>: needed with debug.rollout_only: nothing would be left of the work"
        " (name a folder)"
    )
    saved = {"debug.save_rollout_data": str(tmp_path / "new")}
    assert files.faults(change(files.rl(), {"debug.rollout_only": True, **saved})) == []
    for more in ({}, saved):
        changes = {"debug.rollout_only": True, "debug.load_rollout_data": str(tmp_path), **more}
        (fault,) = files.faults(change(files.rl(), changes))
        assert str(fault) == (
            "debug.rollout_only = True: excludes debug.load_rollout_data: one samples without training, the other"
            " trains without sampling (keep one of them)"
        )


def test_saved_rollouts_are_in_a_folder(files: RecipeFiles, tmp_path: Path) -> None:
    assert files.faults(change(files.rl(), {"debug.load_rollout_data": str(tmp_path)})) == []
    (fault,) = files.faults(change(files.rl(), {"debug.load_rollout_data": str(tmp_path / "modell")}))
    assert str(fault) == (
        f"debug.load_rollout_data = '{tmp_path}/modell': no such folder (did you mean {tmp_path / 'model'}?)"
    )
    (fault,) = files.faults(change(files.rl(), {"debug.load_rollout_data": str(tmp_path / "prompts.jsonl")}))
    assert fault.reason == "no such folder"


ERC = {"loss.erc": {"erc_low": 0.05, "erc_high": 0.05}}
ONE_UPDATE = {"batch.global_batch_size": 16}
OWN_LOSS = {"loss": {"type": "my_package.losses:trained"}}
KL_IN_REWARD = {"kl.kl_coef": 0.1, "kl.kl_in": "reward"}


@pytest.mark.parametrize(
    ("changes", "old_logprobs", "said"),
    [
        (ERC | ONE_UPDATE, ("rollout", "current"), "loss.erc needs the entropies of a forward pass (recompute)"),
        (
            {"correction.type": "tis"} | ONE_UPDATE,
            ("rollout", "current"),
            "correction.type tis needs the trainer's log-probs beside the engine's (recompute, or correction.type"
            " none)",
        ),
        (OWN_LOSS | ONE_UPDATE, ("current",), "a loss of your own reads old_logprobs (recompute or rollout)"),
        (
            KL_IN_REWARD | ONE_UPDATE,
            ("current",),
            "a KL penalty in the reward needs log-probs before the update (recompute or rollout)",
        ),
        (
            {"batch.global_batch_size": 15},
            ("current",),
            "a step of 16 samples in updates of batch.global_batch_size 15 is several: from the second on, the ratio to"
            " the policy that sampled is not 1 (recompute, or batch.global_batch_size 16)",
        ),
    ],
    ids=["erc", "correction", "own loss", "kl in reward", "several updates"],
)
def test_what_needs_a_pass_before_the_update_says_so(
    changes: dict[str, Any], old_logprobs: tuple[str, ...], said: str, files: RecipeFiles
) -> None:
    for name in ("recompute", "rollout", "current"):
        faults = files.faults(change(files.rl(), changes | {"train.old_logprobs": name}))
        expected = [f"train.old_logprobs = '{name}': {said}"] if name in old_logprobs else []
        assert [str(fault) for fault in faults] == expected


@pytest.mark.parametrize("old_logprobs", ["rollout", "current"])
@pytest.mark.parametrize(
    "changes",
    [
        {"kl.kl_coef": 0.1},
        GAE,
        {"loss.type": "gspo"},
        {"loss.entropy_coef": 0.1, "loss.sft_loss_coef": 0.1},
    ],
)
def test_one_update_can_do_without_a_pass(old_logprobs: str, changes: dict[str, Any], files: RecipeFiles) -> None:
    given = ONE_UPDATE | changes | {"train.old_logprobs": old_logprobs}
    assert files.faults(change(files.rl(), given)) == []
