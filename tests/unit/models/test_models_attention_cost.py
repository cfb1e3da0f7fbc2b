"""What packed attention writes, forward and backward, counted instead of timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.micro_batches import micro_batch_of_lengths
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.models.qwen3.attention import MAX_DENSE_LENGTH, PackedAttention, packed_sequences
from megatron_klear.models.qwen3.spec import qwen3_config
from megatron_klear.types import Topology

SHAPE = tiny_shape(True)


class Written(TorchDispatchMode):
    """Numbers in the outputs of every operation that are not views of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in held]
        self.total += sum(x.numel() for x in fresh)
        return out


def written(lengths: list[int]) -> int:
    config = qwen3_config(SHAPE, ParallelConfig(), dtype=torch.float32, on_cpu=True)
    module = PackedAttention(config, 1, AttnMaskType.causal, "self")
    module.engine = None
    heads = (SHAPE.num_attention_heads, SHAPE.num_key_value_heads, SHAPE.num_key_value_heads)
    operands = [torch.ones(sum(lengths), h, SHAPE.head_dim, requires_grad=True) for h in heads]
    with Written() as count:
        micro_batch = micro_batch_of_lengths(lengths)
        sequences = packed_sequences(
            micro_batch, Topology(), head_dim=SHAPE.head_dim, rope=SHAPE.rope, dtype=torch.float32
        )
        module(*operands, None, packed_seq_params=sequences).sum().backward()
    return count.total


@pytest.mark.parametrize("length", [MAX_DENSE_LENGTH, MAX_DENSE_LENGTH + 1], ids=["dense", "one by one"])
def test_twice_the_sequences_cost_twice_as_much(length: int) -> None:
    assert written([length] * 16) <= 2.1 * written([length] * 8)


def test_a_sequence_twice_as_long_costs_twice_as_much() -> None:
    assert written([4096]) <= 2.1 * written([2048])
