"""The head works, and keeps memory, for rows with a loss alone: prompts cost it nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training import head as head_module
from megatron_klear.training.head import Head
from megatron_klear.types import MicroBatch

NUM_TOKENS, HIDDEN = 400, 32


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


@pytest.fixture(scope="module")
def head(context: ParallelContext) -> Head:
    shape = tiny_shape(tied=False)
    return Head(stage_on_cpu(shape, random_tensors(shape, 3), context), context.groups, temperature=1.0)


def batch(num_response: int) -> MicroBatch:
    """One sequence, its last tokens a response."""
    made = micro_batch_of_lengths([NUM_TOKENS])
    made.token_scale = torch.zeros(NUM_TOKENS)
    made.token_scale[NUM_TOKENS - num_response :] = 0.1
    return made


def hidden() -> Tensor:
    return torch.randn(NUM_TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()


def saved_bytes(head: Head, micro_batch: MicroBatch) -> int:
    """Of what the head keeps for the backward, weights and the hidden states it is given aside."""
    x = hidden()
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.data_ptr() != x.data_ptr():
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head(x, micro_batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("num_response", "num_rows"), [(400, 400), (40, 40), (1, 1), (0, 1)])
def test_rows_that_meet_the_output_layer(
    num_response: int, num_rows: int, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, linear_logprobs = [], head_module.linear_logprobs

    def counting(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(rows.shape))
        return linear_logprobs(rows, *args, **kwargs)

    monkeypatch.setattr(head_module, "linear_logprobs", counting)
    head(hidden(), batch(num_response))
    assert seen == [(num_rows, HIDDEN)]


def test_a_tenth_of_the_rows_keeps_a_tenth_of_the_memory(head: Head) -> None:
    whole, tenth = saved_bytes(head, batch(NUM_TOKENS)), saved_bytes(head, batch(NUM_TOKENS // 10))
    # At least the hidden states of its rows.
    assert whole >= NUM_TOKENS * HIDDEN * 4
    assert tenth == pytest.approx(whole / 10, rel=0.02)
