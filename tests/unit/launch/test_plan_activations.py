"""The formula of saved activations against what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.micro_batches import micro_batch_of_lengths
from helpers.saved_tensors import saved_tensors
from helpers.stages import cpu_context
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.launch.activations import (
    FUSED,
    AttentionPath,
    final_norm_bytes,
    recompute_bytes,
    rotary_bytes,
    saved_activation_bytes,
)
from megatron_klear.models.build import DTYPES, build_stage
from megatron_klear.models.qwen3.attention import MAX_DENSE_LENGTH
from megatron_klear.parallel.device import megatron_scope
from megatron_klear_kernels.native.library import can_attend

SMALL = tiny_shape(False).model_copy(update={"max_position_embeddings": 2048})
# Widths all different, MLP far wider than the heads, one KV head for four; heads that the C kernel takes.
WIDE = SMALL.model_copy(
    update={
        "hidden_size": 48,
        "intermediate_size": 160,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_hidden_layers": 4,
    }
)
SHORT, LONG, MIXED = (20, 30, 37), (530, 610), (20, 700, 37)


def recomputing(granularity: str | None, *modules: str, method: str = "uniform", layers: int = 1) -> ParallelConfig:
    settings: dict[str, Any] = {"recompute_granularity": granularity, "recompute_num_layers": layers}
    if modules:
        settings["recompute_modules"] = modules
    return ParallelConfig(recompute_method=method, **settings)  # type: ignore[arg-type]


def counted(shape: Qwen3Shape, lengths: Sequence[int], parallel: ParallelConfig, dtype: str) -> int:
    """Bytes that a forward pass of the stage saves, token ids and indices left out."""
    with cpu_context() as context, megatron_scope(context.device):
        stage = build_stage(shape, parallel, context.topology, dtype=DTYPES[dtype], on_cpu=True)
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        with saved_tensors(stage) as saved:
            stage.forward_hidden(stage.chunks[-1].module, micro_batch_of_lengths(lengths))
        return saved.num_bytes


def predicted(shape: Qwen3Shape, lengths: Sequence[int], parallel: ParallelConfig, dtype: str) -> int:
    short, tokens = [length for length in lengths if length <= MAX_DENSE_LENGTH], sum(lengths)
    blocks = ((len(short), max(short)),) if short else ()
    in_c = dtype == "float32" and can_attend(torch.empty(0), shape.head_dim)
    # The C kernel keeps what a GPU's does.
    path = FUSED if in_c else AttentionPath("blocks", blocks, alone=tokens - sum(short))
    layers = saved_activation_bytes(shape, tokens, parallel, dtype, num_layers=shape.num_hidden_layers, attention=path)
    # Where attention is recomputed, cos and sin live in the closure that does it, which autograd does not see.
    hidden = parallel.recompute_granularity == "full" and parallel.recompute_method == "uniform"
    hidden |= parallel.recompute_granularity == "selective" and "core_attn" in parallel.recompute_modules
    rotary = 0 if hidden else rotary_bytes(shape, tokens, dtype)
    return layers + final_norm_bytes(shape, tokens, parallel, dtype) + rotary


RECOMPUTES = {
    "none": recomputing(None),
    "core_attn": recomputing("selective", "core_attn"),
    "mlp": recomputing("selective", "mlp"),
    "layernorm": recomputing("selective", "layernorm"),
    "all selective": recomputing("selective", "core_attn", "mlp", "layernorm"),
    "full": recomputing("full"),
    "full by two": recomputing("full", layers=2),
    "block": recomputing("full", method="block", layers=1),
}


@pytest.mark.parametrize("lengths", [SHORT, LONG, MIXED], ids=["block", "alone", "both"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["small", "wide"])
def test_the_formula_counts_what_is_saved(shape: Qwen3Shape, recompute: str, lengths: tuple[int, ...]) -> None:
    parallel = RECOMPUTES[recompute]
    real = counted(shape, lengths, parallel, "float32")
    assert predicted(shape, lengths, parallel, "float32") == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_formula_holds_in_bfloat16(recompute: str) -> None:
    parallel = RECOMPUTES[recompute]
    real = counted(WIDE, LONG, parallel, "bfloat16")
    assert predicted(WIDE, LONG, parallel, "bfloat16") == pytest.approx(real, rel=0.05)


def test_what_comes_back_in_the_backward_is_a_layer_without_recompute() -> None:
    one = saved_activation_bytes(WIDE, 512, recomputing(None), "bfloat16", num_layers=1)
    assert recompute_bytes(WIDE, 512, recomputing("full"), "bfloat16") == one
    assert recompute_bytes(WIDE, 512, recomputing("full", layers=3), "bfloat16") == 3 * one
    assert recompute_bytes(WIDE, 512, recomputing("selective", "mlp"), "bfloat16") == 0


def test_sequence_parallelism_cuts_what_lies_between_the_linear_layers() -> None:
    apart = ParallelConfig(tensor_model_parallel_size=2)
    cut = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    whole, half = (saved_activation_bytes(SMALL, 64, p, "bfloat16", num_layers=1) for p in (apart, cut))
    # Two norms: normed rows and outputs [64, 32] in bfloat16, and a float32 a row.
    assert whole - half == 2 * 32 * (2 * 32 * 2 + 4)


def test_context_parallelism_adds_the_keys_of_others() -> None:
    alone, four = ParallelConfig(), ParallelConfig(context_parallel_size=4)
    more = [saved_activation_bytes(SMALL, 64, p, "bfloat16", num_layers=2, attention=FUSED) for p in (alone, four)]
    # Per layer, of K 24: three more ranks' [64, 2K].
    assert more[1] - more[0] == 2 * 64 * 3 * 2 * 24 * 2
