"""A Qwen3 small enough for a test, with every tensor random: norm weights of one would hide swapped norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.rope import RopeConfig


def tiny_shape(tied: bool, vocab_size: int = 61) -> Qwen3Shape:
    """2 layers, 4 query heads on 2 key/value groups; heads x head_dim differs from hidden_size on purpose."""
    return Qwen3Shape(
        model_type="qwen3",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-6,
        rope=RopeConfig(rope_theta=1000.0),
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )


def tiny_moe_shape(**changes: object) -> Qwen3Shape:
    """4 layers, of which the second is dense; 4 experts, of which each position takes 2."""
    sizes: dict[str, object] = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": (1,),
    }
    return tiny_shape(False).model_copy(update=sizes | changes)


def random_tensors(shape: Qwen3Shape, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All tensors under Hugging Face names; norm weights between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensor_shapes().items():
        if len(size) == 1:
            tensor = 0.5 + torch.rand(size, generator=generator)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor = 0.3 * torch.randn(size, generator=generator)
        else:
            # Keeps activations at order one through the layers, so that every weight shows in the logits.
            tensor = torch.randn(size, generator=generator) * size[1] ** -0.5
        tensors[name] = tensor.to(dtype)
    return tensors


def hf_config(shape: Qwen3Shape) -> Any:
    """transformers' configuration of the same shape; token ids have no special meaning."""
    experts = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": shape.norm_topk_prob,
        "decoder_sparse_step": shape.decoder_sparse_step,
        "mlp_only_layers": list(shape.mlp_only_layers),
    }
    make: Any = Qwen3MoeConfig if shape.is_moe else Qwen3Config
    return make(
        **(experts if shape.is_moe else {}),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=shape.rope.to_hf()["rope_parameters"],
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def hf_model(shape: Qwen3Shape, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """transformers' model holding `tensors`, in evaluation mode, of their dtype."""
    make: Any = Qwen3MoeForCausalLM if shape.is_moe else Qwen3ForCausalLM
    model = make(hf_config(shape))
    torch.nn.Module.to(model, tensors["model.norm.weight"].dtype)  # in place; transformers' own `to` has no usable type
    state = dict(tensors)
    if shape.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for layer in (i for i, is_moe in enumerate(shape.moe_layers) if is_moe):
        # In memory transformers stacks the experts; in files they have names of their own.
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state.pop(f"{experts}.{i}.{name}_proj.weight") for i in range(shape.num_experts)])
            for name in ("gate", "up", "down")
        )
        state |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    model.load_state_dict(state, strict=True)
    return model.eval()


def unstacked(shape: Qwen3Shape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers holds in memory, under the names it has in files."""
    named = {}
    for name, tensor in tensors.items():
        prefix, part, kind = name.partition(".experts.")
        if not part:
            named[name] = tensor
            continue
        for i in range(shape.num_experts):
            if kind == "down_proj":
                named[f"{prefix}.experts.{i}.down_proj.weight"] = tensor[i]
            else:
                gate_up = dict(zip(("gate_proj", "up_proj"), tensor[i].chunk(2), strict=True))
                named |= {f"{prefix}.experts.{i}.{half}.weight": rows for half, rows in gate_up.items()}
    return named
