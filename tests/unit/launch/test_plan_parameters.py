"""Parameters of models and ranks, against published totals and other code of the project."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import ExpertShape, shape_8b
from megatron_klear.config.model import padded_vocab_size
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.errors import ConfigError
from megatron_klear.launch.hardware import find_gpu, link_bytes_per_s
from megatron_klear.launch.layout import Layout, layout_of
from megatron_klear.launch.parameters import count_parameters, rank_parameters

# Of the published config.json files: what differs from Qwen3-8B, and the number of parameters (a tied head once).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "0.6B": (
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "8B": ({}, 8_190_735_360),
    "14B": (
        {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
        14_768_307_200,
    ),
    "32B": (
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        32_762_123_264,
    ),
}
EXPERTS = ExpertShape(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40960,
)


def layout(num_gpus: int, **sizes: Any) -> Layout:
    return layout_of(ParallelConfig(**sizes), shape_8b(), num_gpus)


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_those_published(name: str) -> None:
    changes, total = PUBLISHED[name]
    assert count_parameters(shape_8b(**changes)).total == total


def test_experts_are_counted() -> None:
    model = count_parameters(EXPERTS)
    assert model.total == 30_532_122_624
    sizes = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        sequence_parallel=True,
    )
    laid_out = layout_of(sizes, EXPERTS, 32)
    first = rank_parameters(EXPERTS, model, laid_out, 0)
    # 24 layers, 128 / 8 experts of three matrices.
    assert first.experts == 24 * 16 * 3 * 2048 * 768
    attention = 2048 * 128 * (32 + 32) // 2 + 2 * 2048 * 128 * 4 // 2
    assert first.layers == 24 * (attention + 2 * 2048 + 2 * 128 + 128 * 2048)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_all_ranks_together_hold_the_model_and_copies_of_what_is_not_cut(tensor: int) -> None:
    shape = shape_8b()
    model, laid_out = count_parameters(shape), layout(8, tensor_model_parallel_size=tensor)
    rank = rank_parameters(shape, model, laid_out, 0)
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    padding = 2 * (padded_vocab_size(151936, tensor) - 151936) * 4096
    assert tensor * rank.total == model.total + (tensor - 1) * norms + padding


def test_weights_of_key_value_heads_are_cut_like_all_others() -> None:
    """Megatron cuts the rows even where ranks outnumber the heads, and gathers activations."""
    shape = shape_8b(num_key_value_heads=2)
    model = count_parameters(shape)
    two, eight = (
        rank_parameters(shape, model, layout_of(ParallelConfig(tensor_model_parallel_size=size), shape, 8), 0).layers
        for size in (2, 8)
    )
    norms = 36 * (2 * 4096 + 2 * 128)
    assert (two - norms) == 4 * (eight - norms)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [61, 151669, 151936])
def test_the_vocabulary_is_padded_as_the_model_pads_it(vocab_size: int, tensor: int) -> None:
    assert padded_vocab_size(vocab_size, tensor) == -(-vocab_size // (16 * tensor)) * 16 * tensor


def test_a_tied_head_lives_on_the_last_stage_too() -> None:
    shape = shape_8b(tie_word_embeddings=True)
    model, two = count_parameters(shape), ParallelConfig(pipeline_model_parallel_size=2)
    first, last = (rank_parameters(shape, model, layout_of(two, shape, 8), stage) for stage in (0, 1))
    assert (first.embedding, first.head, last.embedding) == (151936 * 4096, 0, 0)
    assert last.head == 151936 * 4096
    alone = rank_parameters(shape, model, layout_of(ParallelConfig(), shape, 8), 0)
    assert alone.total == model.total


def test_uneven_stages_and_chunks_hold_the_layers_megatron_gives_them() -> None:
    uneven = layout(
        4,
        pipeline_model_parallel_size=4,
        num_layers_in_first_pipeline_stage=8,
        num_layers_in_last_pipeline_stage=6,
    )
    assert [len(stage) for stage in uneven.stages] == [8, 11, 11, 6]
    assert uneven.stages[3] == tuple(range(30, 36))
    chunks = layout(4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert chunks.stages[0] == (*range(0, 9), *range(18, 27))
    assert chunks.stages[1] == (*range(9, 18), *range(27, 36))


@pytest.mark.parametrize(
    ("num_gpus", "sizes", "told"),
    [
        (
            12,
            {"tensor_model_parallel_size": 8},
            "8 ranks hold one copy of the model, and 12 = 1 x 8 + 4 (use 8 or",
        ),
        (4, {"context_parallel_size": 8}, "4 = 0 x 8 + 4 (use 8 ranks)"),
        (8, {"pipeline_model_parallel_size": 8}, "36 layers for 8 stages of equal size does not work out"),
        (
            4,
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 7},
            "36 layers - 7 = 29 for 3 stages of equal size does not work out",
        ),
        (
            2,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            "stage 0 has 18 layers, which 4 chunks (virtual_pipeline_model_parallel_size) do not divide",
        ),
        (8, {"expert_model_parallel_size": 8}, "the model is a qwen3, which has no experts"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_arithmetic(
    num_gpus: int, sizes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        layout(num_gpus, **sizes)
    assert told in str(refused.value)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide num_experts 128"):
        layout_of(ParallelConfig(expert_model_parallel_size=3), EXPERTS, 12)
    with pytest.raises(ConfigError, match="does not divide the 12 ranks of a pipeline stage"):
        layout_of(ParallelConfig(expert_model_parallel_size=8), EXPERTS, 12)


def test_an_unknown_gpu_names_the_nearest() -> None:
    assert find_gpu("H800").nvlink_bytes_per_s == 200e9
    with pytest.raises(ConfigError, match=r"--gpu = 'h80': expected one of h100, h800, h200, a100 \(did you mean"):
        find_gpu("h80")


def test_a_ring_beyond_the_node_has_an_adapter_for_each_member_in_it() -> None:
    gpu = find_gpu("h100")
    assert link_bytes_per_s(gpu, group_size=8, stride=1) == 450e9 * 0.75
    assert link_bytes_per_s(gpu, group_size=8, stride=2) == 4 * 50e9 * 0.8
    assert link_bytes_per_s(gpu, group_size=8, stride=8) == 50e9 * 0.8
    assert link_bytes_per_s(find_gpu("h800"), group_size=16, stride=1) == 200e9 * 0.75
