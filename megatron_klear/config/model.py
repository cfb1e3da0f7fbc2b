"""The model of a recipe and its shape, read from a Hugging Face config.json without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_klear.config.base import Config, NonNegativeFloat, PositiveInt
from megatron_klear.config.rope import RopeConfig, gather_rope
from megatron_klear.errors import CheckpointError

# Vocabulary rows are padded so that each tensor-parallel rank holds a multiple of this many.
VOCAB_ROWS_MULTIPLE = 16


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Vocabulary size that splits evenly into multiples of VOCAB_ROWS_MULTIPLE rows a rank."""
    multiple = VOCAB_ROWS_MULTIPLE * tensor_size
    return math.ceil(vocab_size / multiple) * multiple


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
    yarn_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Stretch the context by YaRN to this many times the original one, in training, generation and the export, in place
    of what config.json says. The paper's 64K evaluation: 2.5 of 32768 positions, which makes 81920."""
    yarn_original_max_position_embeddings: PositiveInt | None = None
    """What `yarn_factor` multiplies; if null, config.json's, by YaRN's own name or else its max_position_embeddings
    (40960 for Qwen3, which was trained on 32768)."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a Qwen3-MoE; config.json's router_aux_loss_coef is not looked at."""


class Qwen3Shape(BaseModel):
    """Shape of a Qwen3 or a Qwen3-MoE, under Hugging Face's names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["qwen3", "qwen3_moe"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(default=128, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: RopeConfig = RopeConfig()
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    # Read for a qwen3_moe alone. transformers writes num_local_experts since version 5.
    num_experts: int = Field(default=0, ge=0, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(default=1, gt=0)
    mlp_only_layers: tuple[int, ...] = ()

    _one_rope = model_validator(mode="before")(gather_rope)

    @property
    def is_moe(self) -> bool:
        """True if at least one layer has experts."""
        return any(self.moe_layers)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer whether it has experts, instead of one MLP."""
        return tuple(
            self.model_type == "qwen3_moe" and i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
            for i in range(self.num_hidden_layers)
        )

    @property
    def routing(self) -> tuple[int, bool]:
        """What of a router no tensor's shape shows: experts a token takes, and whether their weights add up to 1."""
        return (self.num_experts_per_tok, self.norm_topk_prob) if self.is_moe else (0, False)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint of this shape holds, under Hugging Face names, in Hugging Face's order."""
        names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for i, is_moe in enumerate(self.moe_layers):
            shapes = self._attention_shapes() | (self._moe_shapes() if is_moe else self._mlp_shapes())
            names |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
        names["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            names["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return names

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """And the norms."""
        hidden, dim = self.hidden_size, self.head_dim
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
        }

    def _mlp_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, wide = self.hidden_size, self.intermediate_size
        return {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}

    def _moe_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, wide = self.hidden_size, self.moe_intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (self.num_experts, hidden)}
        for i in range(self.num_experts):
            shapes |= {f"mlp.experts.{i}.{name}_proj": (wide, hidden) for name in ("gate", "up")}
            shapes[f"mlp.experts.{i}.down_proj"] = (hidden, wide)
        return shapes


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
        shape = Qwen3Shape(**{name: value for name, value in raw.items() if (name, value) != ("mlp_only_layers", None)})
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e.get('input')!r}" if e["loc"] else e["msg"]
            for e in error.errors()
        )
        raise CheckpointError(f"{path} does not describe a Qwen3 that this version can run: {faults}") from error
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {shape.num_attention_heads} is not a multiple of"
            f" num_key_value_heads {shape.num_key_value_heads}"
        )
    _check_experts(shape, path)
    return shape


def model_shape(model: ModelConfig) -> Qwen3Shape:
    """The shape of a recipe's model: its folder's, with the recipe's own rope. Raises `CheckpointError`."""
    shape = read_shape(model.hf_checkpoint)
    if model.yarn_factor is None:
        return shape
    original = (
        model.yarn_original_max_position_embeddings
        or shape.rope.original_max_position_embeddings
        or shape.max_position_embeddings
    )
    rope = shape.rope.stretched(model.yarn_factor, original)
    return shape.model_copy(update={"rope": rope, "max_position_embeddings": int(original * model.yarn_factor)})


def _check_experts(shape: Qwen3Shape, path: Path) -> None:
    if shape.model_type != "qwen3_moe":
        return
    for name, size in (("num_experts", shape.num_experts), ("moe_intermediate_size", shape.moe_intermediate_size)):
        if size == 0:
            raise CheckpointError(f"{path}: a qwen3_moe needs {name} > 0, got none or 0")
    if not 0 < shape.num_experts_per_tok <= shape.num_experts:
        raise CheckpointError(
            f"{path}: num_experts_per_tok must be 1 to num_experts {shape.num_experts}, got {shape.num_experts_per_tok}"
        )
    if shape.num_experts_per_tok == 1 and shape.norm_topk_prob:
        raise CheckpointError(
            f"{path}: norm_topk_prob with num_experts_per_tok 1 makes every expert's weight 1, so no router can learn;"
            " expected norm_topk_prob false or more experts a token"
        )
    if not shape.is_moe:
        raise CheckpointError(
            f"{path}: none of the {shape.num_hidden_layers} layers has experts (mlp_only_layers"
            f" {list(shape.mlp_only_layers)}, decoder_sparse_step {shape.decoder_sparse_step});"
            " a model without experts has model_type qwen3"
        )
