"""Qwen3's mapping table. Everything a Qwen3 or Qwen3-MoE checkpoint holds, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.models.hf_bridge import (
    EMBEDDING,
    ColumnSlices,
    GatedMlp,
    Mapping,
    QueryKeyValue,
    Replicated,
    VocabularyRows,
)


def qwen3_table(shape: Qwen3Shape) -> tuple[Mapping, ...]:
    """All mappings, in the order Hugging Face writes the tensors."""
    shapes = shape.tensor_shapes()

    def pick(*names: str) -> dict[str, tuple[int, ...]]:
        """The shapes of these tensors; popping shows below that each is mapped exactly once."""
        return {name: shapes.pop(name) for name in names}

    embedding = VocabularyRows(EMBEDDING, pick("model.embed_tokens.weight"), vocab_size=shape.vocab_size)
    layers = [mapping for i in range(shape.num_hidden_layers) for mapping in _layer(shape, i, pick)]
    last: list[Mapping] = [Replicated("decoder.final_layernorm.weight", pick("model.norm.weight"), on_last_stage=True)]
    if not shape.tie_word_embeddings:
        head = pick("lm_head.weight")
        last.append(VocabularyRows("output_layer.weight", head, on_last_stage=True, vocab_size=shape.vocab_size))
    assert not shapes, f"no mapping for {sorted(shapes)}"
    return (embedding, *layers, *last)


def _layer(shape: Qwen3Shape, layer: int, pick: Callable[..., dict[str, tuple[int, ...]]]) -> list[Mapping]:
    mcore = f"decoder.layers.{layer}."

    def hf(*names: str) -> dict[str, tuple[int, ...]]:
        return pick(*(f"model.layers.{layer}.{name}.weight" for name in names))

    groups, dim = shape.num_key_value_heads, shape.head_dim
    qkv = hf("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return [
        Replicated(f"{mcore}input_layernorm.weight", hf("input_layernorm"), layer),
        QueryKeyValue(f"{mcore}self_attention.linear_qkv.weight", qkv, layer, num_groups=groups, head_dim=dim),
        Replicated(f"{mcore}self_attention.q_layernorm.weight", hf("self_attn.q_norm"), layer),
        Replicated(f"{mcore}self_attention.k_layernorm.weight", hf("self_attn.k_norm"), layer),
        ColumnSlices(f"{mcore}self_attention.linear_proj.weight", hf("self_attn.o_proj"), layer),
        Replicated(f"{mcore}pre_mlp_layernorm.weight", hf("post_attention_layernorm"), layer),
        *(_moe(shape.num_experts, layer, hf) if shape.moe_layers[layer] else _mlp(layer, hf)),
    ]


def _mlp(layer: int, hf: Callable[..., dict[str, tuple[int, ...]]]) -> list[Mapping]:
    return [
        GatedMlp(f"decoder.layers.{layer}.mlp.linear_fc1.weight", hf("mlp.gate_proj", "mlp.up_proj"), layer),
        ColumnSlices(f"decoder.layers.{layer}.mlp.linear_fc2.weight", hf("mlp.down_proj"), layer),
    ]


def _moe(num_experts: int, layer: int, hf: Callable[..., dict[str, tuple[int, ...]]]) -> list[Mapping]:
    mcore = f"decoder.layers.{layer}.mlp."
    mappings: list[Mapping] = [Replicated(f"{mcore}router.weight", hf("mlp.gate"), layer)]
    for i in range(num_experts):
        gate_up = hf(f"mlp.experts.{i}.gate_proj", f"mlp.experts.{i}.up_proj")
        mappings += [
            GatedMlp(f"{mcore}experts.local_experts.{i}.linear_fc1.weight", gate_up, layer, expert=i),
            ColumnSlices(
                f"{mcore}experts.local_experts.{i}.linear_fc2.weight",
                hf(f"mlp.experts.{i}.down_proj"),
                layer,
                expert=i,
            ),
        ]
    return mappings
