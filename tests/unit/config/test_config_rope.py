"""One rope from whatever a config.json says, or a recipe asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_klear.config.check import describe
from megatron_klear.config.load import load_recipe
from megatron_klear.config.model import ModelConfig, model_shape, read_shape
from megatron_klear.config.resume import recipe_changes
from megatron_klear.config.rope import RopeConfig
from megatron_klear.errors import CheckpointError
from unit.config.config_files import RecipeFiles, change

YARN = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 512}
PLAIN_YARN = RopeConfig(rope_type="yarn", rope_theta=5000, factor=2.5, original_max_position_embeddings=512)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({}, RopeConfig(rope_theta=10000)),
        ({"rope_theta": 5000}, RopeConfig(rope_theta=5000)),
        ({"rope_theta": 5000, "rope_scaling": None}, RopeConfig(rope_theta=5000)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000}}, RopeConfig(rope_theta=5000)),
        ({"rope_parameters": {"rope_theta": 5000}}, RopeConfig(rope_theta=5000)),
        ({"rope_parameters": None, "rope_theta": 5000}, RopeConfig(rope_theta=5000)),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5000.0}, RopeConfig(rope_theta=5000)),
        ({"rope_parameters": {**YARN, "rope_theta": 5000}}, PLAIN_YARN),
        ({"rope_scaling": YARN, "rope_theta": 5000}, PLAIN_YARN),
        ({"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 5000}, PLAIN_YARN),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            RopeConfig(rope_type="yarn", factor=4, original_max_position_embeddings=2048),
        ),
        (
            {"rope_scaling": {**YARN, "rope_theta": 5000}, "rope_parameters": {**YARN, "rope_theta": 5000}},
            PLAIN_YARN,
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 30, "beta_slow": 2, "truncate": False}},
            RopeConfig(**{**YARN, "attention_factor": 1.5, "beta_fast": 30, "beta_slow": 2, "truncate": False}),
        ),
    ],
    ids=str,
)
def test_every_form_of_config_json_is_read(files: RecipeFiles, config: dict[str, Any], rope: RopeConfig) -> None:
    shape = read_shape(files.model(**config))
    assert shape.rope == rope
    # And what is written from it is read as the same, by either form alone too.
    written = rope.to_hf()
    assert read_shape(files.model(**written)).rope == rope
    assert read_shape(files.model(rope_parameters=written["rope_parameters"])).rope == rope
    old = {key: written[key] for key in ("rope_theta", "rope_scaling")}
    assert read_shape(files.model(**old)).rope == rope


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_theta": 1}, "rope.rope_theta: Input should be greater than 1, got 1"),
        ({"rope_theta": "big"}, "rope.rope_theta: Input should be a valid number"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope.rope_type: Input should be 'default' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope.rope_type: Input should be 'default' or 'yarn'"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "rope.type: Extra inputs are not permitted"),
        ({"rope_scaling": {**YARN, "beta": 3}}, "rope.beta: Extra inputs are not permitted, got 3"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "rope.factor: Input should be greater than or equal to 1"),
        (
            {"rope_scaling": {**YARN, "factor": None}},
            "rope_type yarn needs factor and original_max_position_embeddings",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_fast 1.0 is below beta_slow 2.0"),
        ({"rope_scaling": {"factor": 4}}, "factor would have no effect with rope_type default; expected yarn"),
        ({"rope_scaling": "yarn"}, "rope: Input should be a valid dictionary or instance of RopeConfig, got 'yarn'"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5000}},
            "two ropes that differ: rope_parameters = {'rope_theta': 5000}; rope_scaling = {'rope_type': 'yarn'",
        ),
        (
            {"rope_theta": 7000, "rope_parameters": {"rope_theta": 5000}},
            "rope_theta 7000 beside {'rope_theta': 5000}, which holds another one; expected only one of them",
        ),
    ],
    ids=str,
)
def test_a_rope_that_cannot_be_run_is_named(files: RecipeFiles, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_shape(files.model(**config))
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{files.folder}/other-model/config.json does not describe")


def test_scaling_of_attention() -> None:
    assert RopeConfig().attention_scaling == 1.0
    assert PLAIN_YARN.attention_scaling == pytest.approx(1.0916290731874155)
    assert PLAIN_YARN.model_copy(update={"attention_factor": 2.0}).attention_scaling == 2.0
    both = PLAIN_YARN.model_copy(update={"mscale": 1.0, "mscale_all_dim": 0.5})
    assert both.attention_scaling == pytest.approx(1.0916290731874155 / 1.0458145365937078)


@pytest.mark.parametrize(
    ("config", "settings", "original", "positions"),
    [
        ({"max_position_embeddings": 40960}, {"yarn_factor": 2.5}, 40960, 102400),
        (
            {"max_position_embeddings": 40960},
            {"yarn_factor": 2.5, "yarn_original_max_position_embeddings": 32768},
            32768,
            81920,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": YARN}, {"yarn_factor": 4}, 512, 2048),
        (
            {"rope_scaling": {**YARN, "attention_factor": 9.0}},
            {"yarn_factor": 2, "yarn_original_max_position_embeddings": 100},
            100,
            200,
        ),
    ],
    ids=str,
)
def test_a_recipe_stretches_the_context(
    files: RecipeFiles, config: dict[str, Any], settings: dict[str, Any], original: int, positions: int
) -> None:
    folder = files.model(rope_theta=5000, **config)
    shape = model_shape(ModelConfig(hf_checkpoint=folder, **settings))
    assert shape.rope == RopeConfig(
        rope_type="yarn",
        rope_theta=5000,
        factor=settings["yarn_factor"],
        original_max_position_embeddings=original,
    )
    assert shape.max_position_embeddings == positions
    plain = read_shape(folder)
    assert shape.model_copy(update={"rope": plain.rope, "max_position_embeddings": 0}) == plain.model_copy(
        update={"max_position_embeddings": 0}
    )
    assert model_shape(ModelConfig(hf_checkpoint=folder)) == plain


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.0, float("inf"), float("nan")])
def test_a_factor_that_stretches_nothing_is_refused(factor: float) -> None:
    with pytest.raises(ValidationError, match="yarn_factor"):
        ModelConfig(hf_checkpoint="x", yarn_factor=factor)


def test_the_limits_of_a_recipe_are_the_stretched_ones(files: RecipeFiles) -> None:
    lengths = {"data.max_length": 2500, "batch.max_tokens_per_gpu": 4000}
    (fault,) = files.faults(change(files.sft(), lengths))
    assert fault.reason == "more than the model's max_position_embeddings 2048"
    recipe = load_recipe(files.write(change(files.sft(), {**lengths, "model.yarn_factor": 1.5})))
    assert "2500 tokens of 4000 a micro-batch and 3072 positions (YaRN, 1.5 x 2048)" in describe(recipe)


def test_an_original_context_without_a_factor_is_a_fault(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.sft(), {"model.yarn_original_max_position_embeddings": 64}))
    assert fault.key == "model.yarn_original_max_position_embeddings"
    assert fault.reason == "would have no effect without model.yarn_factor"


def test_a_run_does_not_go_on_with_another_factor(files: RecipeFiles) -> None:
    before = load_recipe(files.write(files.sft()))
    after = load_recipe(files.write(change(files.sft(), {"model.yarn_factor": 2.0})))
    (fault,) = recipe_changes(before, after)
    assert (fault.key, fault.reason) == ("model.yarn_factor", "was None when the checkpoint was saved")


def test_a_model_without_a_rope_in_its_config_has_the_default_one(tmp_path: Path, files: RecipeFiles) -> None:
    config = json.loads((Path(files.model()) / "config.json").read_text())
    assert "rope_theta" not in config and "rope_parameters" not in config
    assert read_shape(files.model()).rope == RopeConfig()
