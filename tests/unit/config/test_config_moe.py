"""config.json of a Qwen3-MoE, and the rules that concern experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_klear.config.check import describe, num_parameters
from megatron_klear.config.load import load_recipe
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.errors import CheckpointError
from unit.config.config_files import SHAPE, RecipeFiles, change

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}


def read(folder: Path, **changes: Any) -> Qwen3Shape:
    config = {name: value for name, value in {**SHAPE, **EXPERTS, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_old_and_new_configs_are_read(key: str, tmp_path: Path) -> None:
    shape = read(tmp_path, **{"num_experts": "absent", key: 16})
    assert (shape.num_experts, shape.num_experts_per_tok, shape.moe_intermediate_size) == (16, 2, 40)
    assert shape.norm_topk_prob and shape.is_moe and shape.moe_layers == (True,) * 6


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"mlp_only_layers": [0, 4]}, (False, True, True, True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True, False, True)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (False, False, True, False, False, False)),
        ({"mlp_only_layers": None}, (True,) * 6),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[bool, ...], tmp_path: Path) -> None:
    assert read(tmp_path, **changes).moe_layers == layers


def test_a_dense_config_with_words_on_experts_stays_dense(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="qwen3")
    assert not shape.is_moe and not any(".experts." in name for name in shape.tensor_shapes())


def test_tensor_names_and_shapes(tmp_path: Path) -> None:
    shapes = read(tmp_path, mlp_only_layers=[0]).tensor_shapes()
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (96, 64)
    assert shapes["model.layers.1.mlp.gate.weight"] == (8, 64)
    assert shapes["model.layers.1.mlp.experts.7.gate_proj.weight"] == (40, 64)
    assert shapes["model.layers.1.mlp.experts.7.up_proj.weight"] == (40, 64)
    assert shapes["model.layers.1.mlp.experts.7.down_proj.weight"] == (64, 40)
    assert "model.layers.1.mlp.up_proj.weight" not in shapes and "model.layers.0.mlp.gate.weight" not in shapes
    assert sum(".experts." in name for name in shapes) == 5 * 8 * 3


def test_parameters_of_qwen3_30b_a3b(tmp_path: Path) -> None:
    """Its config.json, and the number of parameters that its model card states (30.5B)."""
    shape = read(
        tmp_path,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    assert num_parameters(shape) == sum(math.prod(size) for size in shape.tensor_shapes().values()) == 30_532_122_624


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": "absent"}, "a qwen3_moe needs num_experts > 0"),
        ({"moe_intermediate_size": 0}, "a qwen3_moe needs moe_intermediate_size > 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to num_experts 8, got 9"),
        ({"num_experts_per_tok": "absent"}, "num_experts_per_tok must be 1 to num_experts 8, got 0"),
        ({"num_experts_per_tok": 1}, "makes every expert's weight 1, so no router can learn"),
        ({"mlp_only_layers": list(range(6))}, "none of the 6 layers has experts"),
        ({"decoder_sparse_step": 7}, "none of the 6 layers has experts"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read(tmp_path, **changes)


def moe_recipe(files: RecipeFiles, *, changes: dict[str, Any] | None = None, **shape: Any) -> dict[str, Any]:
    model = {"model.hf_checkpoint": files.model(**{**EXPERTS, **shape})}
    return change(files.sft(), model | (changes or {}))


def test_a_faultless_recipe(files: RecipeFiles) -> None:
    layout = {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.expert_model_parallel_size": 4,
        "parallel.moe_token_dispatcher_type": "allgather",
        "model.moe_aux_loss_coeff": 1e-3,
    }
    assert files.faults(moe_recipe(files, changes=layout), world_size=8) == []


@pytest.mark.parametrize(
    ("changes", "reason", "suggestion"),
    [
        ({"parallel.expert_model_parallel_size": 3}, "does not divide num_experts 8", "1, 2, 4, 8"),
        ({"parallel.tensor_model_parallel_size": 2}, "tokens must be split over the tensor ranks", "set it to true"),
    ],
)
def test_a_layout_that_experts_do_not_fit(
    changes: dict[str, Any], reason: str, suggestion: str, files: RecipeFiles
) -> None:
    (fault,) = files.faults(moe_recipe(files, changes=changes))
    assert reason in fault.reason and suggestion in fault.suggestion


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        ({}, 6, "does not divide the 6 ranks of a pipeline stage (6 ranks / 1 stages)"),
        (
            {"parallel.pipeline_model_parallel_size": 2},
            4,
            "does not divide the 2 ranks of a pipeline stage (4 ranks / 2 stages)",
        ),
    ],
)
def test_experts_are_shared_within_a_stage(
    changes: dict[str, Any], world_size: int, reason: str, files: RecipeFiles
) -> None:
    recipe = moe_recipe(files, changes=changes | {"parallel.expert_model_parallel_size": 4})
    assert files.faults(recipe) == []
    (fault,) = files.faults(recipe, world_size=world_size)
    assert fault.key == "parallel.expert_model_parallel_size" and reason in fault.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.expert_model_parallel_size": 2},
        {"parallel.moe_token_dispatcher_type": "allgather"},
        {"model.moe_aux_loss_coeff": 0.01},
    ],
)
def test_settings_of_experts_need_experts(changes: dict[str, Any], files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.sft(), changes))
    ((key, value),) = changes.items()
    assert (fault.key, fault.value) == (key, value)
    assert fault.reason == "would have no effect: the model is a qwen3, which has no experts"


def test_the_dense_width_of_a_model_without_dense_layers_need_not_divide(files: RecipeFiles) -> None:
    layout = {"parallel.tensor_model_parallel_size": 4, "parallel.sequence_parallel": True}
    assert files.faults(moe_recipe(files, changes=layout, intermediate_size=97)) == []
    (fault,) = files.faults(moe_recipe(files, changes=layout, intermediate_size=97, mlp_only_layers=[1]))
    assert "does not divide intermediate_size 97" in fault.reason and fault.suggestion.endswith(": 1")


def test_check_says_how_many_experts(files: RecipeFiles) -> None:
    recipe = load_recipe(files.write(moe_recipe(files, mlp_only_layers=[1])), [])
    assert "8 experts of 40, 2 a token, 1 layers with one MLP of 96, vocabulary" in describe(recipe)
