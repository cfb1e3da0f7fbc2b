"""Reading recipes: files, YAML, kinds, and every fault listed at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_klear.config.load import dump_recipe, load_recipe, world_size_from_env
from megatron_klear.config.loss import GppoLossConfig
from megatron_klear.config.recipe import RlRecipe, SftRecipe
from megatron_klear.errors import ConfigError
from unit.config.config_files import RecipeFiles


def test_the_kind_follows_from_the_keys(files: RecipeFiles) -> None:
    assert isinstance(load_recipe(files.write(files.sft())), SftRecipe)
    assert isinstance(load_recipe(files.write(files.rl())), RlRecipe)
    assert load_recipe(files.write(files.rl()), kind="rl").loss == GppoLossConfig(type="gppo")


def test_a_recipe_of_the_other_kind_is_named_as_such(files: RecipeFiles) -> None:
    (fault,) = files.faults(files.rl(), kind="sft")
    assert fault.key == "train_iters"
    assert fault.reason == "needed for sft; with `rollout` this is a recipe for rl"
    assert fault.suggestion == "run it with `megatron-klear rl`"
    (fault,) = files.faults(files.sft(), kind="rl")
    assert (fault.key, fault.suggestion) == ("rollout", "run it with `megatron-klear sft`")


def test_a_recipe_of_both_kinds_or_of_neither_is_a_fault(files: RecipeFiles) -> None:
    (fault,) = files.faults({**files.rl(), "train_iters": 3})
    assert (fault.key, fault.value, fault.suggestion) == ("train_iters", 3, "leave one out")
    assert fault.reason == "a recipe with `rollout` is rl, one with `train_iters` is sft; this one has both"
    recipe = files.sft()
    del recipe["train_iters"]
    (fault,) = files.faults(recipe)
    assert fault.reason.endswith("this one has neither")
    (fault,) = files.faults({**recipe, "train_iter": 5})
    assert (fault.key, fault.suggestion) == ("train_iters", "did you write train_iter for train_iters?")


def test_without_a_kind_the_shared_sections_are_checked_all_the_same(files: RecipeFiles) -> None:
    recipe = files.sft()
    del recipe["train_iters"]
    recipe["optimizer"]["lr"] = -1
    recipe["checkpoint"] = {"resume": True, "overwrite": True}
    assert [fault.key for fault in files.faults(recipe)] == ["checkpoint.overwrite", "optimizer.lr", "train_iters"]


def test_every_fault_is_listed_at_once_sorted_by_key(files: RecipeFiles) -> None:
    recipe = files.rl()
    recipe["optimizer"] |= {"lr": "fast", "tensor_model_parallel_size": 2}  # not a number; another section's key
    recipe["batch"]["global_batch_sise"] = 4  # misspelt
    recipe["loss"] = {"type": "gpo"}
    recipe["reward"]["timeout_s"] = 1.0  # no effect
    recipe["parallel"] = {"pipeline_model_parallel_size": 4}  # does not divide 6 layers
    recipe["data"]["prompt_data"] = str(files.folder / "promts.jsonl")
    del recipe["rollout"]["num_rollout"]
    with pytest.raises(ConfigError) as caught:
        load_recipe(files.write(recipe), world_size=6)
    path = files.folder / "recipe.yaml"
    assert str(caught.value).splitlines() == [
        f"{path}: 9 faults",
        "  batch.global_batch_sise = 4: no such key (did you mean batch.global_batch_size?)",
        f"  data.prompt_data = '{files.folder}/promts.jsonl': no such file"
        f" (did you mean {files.folder / 'prompts.jsonl'}?)",
        "  loss.type = 'gpo': expected one of ppo, grpo, clip_higher, gppo, ce_gppo, cispo, gspo,"
        " package.module:function (did you mean gppo?)",
        "  optimizer.lr = 'fast': should be a valid number (write a number, without quotes)",
        "  optimizer.tensor_model_parallel_size = 2: no such key (did you mean parallel.tensor_model_parallel_size?)",
        "  parallel.pipeline_model_parallel_size = 4: 6 layers for 4 stages of equal size does not work out"
        " (sizes that fit this model: 1, 2, 3, 6)",
        "  reward.timeout_s = 1.0: would have no effect with a reward other than math (leave it out)",
        "  rollout.num_rollout = <not given>: needed, it has no default",
        "  world_size = 6: tensor 1 x pipeline 4 = 4 ranks hold one copy of the model, and 6 = 1 x 4 + 2"
        " (use 4 or 8 ranks)",
    ]


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("optimizer", "lr_warmup_iter", "did you mean optimizer.lr_warmup_iters?"),
        ("optimizer", "n_samples_per_prompt", "did you mean rollout.n_samples_per_prompt?"),
        ("optimizer", "prompt_data", "did you mean eval.prompt_data or data.prompt_data?"),
        ("optimizer", "n_sample_per_prompt", "did you mean rollout.n_samples_per_prompt?"),
        ("parallel", "tensor-model-parallel-size", "did you mean parallel.tensor_model_parallel_size?"),
        ("checkpoint", "eval-interval", "did you mean eval.eval_interval?"),
        ("export", "zzz", "valid here: hf_dir, max_shard_bytes"),
    ],
)
def test_an_unknown_key_names_what_was_meant(section: str, key: str, hint: str, files: RecipeFiles) -> None:
    recipe = files.rl()
    recipe.setdefault(section, {})[key] = 7
    (fault,) = files.faults(recipe)
    assert (fault.key, fault.value, fault.reason) == (f"{section}.{key}", 7, "no such key")
    assert fault.suggestion == hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("evals", "did you mean eval?"),
        ("paralel", "did you mean parallel?"),
        ("min_lr", "did you mean optimizer.min_lr?"),
        ("rollouts", "did you mean rollout?"),
    ],
)
def test_an_unknown_key_at_the_top_names_what_was_meant(key: str, hint: str, files: RecipeFiles) -> None:
    (fault,) = files.faults({**files.rl(), key: 0.5})
    assert (fault.key, fault.suggestion) == (key, hint)


@pytest.mark.parametrize(
    ("key", "value", "reason", "hint"),
    [
        ("batch.global_batch_size", 0, "should be greater than 0", ""),
        ("batch.global_batch_size", True, "should be a valid integer", "write digits, without quotes"),
        ("batch.global_batch_size", "8", "should be a valid integer", "write digits, without quotes"),
        ("batch.global_batch_size", 8.0, "should be a valid integer", "write 8"),
        ("optimizer.lr", None, "should be a valid number", ""),
        ("optimizer.lr", math.nan, "should be a valid number", "write a number, without quotes"),
        ("parallel.sequence_parallel", 1, "should be a valid boolean", "write true or false"),
        ("run.name", 7, "should be a valid string", "put it in quotes, with quotes inside quotes on a command line"),
        ("checkpoint.resume", "yes", "should be a valid boolean or 'auto'", "write true or false"),
        ("checkpoint.resume", 1, "should be a valid boolean or 'auto'", "write true or false"),
        ("checkpoint.resume", "Auto", "should be a valid boolean or 'auto'", "did you mean auto?"),
        ("checkpoint.resume", None, "should be a valid boolean or 'auto'", ""),
        ("checkpoint.keep_best_mode", "maximum", "should be 'max' or 'min'", "did you mean max?"),
        ("checkpoint.ckpt_step", -1, "should be greater than or equal to 0", ""),
        ("checkpoint.keep_last", 0, "should be greater than 0", ""),
        ("model.params_dtype", "bfloat", "should be 'float32' or 'bfloat16'", "did you mean bfloat16?"),
        ("model.params_dtype", "float16", "should be 'float32' or 'bfloat16'", "did you mean bfloat16?"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: Any, reason: str, hint: str, files: RecipeFiles) -> None:
    recipe = files.rl()
    section, name = key.split(".")
    recipe.setdefault(section, {})[name] = value
    (fault,) = files.faults(recipe)
    assert (fault.key, fault.reason, fault.suggestion) == (key, reason, hint)


def test_a_wrong_value_in_a_section_inside_a_section_is_named_in_full(files: RecipeFiles) -> None:
    (fault,) = files.faults({**files.rl(), "loss": {"type": "gppo", "erc": {"erc_low": 2.0}}})
    assert (fault.key, fault.value, fault.reason) == ("loss.erc.erc_low", 2.0, "should be less than 1")
    (fault,) = files.faults({**files.rl(), "loss": {"type": "gppo", "erc": {"erc_lo": 0.2}}})
    assert (fault.key, fault.suggestion) == ("loss.erc.erc_lo", "did you mean loss.erc.erc_low?")
    (fault,) = files.faults({**files.rl(), "loss": {"type": "gppo", "erc": 3}})
    assert (fault.key, fault.reason) == ("loss.erc", "expected a section: lines `key: value` below it")


@pytest.mark.parametrize("section", ["optimizer", "loss", "eval"])
def test_a_section_must_be_a_section(section: str, files: RecipeFiles) -> None:
    (fault,) = files.faults({**files.rl(), section: 5})
    assert (fault.key, fault.value, fault.reason) == (section, 5, "expected a section: lines `key: value` below it")


def test_a_missing_section_names_the_settings_it_needs(files: RecipeFiles) -> None:
    recipe = {"rollout": None, "eval": None}
    faults = {str(fault) for fault in files.faults(recipe)}
    needed = ("run.output_dir", "model.hf_checkpoint", "optimizer.lr", "batch.global_batch_size", "data.prompt_data")
    needed += ("rollout.num_rollout", "rollout.rollout_batch_size", "reward.type")
    assert faults == {
        *(f"{key} = <not given>: needed, it has no default" for key in needed),
        "loss.type = <not given>: expected one of ppo, grpo, clip_higher, gppo, ce_gppo, cispo, gspo,"
        " package.module:function",
    }


def test_numbers_are_read_as_yaml_1_2(files: RecipeFiles) -> None:
    text = yaml.safe_dump(files.rl()).replace("lr: 0.001", "lr: 5e-5\n  adam_eps: 1E-9\n  weight_decay: 1.5e-2")
    recipe = load_recipe(files.write(text))
    assert (recipe.optimizer.lr, recipe.optimizer.adam_eps, recipe.optimizer.weight_decay) == (5e-5, 1e-9, 0.015)


@pytest.mark.parametrize("written", ["010", "1:30", "yes", "2024-13-45"])
def test_nothing_is_guessed(written: str, files: RecipeFiles) -> None:
    text = yaml.safe_dump(files.rl()).replace("global_batch_size: 8", f"global_batch_size: {written}")
    (fault,) = files.faults(text)
    assert (fault.key, fault.value) == ("batch.global_batch_size", written)


def test_a_key_given_twice_is_a_fault_with_both_lines(files: RecipeFiles) -> None:
    text = yaml.safe_dump(files.rl(), sort_keys=False)
    lines = text.splitlines()
    first = lines.index("  lr: 0.001") + 1
    lines.insert(first, "  lr: 0.1")
    faults = files.faults("\n".join([*lines, "loss: {type: ppo}", "loss: {}"]))
    assert [fault.key for fault in faults] == ["loss", "loss", "loss.type", "optimizer.lr"]
    assert str(faults[-1]) == (
        f"optimizer.lr = '0.1': given twice, on lines {first} and {first + 1} (keep one of them)"
    )


def test_an_alias_inside_its_own_anchor_ends(files: RecipeFiles) -> None:
    faults = files.faults("rollout: &again\n  num_rollout: *again\n")
    assert "rollout.num_rollout" in [fault.key for fault in faults]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds nothing; expected a mapping"),
        ("# only a comment", "holds nothing; expected a mapping"),
        ("- a\n- b", "holds a list; expected a mapping"),
        ("just text", "holds a str; expected a mapping"),
        ("run:\n  name: [a\nmodel: 3", "line 3, column 6: expected ',' or ']'"),
        ("run:\n\tname: a", "line 2, column 1: found character '\\t'"),
        ("run: !!python/object:os.system x", "line 1, column 6: could not determine a constructor"),
        ("run: !!int x", "invalid literal for int()"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("run: \x00", "unacceptable character"),
        ("? [a]\n: b", "line 1, column 3: found unhashable key"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_fault(text: str, reason: str, files: RecipeFiles) -> None:
    (fault,) = files.faults(text)
    assert (fault.key, fault.value) == ("recipe", str(files.folder / "recipe.yaml"))
    assert reason in fault.reason
    assert "\n" not in fault.reason


def test_a_file_that_is_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml': is not UTF-8 text"):
        load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match=r"no such file \(did you mean .*/recipe\.yaml\?\)"):
        load_recipe(tmp_path / "recipe.yml")
    with pytest.raises(ConfigError, match=r"no such file \(the folder .*/none does not exist either\)"):
        load_recipe(tmp_path / "none" / "recipe.yaml")
    with pytest.raises(ConfigError, match="is a folder; expected a YAML file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_dumped_recipe_loads_back_equal_and_holds_the_defaults(kind: str, files: RecipeFiles) -> None:
    recipe = load_recipe(files.write(files.rl() if kind == "rl" else files.sft()))
    text = dump_recipe(recipe)
    assert "adam_eps: 1.0e-08" in text
    assert load_recipe(files.write(text)) == recipe
    assert dump_recipe(load_recipe(files.write(text))) == text


def test_a_dumped_recipe_keeps_what_is_used(files: RecipeFiles) -> None:
    evaluation = {"prompt_data": str(files.folder / "eval.parquet")}
    base = {**files.rl(), "eval": evaluation, "export": {"hf_dir": "out/hf"}, "reward": {"type": "math"}}
    recipe = load_recipe(files.write(base))
    resolved = yaml.safe_load(dump_recipe(recipe))
    assert resolved["eval"]["max_response_len"] == 1024
    assert resolved["export"]["max_shard_bytes"] == 5 * 1024**3
    assert resolved["reward"]["num_workers"] == 2
    assert load_recipe(files.write(dump_recipe(recipe))) == recipe


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.one_of(
        st.text(),
        st.sampled_from(
            ["1e-6", "no", "null", "~", "1_0", ".5", "010", "a: b", "x #y", "\x85", "\u2028", "\u6a21", ""]
        ),
    )
)
def test_any_text_survives_a_dump(name: str, files: RecipeFiles) -> None:
    recipe = load_recipe(files.write(files.sft()))
    named = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
    path = files.folder / "dumped.yaml"
    path.write_text(dump_recipe(named), encoding="utf-8", newline="")
    assert load_recipe(path).run.name == name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rate=st.floats(min_value=0, max_value=1e300))
def test_any_number_survives_a_dump(rate: float, files: RecipeFiles) -> None:
    recipe = load_recipe(files.write(files.sft()), [f"optimizer.lr={rate!r}"])
    assert recipe.optimizer.lr == rate
    assert load_recipe(files.write(dump_recipe(recipe))) == recipe


def test_world_size_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world_size_from_env() is None
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert world_size_from_env() == 16
    for bad in ("", "0", "-2", "two"):
        monkeypatch.setenv("WORLD_SIZE", bad)
        with pytest.raises(ConfigError, match="expected a positive integer"):
            world_size_from_env()
