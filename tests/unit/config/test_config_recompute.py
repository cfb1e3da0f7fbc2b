"""What is said of recompute settings that cannot work or do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_klear.config.load import dump_recipe, load_recipe
from unit.config.config_files import RecipeFiles, change

# The model has 6 layers.
PP2 = {"pipeline_model_parallel_size": 2}
UNEVEN = {**PP2, "num_layers_in_first_pipeline_stage": 2}
CHUNKS = {**PP2, "virtual_pipeline_model_parallel_size": 3}


def recipe(files: RecipeFiles, settings: dict[str, Any]) -> dict[str, Any]:
    return change(files.sft(), {f"parallel.{key}": value for key, value in settings.items()})


def faults(files: RecipeFiles, settings: dict[str, Any]) -> list[str]:
    return [str(fault) for fault in files.faults(recipe(files, settings))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 3},
        {"num_layers": 6},
        {**PP2, "num_layers": 3},
        {**UNEVEN, "num_layers": 2},
        {**UNEVEN, "method": "block", "num_layers": 4},
        {**CHUNKS, "num_layers": 1},
        {"method": "block", "num_layers": 5},
    ],
    ids=str,
)
def test_full_recompute_of_layers_that_are_there(settings: dict[str, Any], files: RecipeFiles) -> None:
    names = {"method": "recompute_method", "num_layers": "recompute_num_layers"}
    renamed = {names.get(key, key): value for key, value in settings.items()}
    assert faults(files, {"recompute_granularity": "full", **renamed}) == []


@pytest.mark.parametrize(
    ("layout", "method", "num_layers", "message"),
    [
        ({}, "uniform", 4, "does not divide what is there: the model's 6 layers (numbers that fit: 1, 2, 3, 6)"),
        ({}, "uniform", 7, "does not divide what is there: the model's 6 layers (numbers that fit: 1, 2, 3, 6)"),
        (PP2, "uniform", 2, "does not divide what is there: 6 layers in 2 stages, each of 3 (numbers that fit: 1, 3)"),
        (UNEVEN, "uniform", 4, "does not divide what is there: 6 layers in 2 stages, each of 2 or 4 ("),
        ({}, "block", 7, "is more than there are: the model's 6 layers (at most 6)"),
        (PP2, "block", 4, "is more than there are: 6 layers in 2 stages, each of 3 (at most 3)"),
        (CHUNKS, "block", 2, "is more than there are: 6 layers in 6 chunks, each of 1 (at most 1)"),
    ],
)
def test_full_recompute_of_more_layers_than_there_are(
    layout: dict[str, Any], method: str, num_layers: int, message: str, files: RecipeFiles
) -> None:
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }
    (fault,) = faults(files, {**layout, **recompute})
    assert fault.startswith(f"parallel.recompute_num_layers = {num_layers}: {message}")


def test_an_impossible_layout_is_not_blamed_on_recompute(files: RecipeFiles) -> None:
    layout = {"pipeline_model_parallel_size": 4, "recompute_granularity": "full"}
    assert not any("recompute" in fault for fault in faults(files, layout))


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"recompute_method": "block"}, "recompute_method = 'block'"),
        ({"recompute_num_layers": 2}, "recompute_num_layers = 2"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules = ('mlp',)"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recompute_method = 'block'"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "recompute_num_layers = 1"),
        ({"recompute_granularity": "full", "recompute_modules": ["mlp"]}, "recompute_modules = ('mlp',)"),
    ],
    ids=str,
)
def test_settings_without_effect(settings: dict[str, Any], unused: str, files: RecipeFiles) -> None:
    (fault,) = faults(files, settings)
    needed = "selective" if "modules" in unused else "full"
    reason = f"would have no effect without parallel.recompute_granularity {needed} (leave it out)"
    assert fault == f"parallel.{unused}: {reason}"


@pytest.mark.parametrize("modules", [[], ["embedding"], ["core_attn", "moe"]], ids=str)
def test_modules_that_cannot_be_recomputed(modules: list[str], files: RecipeFiles) -> None:
    (fault,) = faults(files, {"recompute_granularity": "selective", "recompute_modules": modules})
    assert fault.startswith("parallel.recompute_modules")


def test_a_recipe_with_modules_loads_back_from_its_dump(files: RecipeFiles) -> None:
    settings = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    loaded = load_recipe(files.write(recipe(files, settings)))
    assert loaded.parallel.recompute_modules == ("mlp", "layernorm")
    assert load_recipe(files.write(dump_recipe(loaded))) == loaded
