"""A recipe that stretches the context: trainer, engine and export turn by the same angles."""

from __future__ import annotations

from transformers import AutoConfig

from e2e.runs import Bench
from megatron_klear.config.model import ModelConfig, model_shape, read_shape

DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def test_trainer_engine_and_export_share_the_stretched_rope(sft: Bench) -> None:
    # 8 positions as the original context: most of every sample lies beyond it.
    settings = {"yarn_factor": 2.5, "yarn_original_max_position_embeddings": 8}
    changes = {"rollout.rollout_max_response_len": 6, "data.max_prompt_len": 14}
    recipe = sft.recipe("rl", "rl_yarn", {**changes, **{f"model.{name}": value for name, value in settings.items()}})
    sft.succeed("rl", recipe)
    lines = sft.metrics("rl_yarn")
    assert len(lines) == 3
    # A step whose groups all have no spread trains nothing.
    differences = [line[DIFFERENCE] for line in lines if DIFFERENCE in line]
    assert len(differences) > 0 and max(differences) < 1e-4
    out, model = sft.folder / "rl_yarn" / "hf", sft.folder / "data" / "model"
    shape = model_shape(ModelConfig(hf_checkpoint=str(model), **settings))
    assert read_shape(out) == shape and read_shape(model).rope != shape.rope
    config = AutoConfig.from_pretrained(out)
    assert config.max_position_embeddings == 20
    assert config.rope_parameters == shape.rope.to_hf()["rope_parameters"]
