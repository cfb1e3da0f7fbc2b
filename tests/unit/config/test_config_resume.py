"""What may differ between the recipe of a checkpoint and the one that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_klear.config.base import Config
from megatron_klear.config.load import dump_recipe, load_recipe
from megatron_klear.config.recipe import Recipe
from megatron_klear.config.resume import load_saved_recipe, recipe_changes
from megatron_klear.errors import CheckpointError, Fault
from unit.config.config_files import RecipeFiles, change

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*/*.yaml"))
HOW = "give it back its old value, or allow it with checkpoint.allow_recipe_changes=true"

FREE = {
    "run": {"output_dir", "name", "tensorboard", "wandb_project"},
    "model": {"hf_checkpoint", "load", "random_init"},
    "parallel": {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "context_parallel_size",
        "expert_model_parallel_size",
        "moe_token_dispatcher_type",
        "sequence_parallel",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "use_distributed_optimizer",
        "distributed_timeout_minutes",
    },
    "batch": {"max_tokens_per_gpu"},
    "optimizer": {"optimizer_cpu_offload"},
    "eval": {"prompt_data", "eval_interval", "eval_before_train", "max_response_len"},
    "checkpoint": {
        "save",
        "save_interval",
        "async_save",
        "keep_last",
        "keep_every",
        "keep_best",
        "keep_best_metric",
        "keep_best_mode",
        "resume",
        "ckpt_step",
        "verify_checksums",
        "allow_recipe_changes",
        "overwrite",
    },
    "export": {"hf_dir", "max_shard_bytes"},
    "head": {"path", "chunk_bytes"},
    "health": {"max_train_rollout_logprob_abs_diff", "max_nonfinite_steps", "constant_reward_alarm_steps"},
}
FREE_BY_KIND = {
    "sft": {
        "": {"train_iters"},
        "data": {"path"},
        "reward": {"type", "correct", "incorrect", "format", "timeout_s", "num_workers"},
    },
    "rl": {
        "": {"servers"},
        "data": {"prompt_data"},
        "kl": {"ref_load"},
        "rollout": {"num_rollout", "max_running_requests", "engine"},
        "reward": {"timeout_s", "num_workers"},
        "debug": {"save_rollout_data"},
    },
}


def full(files: RecipeFiles, kind: str) -> Recipe:
    """A recipe with every section that may be absent."""
    changes = {"reward.type": "math", "optimizer.lr_decay_style": "linear", "optimizer.lr_decay_iters": 9}
    if kind == "rl":
        changes |= {"critic": {}, "advantage.type": "gae", "kl.kl_coef": 0.1, "loss.erc": {}}
    return load_saved_recipe(yaml.safe_dump(change(files.sft() if kind == "sft" else files.rl(), changes)))


def settings(config: Config, prefix: str = "") -> Iterator[str]:
    for name, value in config:
        if isinstance(value, Config):
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}, changed"


def altered(config: Any, key: str) -> Any:
    """With another value of one setting, whether or not it is a valid one."""
    name, _, below = key.partition(".")
    value = dict(config)[name]
    return config.model_copy(update={name: altered(value, below) if below else other(value)})


def value_of(config: Any, key: str) -> object:
    for name in key.split("."):
        config = dict(config)[name]
    return config


def with_changes(saved: dict[str, Any], changes: dict[str, Any]) -> list[Fault]:
    """Faults of the same recipe with changed settings."""
    before = load_saved_recipe(yaml.safe_dump(saved))
    return recipe_changes(before, load_saved_recipe(yaml.safe_dump(change(saved, changes))))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_every_setting_is_free_or_a_fault(kind: str, files: RecipeFiles) -> None:
    saved = full(files, kind)
    table = [*FREE.items(), *FREE_BY_KIND[kind].items()]
    free = {f"{section}.{name}".removeprefix(".") for section, names in table for name in names}
    keys = set(settings(saved))
    assert free < keys
    for key in keys:
        wanted = altered(saved, key)
        reason = f"was {value_of(saved, key)!r} when the checkpoint was saved"
        expected = [] if key in free else [Fault(key, value_of(wanted, key), reason, HOW)]
        found = recipe_changes(saved, wanted)
        if key == "optimizer.lr_decay_iters":  # Has words of its own, see below.
            assert [fault.key for fault in found] == [key]
        else:
            assert found == expected, key


def test_an_unchanged_recipe_has_no_changes(files: RecipeFiles) -> None:
    for kind in ("sft", "rl"):
        assert recipe_changes(full(files, kind), full(files, kind)) == []
    # 1 and 1.0 are the same reward, a default is the same as the value written out.
    assert with_changes(files.rl(), {"reward.correct": 1, "optimizer.clip_grad": 1.0}) == []


def test_a_fault_says_both_values_and_what_to_do(files: RecipeFiles) -> None:
    faults = with_changes(files.rl(), {"optimizer.lr": 0.5, "batch.global_batch_size": 4, "run.name": "again"})
    assert [str(fault) for fault in faults] == [
        f"batch.global_batch_size = 4: was 8 when the checkpoint was saved ({HOW})",
        f"optimizer.lr = 0.5: was 0.001 when the checkpoint was saved ({HOW})",
    ]


def test_a_recipe_of_the_other_kind_is_one_fault(files: RecipeFiles) -> None:
    (fault,) = recipe_changes(full(files, "sft"), full(files, "rl"))
    assert str(fault) == (
        "kind = 'rl': was sft when the checkpoint was saved (start a fresh run from its weights: model.load)"
    )
    (fault,) = recipe_changes(full(files, "rl"), full(files, "sft"))
    assert (fault.value, fault.reason) == ("sft", "was rl when the checkpoint was saved")


def test_a_section_that_comes_or_goes_is_one_fault(files: RecipeFiles) -> None:
    gae = {"advantage.type": "gae", "critic": {"lr": 0.5}}
    critic, advantage = with_changes(files.rl(), gae)[::-1]
    assert (critic.key, critic.reason) == ("critic", "was None when the checkpoint was saved")
    assert isinstance(critic.value, dict) and critic.value["lr"] == 0.5
    assert (advantage.key, advantage.value) == ("advantage.type", "gae")
    without = with_changes(change(files.rl(), gae), {"critic": None})
    assert [(fault.key, fault.value) for fault in without] == [("critic", None)]
    (erc,) = with_changes(files.rl(), {"loss.erc": {"erc_low": 0.1}})
    assert (erc.key, erc.value) == ("loss.erc", {"erc_low": 0.1, "erc_high": 0.05})


def test_another_loss_is_named_with_what_both_have(files: RecipeFiles) -> None:
    faults = with_changes(files.rl(), {"loss.type": "ppo", "loss.sft_loss_coef": 0.5})
    assert [(fault.key, fault.value) for fault in faults] == [("loss.sft_loss_coef", 0.5), ("loss.type", "ppo")]
    # Its eps_clip_high is nobody's change.
    (fault,) = with_changes(change(files.rl(), {"loss.type": "ppo"}), {"loss.type": "gppo"})
    assert fault.reason == "was 'ppo' when the checkpoint was saved"


def test_an_evaluation_may_come_and_go_in_sft(files: RecipeFiles) -> None:
    evaluation = {"eval.prompt_data": "eval.jsonl", "reward.type": "math"}
    assert with_changes(files.sft(), evaluation) == []
    assert with_changes(change(files.sft(), evaluation), {"eval": {}, "reward": None}) == []


LINEAR = {"optimizer.lr_decay_style": "linear"}
DECAY, UPDATES = "optimizer.lr_decay_iters", "train_iters"


@pytest.mark.parametrize(
    ("saved", "wanted", "fault"),
    [
        # The rate is constant: how long does not matter.
        ({}, {UPDATES: 20}, None),
        # The decay ends where training does.
        (LINEAR, {UPDATES: 20}, (UPDATES, 20, 10)),
        ({"optimizer.lr_decay_style": "cosine"}, {UPDATES: 5}, (UPDATES, 5, 10)),
        (LINEAR, {DECAY: 15}, (DECAY, 15, 10)),
        (LINEAR, {DECAY: 15, UPDATES: 15}, (DECAY, 15, 10)),
        (LINEAR | {DECAY: 7}, {DECAY: None}, (DECAY, 10, 7)),
        (LINEAR | {DECAY: 7}, {DECAY: None, UPDATES: 20}, (DECAY, 20, 7)),
        # It ends where it ended.
        (LINEAR, {DECAY: 10, UPDATES: 20}, None),
        (LINEAR | {DECAY: 7}, {UPDATES: 20}, None),
        (LINEAR | {DECAY: 7}, {DECAY: None, UPDATES: 7}, None),
    ],
)
def test_the_decay_of_sft_is_compared_by_its_length(
    saved: dict[str, Any], wanted: dict[str, Any], fault: tuple[str, int, int] | None, files: RecipeFiles
) -> None:
    found = with_changes(change(files.sft(), saved), wanted)
    if fault is None:
        assert found == []
        return
    key, after, before = fault
    reason = f"was {before} when the checkpoint was saved, and the learning rate decays over it"
    how = "or allow it with checkpoint.allow_recipe_changes=true"
    assert found == [Fault(key, after, reason, f"keep the old decay with {DECAY}={before}, {how}")]


def test_the_decay_of_rl_is_the_one_given(files: RecipeFiles) -> None:
    decaying = change(files.rl(), LINEAR | {DECAY: 7})
    assert with_changes(decaying, {"rollout.num_rollout": 50}) == []
    (fault,) = with_changes(decaying, {DECAY: 8})
    assert (fault.key, fault.value) == (DECAY, 8)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_decay_that_comes_or_goes_is_its_style(kind: str, files: RecipeFiles) -> None:
    recipe = files.sft() if kind == "sft" else files.rl()
    found = with_changes(recipe, LINEAR | {DECAY: 7})
    assert [(fault.key, fault.value) for fault in found] == [("optimizer.lr_decay_style", "linear")]
    found = with_changes(recipe, {"optimizer.lr_decay_style": "constant", DECAY: None})
    assert [(fault.key, fault.value) for fault in found] == [("optimizer.lr_decay_style", "constant")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_survives_being_saved(path: Path) -> None:
    recipe = load_saved_recipe(path.read_text(encoding="utf-8"))
    saved = load_saved_recipe(dump_recipe(recipe))
    assert saved == recipe
    assert recipe_changes(saved, recipe) == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resume": True, "ckpt_step": 0, "verify_checksums": False, "allow_recipe_changes": True},
        {"resume": "auto"},
        {"save": "elsewhere", "save_interval": 3, "async_save": True, "keep_last": 2, "keep_every": 6},
        {"save_interval": 3, "keep_last": 1, "keep_best": 2, "keep_best_metric": "train/x", "keep_best_mode": "min"},
        {"overwrite": True},
    ],
)
def test_checkpoint_settings_survive_being_saved(changes: dict[str, Any], files: RecipeFiles) -> None:
    recipe = load_recipe(files.write({**files.rl(), "checkpoint": changes}))
    assert load_saved_recipe(dump_recipe(recipe)) == recipe
    assert load_recipe(files.write(dump_recipe(recipe))) == recipe
    assert {name: dict(recipe.checkpoint)[name] for name in changes} == changes


def test_a_saved_recipe_may_name_what_is_gone_and_a_layout_that_no_longer_fits(files: RecipeFiles) -> None:
    gone = {"data.prompt_data": "gone.jsonl", "model.hf_checkpoint": "gone", "model.load": "gone"}
    recipe = change(files.rl(), gone | {"parallel.tensor_model_parallel_size": 7})
    saved = load_saved_recipe(yaml.safe_dump(recipe))
    assert (saved.model.hf_checkpoint, saved.parallel.tensor_model_parallel_size) == ("gone", 7)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"optimizer.lookahead": 3}, ["optimizer.lookahead = 3: no such key"]),
        (
            {"swarm": {"size": 2}, "batch.global_batch_size": "many"},
            ["batch.global_batch_size = 'many': should be a valid integer", "swarm = {'size': 2}: no such key"],
        ),
        ({"optimizer": {}}, ["optimizer.lr = <not given>: needed, it has no default"]),
        ({"rollout": {}}, ["train_iters = 10: a recipe with `rollout` is rl, one with `train_iters` is sft"]),
    ],
)
def test_a_saved_recipe_of_another_version_is_refused(
    changes: dict[str, Any], problems: list[str], files: RecipeFiles
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_saved_recipe(yaml.safe_dump(change(files.sft(), changes)))
    first, *found, last = str(caught.value).splitlines()
    assert first == "the recipe saved with the checkpoint cannot be read by this version of megatron-klear"
    assert last == "  resume with the version that saved it, or start a fresh run from its weights with model.load"
    for line, problem in zip(found, problems, strict=True):
        assert line.startswith(f"  {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not the YAML of a recipe: holds nothing; expected a mapping"),
        ("run: [", "not the YAML of a recipe: line 1, column 7"),
        ("- 1", "not the YAML of a recipe: holds a list"),
    ],
)
def test_a_saved_recipe_that_is_broken_is_refused(text: str, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_saved_recipe(text)
    assert f"\n  {problem}" in str(caught.value)


def test_a_saved_recipe_with_a_key_twice_is_refused(files: RecipeFiles) -> None:
    text = yaml.safe_dump(files.sft()) + "train_iters: 11\n"
    with pytest.raises(CheckpointError, match=r"train_iters = '11': given twice, on lines \d+ and \d+"):
        load_saved_recipe(text)
    with pytest.raises(
        CheckpointError, match=r"run = '{...}': given twice[^\n]*\n  train_iters = <not given>: a recipe"
    ):
        load_saved_recipe("run: {}\nrun: {}\n")
