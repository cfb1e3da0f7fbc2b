"""Bytes that the forward pass of a micro-batch keeps for its backward, tensor by tensor.

T tokens on this rank (already divided by the context-parallel size), H hidden, Q and K the widths of all query and of
all key heads on this rank, F the width of the MLP on this rank, e bytes of an activation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig

BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class AttentionPath:
    """How attention runs: in one variable-length kernel on a GPU, or on a CPU in blocks of short sequences and with
    long ones alone."""

    kind: Literal["fused", "blocks"] = "fused"
    blocks: tuple[tuple[int, int], ...] = ()
    """(sequences, longest of them) of each block."""
    alone: int = 0
    """Tokens of all ranks in sequences that are in no block."""


FUSED = AttentionPath()


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths on one tensor-parallel rank."""

    hidden: int
    query: int
    key: int
    mlp: int
    heads: int
    key_heads: int

    @classmethod
    def of(cls, shape: Qwen3Shape, tensor_size: int) -> Widths:
        """A rank holds at least one key/value head."""
        heads = shape.num_attention_heads // tensor_size
        key_heads = max(1, shape.num_key_value_heads // tensor_size)
        mlp = shape.intermediate_size // tensor_size
        return cls(shape.hidden_size, heads * shape.head_dim, key_heads * shape.head_dim, mlp, heads, key_heads)


def saved_activation_bytes(
    shape: Qwen3Shape,
    tokens: int,
    parallel: ParallelConfig,
    dtype: str,
    *,
    num_layers: int,
    num_expert_layers: int = 0,
    attention: AttentionPath = FUSED,
) -> int:
    """Bytes that layers of a stage save for the backward of one micro-batch of `tokens` on this rank.

    `num_expert_layers` of the `num_layers` have experts.
    """
    dense = _layer_bytes(shape, tokens, parallel, dtype, attention)
    experts = _layer_bytes(shape, tokens, parallel, dtype, attention, experts=True) if num_expert_layers else 0
    if parallel.recompute_granularity != "full":
        return (num_layers - num_expert_layers) * dense + num_expert_layers * experts
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    layers, again = num_layers // chunks, parallel.recompute_num_layers
    # Only the input of each unit [T/sp, H].
    unit = tokens // _sequence_shards(parallel) * shape.hidden_size * BYTES[dtype]
    if parallel.recompute_method == "uniform":
        return chunks * math.ceil(layers / again) * unit
    whole = max(0, layers - again)
    return chunks * ((layers - whole) * unit + whole * max(dense, experts))


def recompute_bytes(
    shape: Qwen3Shape, tokens: int, parallel: ParallelConfig, dtype: str, *, experts: bool = False
) -> int:
    """Bytes that come back for a while when the backward computes a unit again; 0 without full recompute."""
    if parallel.recompute_granularity != "full":
        return 0
    layers = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
    return layers * _layer_bytes(shape, tokens, parallel, dtype, FUSED, experts=experts)


def _sequence_shards(parallel: ParallelConfig) -> int:
    return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1


def _recomputed(parallel: ParallelConfig) -> tuple[str, ...]:
    return parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()


def _layer_bytes(
    shape: Qwen3Shape,
    tokens: int,
    parallel: ParallelConfig,
    dtype: str,
    attention: AttentionPath,
    *,
    experts: bool = False,
) -> int:
    """One layer that is not recomputed as a whole."""
    widths, again = Widths.of(shape, parallel.tensor_model_parallel_size), _recomputed(parallel)
    e, between = BYTES[dtype], tokens // _sequence_shards(parallel)
    # The recompute of an MLP starts from the norm's output, and experts read it more than once.
    second_kept = "layernorm" not in again or "mlp" in again or experts
    parts = [
        _norm_bytes(between, widths.hidden, e, output_kept="layernorm" not in again),
        _query_key_norm_bytes(tokens, widths, e),
        _attention_bytes(tokens, widths, e, attention, parallel, recomputed="core_attn" in again),
        # Input of the output projection [T, Q].
        tokens * widths.query * e,
        _norm_bytes(between, widths.hidden, e, output_kept=second_kept),
    ]
    if experts:
        parts.append(_expert_bytes(shape, tokens, parallel, e))
    elif "mlp" not in again:
        # Output of the first linear layer [T, 2F]; silu(gate) * up [T, F] as input of the second.
        parts.append(tokens * 3 * widths.mlp * e)
    return sum(parts)


def _norm_bytes(tokens: int, width: int, e: int, *, output_kept: bool) -> int:
    # The normed rows [T, H] and 1 / rms [T] in float32; the output [T, H] as input of the linear layer behind it.
    return tokens * ((2 if output_kept else 1) * width * e + 4)


def _query_key_norm_bytes(tokens: int, widths: Widths, e: int) -> int:
    # Normed query [T, Q] and key [T, K], and 1 / rms of each head in float32. Their outputs go into the rotation,
    # which keeps nothing.
    return tokens * ((widths.query + widths.key) * e + 4 * (widths.heads + widths.key_heads))


def _attention_bytes(
    tokens: int, widths: Widths, e: int, path: AttentionPath, parallel: ParallelConfig, *, recomputed: bool
) -> int:
    # Keys of all tokens [cp T, 2K], own queries [T, Q]; both after the rotation, or recomputed before it and own only.
    ranks = parallel.context_parallel_size
    if recomputed:
        return tokens * (widths.query + 2 * widths.key) * e
    # Log-sum-exp of each head in float32; the output [T, Q] is the input of the output projection.
    inputs, statistics = (widths.query + 2 * ranks * widths.key) * e, 4 * widths.heads
    if path.kind == "fused":
        return tokens * (inputs + statistics)
    kept = 0
    for sequences, longest in path.blocks:
        # Padded: key and value [S, L, 2K], query [S, L/cp, Q] and probabilities [S, heads, L/cp, L].
        own = sequences * longest // ranks
        kept += own * (inputs + longest * widths.heads * e)
    if path.alone:
        # Parts of the whole. Of each sequence the output is kept before it is copied beside the others', but where
        # ranks share it: they compute it and the log-sum-exp again, but for the first rank's first chunks.
        kept += tokens * inputs + (path.alone * (statistics + widths.query * e) if ranks == 1 else 0)
    return kept


def _expert_bytes(shape: Qwen3Shape, tokens: int, parallel: ParallelConfig, e: int) -> int:
    """Experts of a layer under even routing, each whole on one rank. Not yet compared with a count."""
    # Each token goes to so many experts; tensor-parallel ranks share the rows.
    rows = tokens * shape.num_experts_per_tok // parallel.tensor_model_parallel_size
    # The row sent [H], the MLP's [3F], the row returned [H].
    moved = rows * (2 * shape.hidden_size + 3 * shape.moe_intermediate_size) * e
    # Router: logits and probabilities of all experts in float32.
    return moved + 2 * 4 * tokens // _sequence_shards(parallel) * shape.num_experts


def final_norm_bytes(shape: Qwen3Shape, tokens: int, parallel: ParallelConfig, dtype: str) -> int:
    """What the final norm of the last stage keeps: normed rows [T/sp, H] and 1 / rms [T/sp] in float32."""
    return tokens // _sequence_shards(parallel) * (shape.hidden_size * BYTES[dtype] + 4)


def rotary_bytes(shape: Qwen3Shape, tokens: int, dtype: str) -> int:
    """cos and sin [T, D/2], shared by all layers of a stage."""
    return tokens * shape.head_dim * BYTES[dtype]
