"""Each rule of config/rules.py: a recipe that breaks it, what is said, and that a faultless one passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_klear.config.check import check_recipe
from megatron_klear.config.load import load_recipe
from unit.config.config_files import RecipeFiles, change


def test_faultless_recipes_have_no_faults(files: RecipeFiles) -> None:
    for recipe in (files.sft(), files.rl()):
        assert files.faults(recipe, world_size=2) == []
        assert check_recipe(load_recipe(files.write(recipe)), world_size=2) == []


def test_a_vocabulary_that_does_not_divide_is_padded_not_refused(files: RecipeFiles) -> None:
    assert files.faults(change(files.sft(), {"parallel.tensor_model_parallel_size": 2})) == []


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize(
    ("changes", "reason", "suggestion"),
    [
        ({"parallel.pipeline_model_parallel_size": 4}, "6 layers for 4 stages of equal size", "1, 2, 3, 6"),
        ({"parallel.sequence_parallel": True}, "would have no effect", "raise tensor_model_parallel_size"),
        ({"optimizer.min_lr": 1e-4}, "no effect with lr_decay_style 'constant'", "linear, cosine"),
        ({"optimizer.lr_decay_iters": 5}, "no effect with lr_decay_style 'constant'", "linear, cosine"),
        ({"eval.eval_interval": 2}, "no effect without eval.prompt_data", "leave it out"),
        ({"eval.eval_before_train": True}, "no effect without eval.prompt_data", "leave it out"),
        ({"eval.max_response_len": 16}, "no effect without eval.prompt_data", "leave it out"),
        ({"export.max_shard_bytes": 1000}, "no effect without export.hf_dir", "leave it out"),
        ({"checkpoint.ckpt_step": 4}, "no effect without checkpoint.resume", "leave it out"),
        ({"checkpoint.verify_checksums": False}, "no effect without checkpoint.resume", "leave it out"),
        ({"checkpoint.allow_recipe_changes": True}, "no effect without checkpoint.resume", "leave it out"),
        ({"checkpoint.keep_best_metric": "eval/x"}, "no effect without checkpoint.keep_best", "leave it out"),
        ({"checkpoint.keep_best_mode": "min"}, "no effect without checkpoint.keep_best", "leave it out"),
        ({"checkpoint.async_save": True}, "no effect without checkpoint.save_interval", "leave it out"),
        ({"checkpoint.keep_last": 2}, "without checkpoint.save_interval: one checkpoint is saved", "leave it out"),
        ({"checkpoint.keep_every": 2}, "without checkpoint.save_interval: one checkpoint is saved", "leave it out"),
        ({"checkpoint.keep_best": 2}, "without checkpoint.save_interval: one checkpoint is saved", "leave it out"),
    ],
)
def test_one_setting_alone(
    kind: str, changes: dict[str, Any], reason: str, suggestion: str, files: RecipeFiles
) -> None:
    recipe = files.rl() if kind == "rl" else files.sft()
    (fault,) = files.faults(change(recipe, changes))
    ((key, value),) = changes.items()
    assert (fault.key, fault.value) == (key, value)
    assert reason in fault.reason
    assert suggestion in fault.suggestion


@pytest.mark.parametrize(
    ("size", "reasons"),
    [
        (2, []),
        (4, []),
        (3, ["num_attention_heads 8", "neither divides num_key_value_heads 4 nor is a multiple of it"]),
        (8, []),
        (5, ["num_attention_heads 8", "neither divides num_key_value_heads 4", "intermediate_size 96"]),
    ],
)
def test_tensor_parallel_size_fits_the_model(size: int, reasons: list[str], files: RecipeFiles) -> None:
    faults = files.faults(change(files.rl(), {"parallel.tensor_model_parallel_size": size}))
    assert [fault.key for fault in faults] == ["parallel.tensor_model_parallel_size"] * len(reasons)
    for fault, reason in zip(faults, reasons, strict=True):
        assert reason in fault.reason
        assert fault.suggestion == "sizes that fit this model: 1, 2, 4, 8"


def test_world_size_holds_whole_copies_of_the_model(files: RecipeFiles) -> None:
    layout = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}
    recipe = change(files.rl(), layout)
    assert files.faults(recipe, world_size=8) == []
    (fault,) = files.faults(recipe, world_size=6)
    assert str(fault) == (
        "world_size = 6: tensor 2 x pipeline 2 = 4 ranks hold one copy of the model, and 6 = 1 x 4 + 2"
        " (use 4 or 8 ranks)"
    )
    (fault,) = files.faults(recipe, world_size=3)
    assert fault.suggestion == "use 4 ranks"
    (fault,) = files.faults(recipe, world_size=0)
    assert fault.suggestion == "use 4 ranks"


def test_the_global_batch_reaches_every_data_parallel_rank(files: RecipeFiles) -> None:
    recipe = change(files.sft(), {"parallel.tensor_model_parallel_size": 2, "batch.global_batch_size": 3})
    assert files.faults(recipe, world_size=6) == []
    assert files.faults(recipe) == []
    (fault,) = files.faults(recipe, world_size=8)
    assert str(fault) == (
        "batch.global_batch_size = 3: leaves some of the 4 data-parallel ranks without a sample (at least 4)"
    )


def test_an_rl_step_samples_at_least_one_update(files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {"batch.global_batch_size": 16})) == []
    (fault,) = files.faults(change(files.rl(), {"batch.global_batch_size": 17}))
    assert str(fault) == (
        "batch.global_batch_size = 17: is more than a step samples: rollout_batch_size 4 x n_samples_per_prompt 4"
        " (at most 16)"
    )


@pytest.mark.parametrize(
    ("response", "tokens", "positions", "limits"),
    [
        (168, 200, 256, []),
        (169, 200, 256, ["batch.max_tokens_per_gpu 200"]),
        (169, 300, 201, []),
        (169, 300, 200, ["the model's max_position_embeddings 200"]),
        (169, 200, 200, ["batch.max_tokens_per_gpu 200", "the model's max_position_embeddings 200"]),
    ],
)
def test_prompt_and_response_fit(
    response: int, tokens: int, positions: int, limits: list[str], files: RecipeFiles
) -> None:
    model = files.model(max_position_embeddings=positions)
    changes = {"rollout.rollout_max_response_len": response, "batch.max_tokens_per_gpu": tokens}
    faults = files.faults(change(files.rl(), {**changes, "model.hf_checkpoint": model}))
    expected = [
        f"rollout.rollout_max_response_len = {response}: with max_prompt_len 32 makes 201 tokens, more than {limit}"
        " (at most 168)"
        for limit in limits
    ]
    assert [str(fault) for fault in faults] == expected


def test_a_prompt_that_leaves_no_room_is_named(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"data.max_prompt_len": 190, "batch.max_tokens_per_gpu": 190}))
    assert fault.suggestion == "shorten data.max_prompt_len as well"


def test_an_sft_sample_fits(files: RecipeFiles) -> None:
    assert files.faults(change(files.sft(), {"data.max_length": 200})) == []
    faults = files.faults(change(files.sft(), {"data.max_length": 2049}))
    assert [str(fault) for fault in faults] == [
        "data.max_length = 2049: more than batch.max_tokens_per_gpu 200 (at most 200)",
        "data.max_length = 2049: more than the model's max_position_embeddings 2048 (at most 2048)",
    ]


def test_an_evaluation_answer_leaves_room_for_its_prompt(files: RecipeFiles) -> None:
    evaluation = {"eval.prompt_data": str(files.folder / "eval.parquet"), "eval.max_response_len": 2048}
    (fault,) = files.faults(change(files.rl(), evaluation))
    assert fault.key == "eval.max_response_len"
    assert fault.reason == "leaves no room for a prompt in the model's max_position_embeddings 2048"


def test_weights_come_from_one_place_that_exists(files: RecipeFiles) -> None:
    checkpoints = files.folder / "checkpoints"
    (fault,) = files.faults(change(files.rl(), {"model.load": str(checkpoints), "model.random_init": False}))
    assert (fault.key, fault.reason) == ("model.load", "no such folder")
    checkpoints.mkdir()
    assert files.faults(change(files.rl(), {"model.load": str(checkpoints), "model.random_init": False})) == []
    (fault,) = files.faults(change(files.rl(), {"model.load": str(checkpoints)}))
    assert fault.key == "model.random_init"
    assert str(checkpoints) in fault.reason


def test_a_model_folder_without_weights_is_refused_unless_they_come_from_elsewhere(files: RecipeFiles) -> None:
    recipe = change(files.rl(), {"model.random_init": False})
    (fault,) = files.faults(recipe)
    assert fault.key == "model.hf_checkpoint"
    assert "no *.safetensors" in fault.reason
    assert "model.random_init" in fault.suggestion
    (files.folder / "model" / "model.safetensors").touch()
    assert files.faults(recipe) == []


def test_a_model_that_cannot_be_read_is_a_fault(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"model.hf_checkpoint": str(files.folder / "modle")}))
    assert fault.key == "model.hf_checkpoint"
    assert "config.json does not exist" in fault.reason
    assert fault.suggestion == f"did you mean {files.folder / 'model'}?"
    llama = files.model(model_type="llama")
    (fault,) = files.faults(change(files.rl(), {"model.hf_checkpoint": llama}))
    assert "model_type" in fault.reason
    assert "'llama'" in fault.reason


DECAY = {"optimizer.lr_decay_style": "cosine", "optimizer.lr_decay_iters": 10}


def test_the_end_of_the_decay_is_below_its_start(files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {**DECAY, "optimizer.min_lr": 1e-3})) == []
    (fault,) = files.faults(change(files.rl(), {**DECAY, "optimizer.min_lr": 2e-3}))
    assert str(fault) == "optimizer.min_lr = 0.002: is above optimizer.lr 0.001 (at most 0.001)"


def test_rl_must_say_how_long_it_decays(files: RecipeFiles) -> None:
    changes = {"optimizer.lr_decay_style": "linear"}
    assert files.faults(change(files.sft(), changes)) == []
    (fault,) = files.faults(change(files.rl(), changes))
    assert fault.key == "optimizer.lr_decay_iters"
    assert "needed with lr_decay_style 'linear'" in fault.reason


def test_the_warm_up_ends_before_the_decay(files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {**DECAY, "optimizer.lr_warmup_iters": 9})) == []
    (fault,) = files.faults(change(files.rl(), {**DECAY, "optimizer.lr_warmup_iters": 10}))
    assert (fault.key, fault.suggestion) == ("optimizer.lr_warmup_iters", "at most 9")
    assert "below lr_decay_iters 10" in fault.reason


def test_the_warm_up_of_sft_ends_before_training_where_the_decay_does(files: RecipeFiles) -> None:
    changes = {"optimizer.lr_decay_style": "linear", "optimizer.lr_warmup_iters": 10}
    (fault,) = files.faults(change(files.sft(), changes))
    assert (fault.key, fault.suggestion) == ("optimizer.lr_warmup_iters", "at most 9")
    assert "below train_iters 10" in fault.reason
    assert files.faults(change(files.sft(), {**changes, "train_iters": 11})) == []


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("math", None),
        ("arithmetic", None),
        ("my_package.rewards:score", None),
        ("arithmetics", "did you mean arithmetic?"),
        ("maths", "did you mean math?"),
        ("my_package.rewards", ""),
        ("my-package:score", ""),
        (":score", ""),
        ("my_package:a.b", ""),
    ],
)
def test_the_reward_is_known_or_a_function(name: str, suggestion: str | None, files: RecipeFiles) -> None:
    faults = files.faults(change(files.rl(), {"reward.type": name}))
    assert [fault.suggestion for fault in faults] == ([] if suggestion is None else [suggestion])
    assert all("expected math, arithmetic, or a function" in fault.reason for fault in faults)


@pytest.mark.parametrize("setting", ["timeout_s", "num_workers"])
def test_settings_of_math_are_for_math(setting: str, files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {"reward.type": "math", f"reward.{setting}": 3})) == []
    (fault,) = files.faults(change(files.rl(), {f"reward.{setting}": 3}))
    assert (fault.key, fault.value) == (f"reward.{setting}", 3)
    assert fault.reason == "would have no effect with a reward other than math"


def test_joint_sft_needs_rewards_of_exactly_one(files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {"loss.sft_loss_coef": 0.1})) == []
    (fault,) = files.faults(change(files.rl(), {"loss.sft_loss_coef": 0.1, "reward.correct": 2.0}))
    assert fault.key == "loss.sft_loss_coef"
    assert "reward exactly 1, and reward.correct is 2.0" in fault.reason


def test_sft_has_a_reward_exactly_where_it_evaluates(files: RecipeFiles) -> None:
    evaluation = {"eval.prompt_data": str(files.folder / "eval.parquet"), "eval.eval_interval": 5}
    assert files.faults(change(files.sft(), {**evaluation, "reward.type": "math"})) == []
    (fault,) = files.faults(change(files.sft(), evaluation))
    assert fault.key == "reward.type"
    assert "eval.prompt_data needs a reward" in fault.reason
    (fault,) = files.faults(change(files.sft(), {"reward.type": "math"}))
    assert fault.key == "reward.type"
    assert "no effect in sft without eval.prompt_data" in fault.reason


@pytest.mark.parametrize(
    ("kind", "key"), [("sft", "data.path"), ("rl", "data.prompt_data"), ("rl", "eval.prompt_data")]
)
def test_data_files_exist_and_are_jsonl_or_parquet(kind: str, key: str, files: RecipeFiles, tmp_path: Path) -> None:
    recipe = files.rl() if kind == "rl" else files.sft()
    (fault,) = files.faults(change(recipe, {key: str(tmp_path / "prompt.jsonl")}))
    assert (fault.key, fault.reason) == (key, "no such file")
    assert fault.suggestion == f"did you mean {tmp_path / 'prompts.jsonl'}?"
    (fault,) = files.faults(change(recipe, {key: str(tmp_path / "absent" / "prompts.jsonl")}))
    assert fault.suggestion == f"the folder {tmp_path / 'absent'} does not exist either"
    (fault,) = files.faults(change(recipe, {key: str(tmp_path / "prompts.csv")}))
    assert (fault.key, fault.reason) == (key, "expected a file ending in .jsonl or .parquet, got .csv")
    assert files.faults(change(recipe, {key: str(tmp_path / "eval.parquet")})) == []


@pytest.mark.parametrize("resume", [True, "auto"])
def test_resume_and_overwrite_exclude_each_other(resume: bool | str, files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {"checkpoint.resume": resume})) == []
    (fault,) = files.faults(change(files.rl(), {"checkpoint.resume": resume, "checkpoint.overwrite": True}))
    assert fault.key == "checkpoint.overwrite"
    assert "excludes checkpoint.resume" in fault.reason
    assert files.faults(change(files.rl(), {"checkpoint.resume": False})) == []


@pytest.mark.parametrize("resume", [True, "auto"])
def test_settings_of_a_resume_are_for_a_resume(resume: bool | str, files: RecipeFiles) -> None:
    settings = {"ckpt_step": 0, "verify_checksums": False, "allow_recipe_changes": True}
    assert files.faults({**files.rl(), "checkpoint": {"resume": resume, **settings}}) == []
    keys = [fault.key for fault in files.faults({**files.rl(), "checkpoint": {"resume": False, **settings}})]
    assert keys == [f"checkpoint.{name}" for name in sorted(settings)]


KEEP = {"checkpoint.save_interval": 10, "checkpoint.keep_last": 2}


@pytest.mark.parametrize("setting", ["keep_every", "keep_best"])
def test_what_stays_besides_the_newest_needs_deletions(setting: str, files: RecipeFiles) -> None:
    changes = {**KEEP, f"checkpoint.{setting}": 20, "checkpoint.keep_best_metric": "train/loss"}
    if setting == "keep_every":
        del changes["checkpoint.keep_best_metric"]
    assert files.faults(change(files.rl(), changes)) == []
    del changes["checkpoint.keep_last"]
    (fault,) = files.faults(change(files.rl(), {**changes, "checkpoint.keep_last": None}))
    assert str(fault) == (
        f"checkpoint.{setting} = 20: would have no effect without checkpoint.keep_last: nothing is deleted"
        " (leave it out)"
    )


@pytest.mark.parametrize(
    ("every", "suggestion"), [(10, None), (20, None), (25, "20 or 30"), (9, "10"), (11, "10 or 20")]
)
def test_steps_that_stay_are_steps_that_are_saved(every: int, suggestion: str | None, files: RecipeFiles) -> None:
    faults = files.faults(change(files.rl(), {**KEEP, "checkpoint.keep_every": every}))
    reason = "must be a multiple of checkpoint.save_interval 10: other steps are not saved"
    expected = [] if suggestion is None else [f"checkpoint.keep_every = {every}: {reason} ({suggestion})"]
    assert [str(fault) for fault in faults] == expected


@pytest.mark.parametrize(
    ("interval", "fault"),
    [
        (10, None),
        (5, None),
        (
            None,
            "eval.eval_interval = <not given>: needed with checkpoint.keep_best: {without}"
            " (for example checkpoint.save_interval 10)",
        ),
        (4, "checkpoint.save_interval = 10: must be a multiple of eval.eval_interval 4: {without} (8 or 12)"),
        (20, "checkpoint.save_interval = 10: must be a multiple of eval.eval_interval 20: {without} (20)"),
    ],
)
def test_the_best_checkpoints_are_evaluated(interval: int | None, fault: str | None, files: RecipeFiles) -> None:
    evaluation = {"eval.prompt_data": str(files.folder / "eval.parquet"), "eval.eval_interval": interval}
    faults = files.faults(change(files.rl(), {**KEEP, **evaluation, "checkpoint.keep_best": 1}))
    without = "a checkpoint without eval/accuracy is never among the best"
    assert [str(found) for found in faults] == ([] if fault is None else [fault.format(without=without)])
    # Another metric than an evaluation's is there at every step; without keep_best nobody asks.
    other = {"checkpoint.keep_best": 1, "checkpoint.keep_best_metric": "rollout/reward"}
    assert files.faults(change(files.rl(), {**KEEP, **evaluation, **other})) == []
    assert files.faults(change(files.rl(), {**KEEP, **evaluation})) == []


def test_the_best_checkpoints_need_an_evaluation(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {**KEEP, "checkpoint.keep_best": 3}))
    assert str(fault) == (
        "checkpoint.keep_best = 3: a checkpoint without eval/accuracy is never among the best, and nothing is evaluated"
        " without eval.prompt_data (set it, or another keep_best_metric)"
    )


@pytest.mark.parametrize("folder", [".", "..", "runs/.."])
def test_overwriting_spares_the_folder_one_is_in(folder: str, files: RecipeFiles) -> None:
    assert files.faults(change(files.rl(), {"run.output_dir": folder})) == []
    assert files.faults(change(files.rl(), {"run.output_dir": "runs/one", "checkpoint.overwrite": True})) == []
    (fault,) = files.faults(change(files.rl(), {"run.output_dir": folder, "checkpoint.overwrite": True}))
    assert (fault.key, fault.value) == ("run.output_dir", folder)
    assert "delete in the folder you are in" in fault.reason


def test_the_output_folder_has_a_name(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"run.output_dir": ""}))
    assert (fault.key, fault.reason) == ("run.output_dir", "expected the name of a folder")
