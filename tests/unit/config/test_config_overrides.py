"""Overrides on the command line."""

from __future__ import annotations

import pytest

from megatron_klear.config.load import load_recipe
from unit.config.config_files import RecipeFiles


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["optimizer.lr=1e-6"], 1e-6),
        (["optimizer.lr=5e-5"], 5e-5),
        (["optimizer.lr=0"], 0.0),
        (["--lr", "1e-6"], 1e-6),
        (["--lr=2.5E-3"], 2.5e-3),
    ],
)
def test_a_number(words: list[str], value: float, files: RecipeFiles) -> None:
    assert load_recipe(files.write(files.rl()), words).optimizer.lr == value


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--sequence-parallel", "--tensor-model-parallel-size=2"],
        ["--sequence-parallel=true", "parallel.tensor_model_parallel_size=2"],
    ],
)
def test_both_spellings_in_any_order(words: list[str], files: RecipeFiles) -> None:
    parallel = load_recipe(files.write(files.rl()), words).parallel
    assert (parallel.tensor_model_parallel_size, parallel.sequence_parallel) == (2, True)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["checkpoint.resume=auto"], "auto"),
        (["checkpoint.resume=true"], True),
        (["checkpoint.resume=false"], False),
        (["--resume"], True),
        (["--resume=auto", "--ckpt-step", "3"], "auto"),
        (["--resume", "--ckpt-step=3"], True),
    ],
)
def test_true_false_or_a_word(words: list[str], value: bool | str, files: RecipeFiles) -> None:
    assert load_recipe(files.write(files.rl()), words).checkpoint.resume == value


def test_text_null_quotes_and_top_level_keys(files: RecipeFiles) -> None:
    words = ["run.name='1e-6'", "run.wandb_project=null", "checkpoint.save=a=b", "--train-iters", "7"]
    recipe = load_recipe(files.write(files.sft()), words, kind="sft")
    assert (recipe.run.name, recipe.run.wandb_project, recipe.checkpoint.save) == ("1e-6", None, "a=b")
    assert recipe.train_iters == 7


def test_a_flag_takes_the_next_word_even_with_an_equals_sign(files: RecipeFiles) -> None:
    assert load_recipe(files.write(files.rl()), ["--save", "runs/lr=3"]).checkpoint.save == "runs/lr=3"


def test_an_override_can_make_the_recipe_complete(files: RecipeFiles) -> None:
    recipe = files.sft()
    del recipe["train_iters"]
    recipe["eval"] = None
    words = ["train_iters=3", f"eval.prompt_data={files.folder / 'eval.parquet'}", "reward.type=arithmetic"]
    assert load_recipe(files.write(recipe), words, kind="sft").train_iters == 3


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr = 1: no such key (did you mean optimizer.lr?)"),
        (["optimizer.lr=-1"], "optimizer.lr = -1: should be greater than or equal to 0"),
        (["optimizer.lr.x=1"], "optimizer.lr.x = 1: optimizer.lr is the plain value 0.001, no key can stand below it"),
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size = '2': no such flag (did you mean --tensor-model-parallel-size?)",
        ),
        (["--zzzzzz"], "--zzzzzz = <not given>: no such flag (write section.key=value)"),
        (["--zzzzzz=3", "run.name=a"], "--zzzzzz = '3': no such flag (write section.key=value)"),
        (
            ["checkpoint.resume=yes"],
            "checkpoint.resume = 'yes': should be a valid boolean or 'auto' (write true or false)",
        ),
        (["--lr"], "--lr = <not given>: needs a value (write --lr VALUE or optimizer.lr=VALUE)"),
        (
            ["--lr", "--no-save"],
            "--lr = <not given>: needs a value (write --lr VALUE or optimizer.lr=VALUE)",
        ),
        (
            ["--max-length", "3", "--type", "ppo"],
            "--type = 'ppo': several keys have this name (write reward.type=... or loss.type=... or advantage.type=..."
            " or correction.type=...)",
        ),
        (
            ["--prompt-data=x"],
            "--prompt-data = 'x': several keys have this name (write eval.prompt_data=... or data.prompt_data=...)",
        ),
        (
            ["loose"],
            "loose = <not given>: expected section.key=value, --flag value, or --flag alone where the setting is true"
            " or false",
        ),
        (["run.name="], "run.name = '': no value given; write null for none, '' for empty text"),
        (
            ["run.name=a: b"],
            "run.name = 'a: b': expected one value (text with special characters needs quotes inside quotes:"
            " run.name='\"...\"')",
        ),
        (
            ["run.name=a #b"],
            "run.name = 'a #b': only 'a' would be read, the rest is a comment (text with special characters needs"
            " quotes inside quotes: run.name='\"...\"')",
        ),
        (
            ["run.name=[a"],
            "run.name = '[a': line 1, column 3: expected ',' or ']', but got '<stream end>' (text with special"
            " characters needs quotes inside quotes: run.name='\"...\"')",
        ),
        (["run.name=a", "--name", "b"], "run.name = 'b': given twice on the command line (keep one of them)"),
    ],
)
def test_a_bad_override_is_named(words: list[str], fault: str, files: RecipeFiles) -> None:
    assert fault in [str(found) for found in files.faults(files.rl(), *words)]


def test_the_stray_value_of_an_unknown_flag_is_no_second_fault(files: RecipeFiles) -> None:
    assert len(files.faults(files.rl(), "--tensor-parallel-size", "2")) == 1
    assert len(files.faults(files.rl(), "--zzzzzz", "run.name=a")) == 1
    assert len(files.faults(files.rl(), "--sequence-parallel", "false", "--tensor-model-parallel-size=2")) == 1


def test_faults_of_overrides_come_with_those_of_the_file(files: RecipeFiles) -> None:
    recipe = files.rl()
    recipe["batch"]["global_batch_size"] = -1
    keys = [fault.key for fault in files.faults(recipe, "--zzzzzz", "optimizer.lr=x")]
    assert keys == ["--zzzzzz", "batch.global_batch_size", "optimizer.lr"]


def test_the_flag_of_a_setting_that_the_critic_has_too_is_the_other_one(files: RecipeFiles) -> None:
    recipe = {**files.rl(), "advantage": {"type": "gae"}}
    loaded = load_recipe(files.write(recipe), ["--lr", "1e-6", "critic.lr=2e-6", "--warmup-steps", "3"], kind="rl")
    assert loaded.critic is not None
    assert (loaded.optimizer.lr, loaded.critic.lr, loaded.critic.warmup_steps) == (1e-6, 2e-6, 3)


def test_a_section_is_not_replaced_by_a_value(files: RecipeFiles) -> None:
    (fault,) = files.faults(files.rl(), "loss=ppo")
    assert str(fault) == "loss = 'ppo': expected a section: lines `key: value` below it"
