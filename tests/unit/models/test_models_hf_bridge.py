"""Mapping kinds: hand-written expectations for tiny tensors, and bit-equal round trips."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from helpers.tiny_qwen3 import hf_config, tiny_shape
from megatron_klear.config.model import VOCAB_ROWS_MULTIPLE, padded_vocab_size
from megatron_klear.models.hf_bridge import (
    ColumnSlices,
    GatedMlp,
    Mapping,
    QueryKeyValue,
    Replicated,
    VocabularyRows,
)
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.models.random_init import random_source

WIDTH = 3


def rows(first: int, count: int) -> Tensor:
    """[count, WIDTH] rows that say which row they are."""
    return torch.arange(first, first + count).float()[:, None].expand(count, WIDTH).contiguous()


def shapes(*sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"t{i}": size for i, size in enumerate(sizes)}


def row_numbers(shard: Tensor) -> list[int]:
    return shard[:, 0].int().tolist()


QKV = QueryKeyValue("qkv", shapes((8, WIDTH), (4, WIDTH), (4, WIDTH)), num_groups=2, head_dim=2)


def test_query_key_value_order_by_hand() -> None:
    """4 query heads, 2 groups, head_dim 2: q rows are 0-7, k rows 100-103, v rows 200-203."""
    full = [rows(0, 8), rows(100, 4), rows(200, 4)]
    group_0 = [0, 1, 2, 3, 100, 101, 200, 201]
    group_1 = [4, 5, 6, 7, 102, 103, 202, 203]
    assert row_numbers(QKV.cut(full, 0, 1)) == group_0 + group_1
    assert row_numbers(QKV.cut(full, 0, 2)) == group_0
    assert row_numbers(QKV.cut(full, 1, 2)) == group_1


def test_gated_mlp_order_by_hand() -> None:
    mapping = GatedMlp("fc1", shapes((4, WIDTH), (4, WIDTH)))
    full = [rows(0, 4), rows(100, 4)]
    assert row_numbers(mapping.cut(full, 0, 1)) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert row_numbers(mapping.cut(full, 0, 2)) == [0, 1, 100, 101]
    assert row_numbers(mapping.cut(full, 1, 2)) == [2, 3, 102, 103]


def test_column_slices_by_hand() -> None:
    full = [torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])]
    mapping = ColumnSlices("proj", shapes((2, 4)))
    assert mapping.cut(full, 0, 2).tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert mapping.cut(full, 1, 2).tolist() == [[3.0, 4.0], [7.0, 8.0]]


def test_replicated_is_whole_on_every_rank() -> None:
    full = [torch.arange(5.0)]
    assert all(torch.equal(Replicated("norm", shapes((5,))).cut(full, rank, 4), full[0]) for rank in range(4))


def test_vocabulary_padding_by_hand() -> None:
    """20 rows on 2 ranks: 16 rows a rank, the last 12 of them padding."""
    mapping = VocabularyRows("embedding", shapes((20, WIDTH)), vocab_size=20)
    full = [rows(1, 20)]
    first, second = (mapping.cut(full, rank, 2) for rank in range(2))
    assert row_numbers(first) == list(range(1, 17))
    assert row_numbers(second) == [17, 18, 19, 20, *[0] * 12]
    assert torch.equal(second[4:], torch.zeros(12, WIDTH))


@pytest.mark.parametrize(
    ("vocab_size", "tensor_size", "padded"), [(61, 1, 64), (64, 1, 64), (64, 4, 64), (65, 4, 128), (151936, 8, 151936)]
)
def test_padded_vocab_size(vocab_size: int, tensor_size: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tensor_size) == padded
    assert padded % (VOCAB_ROWS_MULTIPLE * tensor_size) == 0


KINDS: list[Mapping] = [
    Replicated("norm", shapes((12,))),
    ColumnSlices("proj", shapes((6, 16))),
    GatedMlp("fc1", shapes((16, 6), (16, 6))),
    QueryKeyValue("qkv", shapes((48, 6), (24, 6), (24, 6)), num_groups=4, head_dim=6),
    QueryKeyValue("qkv_one_head_a_group", shapes((24, 6), (24, 6), (24, 6)), num_groups=4, head_dim=6),
    VocabularyRows("embedding", shapes((61, 6)), vocab_size=61),
    VocabularyRows("even_embedding", shapes((64, 6)), vocab_size=64),
]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("tensor_size", (1, 2, 4))
@pytest.mark.parametrize("mapping", KINDS, ids=lambda mapping: mapping.megatron_name)
def test_round_trip_is_bit_equal(mapping: Mapping, tensor_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(size, generator=generator).to(dtype) for size in mapping.hf_shapes.values()]
    shards = [mapping.cut(full, rank, tensor_size) for rank in range(tensor_size)]
    assert len({shard.shape for shard in shards}) == 1
    joined = mapping.join(shards)
    assert len(joined) == len(mapping.hf_names)
    for before, after in zip(full, joined, strict=True):
        assert after.dtype == dtype and torch.equal(before, after)


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_the_table_maps_every_tensor_of_transformers_once(tied: bool) -> None:
    shape = tiny_shape(tied)
    table = qwen3_table(shape)
    mapped = Counter(name for mapping in table for name in mapping.hf_names)
    assert set(mapped.values()) == {1}
    with torch.device("meta"):
        theirs = {name: tuple(t.shape) for name, t in Qwen3ForCausalLM(hf_config(shape)).state_dict().items()}
    if tied:
        del theirs["lm_head.weight"]  # transformers lists the embedding a second time
    assert mapped.keys() == theirs.keys() == shape.tensor_shapes().keys()
    assert {name: size for mapping in table for name, size in mapping.hf_shapes.items()} == theirs


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_the_table_names_each_megatron_parameter_once_and_places_it(tied: bool) -> None:
    table = qwen3_table(tiny_shape(tied))
    names = [mapping.megatron_name.format(layer=mapping.layer) for mapping in table]
    assert len(names) == len(set(names)) == 8 * 2 + (2 if tied else 3)
    assert {m.megatron_name for m in table if m.on_last_stage} == {
        "decoder.final_layernorm.weight",
        *(() if tied else ("output_layer.weight",)),
    }
    assert all((mapping.layer is not None) == ("layers." in mapping.megatron_name) for mapping in table)


def test_random_weights_depend_on_name_and_seed_and_on_nothing_else() -> None:
    table = qwen3_table(tiny_shape(tied=False))
    source, again = (random_source(t, seed=3, std=0.05) for t in (table, tuple(reversed(table))))
    other = random_source(table, seed=4, std=0.05)
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(source(first), source(first)) and torch.equal(source(first), again(first))
    assert not torch.equal(source(first), source(second))
    assert not torch.equal(source(first), other(first))


def test_random_weights_have_the_std_and_norms_are_one() -> None:
    shape = tiny_shape(tied=True)
    source = random_source(qwen3_table(shape), seed=3, std=0.05)
    for name, size in shape.tensor_shapes().items():
        tensor = source(name)
        assert tuple(tensor.shape) == size
        if len(size) == 1:
            assert torch.equal(tensor, torch.ones(size))
        else:
            assert tensor.std().item() == pytest.approx(0.05, rel=0.15)
