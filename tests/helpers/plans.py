"""Recipes to plan for: Qwen3 shapes as published, without weights or data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from megatron_klear.config.model import Qwen3Shape

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}

RECIPE = """
run: {{output_dir: runs/plan}}
model: {{hf_checkpoint: {model}}}
data: {{prompt_data: not/here.jsonl, max_prompt_len: 4096}}
rollout: {{num_rollout: 10, rollout_batch_size: 256, n_samples_per_prompt: 8, rollout_max_response_len: 32768}}
loss: {{type: gppo, sft_loss_coef: 0.1}}
reward: {{type: math}}
optimizer: {{lr: 1.0e-6}}
batch: {{global_batch_size: 128, max_tokens_per_gpu: 36864}}
parallel: {{tensor_model_parallel_size: 4, sequence_parallel: true, recompute_granularity: full}}
"""

SFT_RECIPE = """
run: {{output_dir: runs/plan}}
model: {{hf_checkpoint: {model}}}
data: {{path: not/here.jsonl, max_length: 32768}}
train_iters: 100
optimizer: {{lr: 1.0e-6}}
batch: {{global_batch_size: 64, max_tokens_per_gpu: 32768}}
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    """A recipe beside the config.json it names."""
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    path = folder / "recipe.yaml"
    path.write_text(text.format(model=folder))
    return path


def shape_8b(**changes: Any) -> Qwen3Shape:
    """Qwen3-8B, or what differs from it."""
    return Qwen3Shape(**{**QWEN3_8B, **changes})


class ExpertShape(Qwen3Shape):
    """A Qwen3-MoE, every layer with experts."""

    model_type: Literal["qwen3", "qwen3_moe"] = "qwen3_moe"  # type: ignore[assignment]
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Experts and a router where a dense model has its MLP."""
        hidden, wide = self.hidden_size, self.moe_intermediate_size
        names: dict[str, tuple[int, ...]] = {}
        dense = Qwen3Shape(**{**self.model_dump(include=set(QWEN3_8B)), "model_type": "qwen3"})
        for name, shape in dense.tensor_shapes().items():
            prefix, mlp, _ = name.partition("mlp.")
            if not mlp:
                names[name] = shape
            elif name.endswith("mlp.gate_proj.weight"):
                names[f"{prefix}mlp.gate.weight"] = (self.num_experts, hidden)
                for i in range(self.num_experts):
                    names |= {f"{prefix}mlp.experts.{i}.{p}_proj.weight": (wide, hidden) for p in ("gate", "up")}
                    names[f"{prefix}mlp.experts.{i}.down_proj.weight"] = (hidden, wide)
        return names
