"""The model of a recipe and its shape, read from a Hugging Face config.json without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_klear.config.base import Config
from megatron_klear.errors import CheckpointError


class ModelConfig(Config):
    """Which model, and where its first weights come from."""

    hf_checkpoint: str
    """Hugging Face folder: config.json and tokenizer files; weights too, unless `load` or `random_init` is given."""
    load: str | None = None
    """Megatron checkpoint folder (the parent of iter_*) whose weights, and nothing else, start this run."""
    random_init: bool = False
    """Start from random weights (std `initializer_range` of config.json) instead of the folder's."""
    params_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations. With bfloat16 the optimizer keeps float32 main weights."""


class Qwen3Shape(BaseModel):
    """Shape of a dense Qwen3, under Hugging Face's names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["qwen3"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(default=128, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    rope_scaling: None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint of this shape holds, under Hugging Face names, in Hugging Face's order."""
        names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_hidden_layers):
            names |= {f"model.layers.{i}.{name}.weight": shape for name, shape in self._layer_shapes().items()}
        names["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            names["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return names

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, dim, wide = self.hidden_size, self.head_dim, self.intermediate_size
        q_rows, kv_rows = self.num_attention_heads * dim, self.num_key_value_heads * dim
        return {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "self_attn.o_proj": (hidden, q_rows),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }


def _flatten_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Newer transformers write {"rope_parameters": {"rope_type", "rope_theta", ...}}, older ones top-level keys."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict):
        return raw
    flat = {**raw, "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0))}
    if rope.get("rope_type", "default") != "default":
        flat["rope_scaling"] = rope
    return flat


def read_shape(hf_checkpoint: str | Path) -> Qwen3Shape:
    """Read a Qwen3 shape from a Hugging Face folder. Raises `CheckpointError` naming the file and each wrong field."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist; hf_checkpoint must be a Hugging Face model folder with a config.json"
        )
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}; expected a JSON object")
    try:
        shape = Qwen3Shape(**_flatten_rope(raw))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e.get('input')!r}" for e in error.errors()
        )
        raise CheckpointError(f"{path} does not describe a dense Qwen3 that this version can run: {faults}") from error
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {shape.num_attention_heads} is not a multiple of"
            f" num_key_value_heads {shape.num_key_value_heads}"
        )
    return shape
