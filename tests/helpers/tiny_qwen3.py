"""A Qwen3 small enough for a test, with every tensor random: norm weights of one would hide swapped norms."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_klear.config.model import Qwen3Shape


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
        rope_theta=1000.0,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )


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


def hf_config(shape: Qwen3Shape) -> Qwen3Config:
    """transformers' configuration of the same shape; token ids have no special meaning."""
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def hf_model(shape: Qwen3Shape, tensors: dict[str, Tensor]) -> Qwen3ForCausalLM:
    """transformers' model holding `tensors`, in evaluation mode, of their dtype."""
    model = Qwen3ForCausalLM(hf_config(shape))
    torch.nn.Module.to(model, tensors["model.norm.weight"].dtype)  # in place; transformers' own `to` has no usable type
    state = dict(tensors)
    if shape.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()
