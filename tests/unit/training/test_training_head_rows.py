"""The head works, and keeps memory, for rows with a loss alone: prompts cost it nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.config.loss import GppoLossConfig, KlConfig
from megatron_klear.losses.registry import build_loss
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.head import Head, HeadSettings
from megatron_klear.types import MicroBatch
from megatron_klear_kernels.linear_policy_loss import layer, paths

NUM_TOKENS, HIDDEN = 400, 32


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


@pytest.fixture(scope="module")
def head(context: ParallelContext) -> Head:
    shape = tiny_shape(tied=False)
    return Head(stage_on_cpu(shape, random_tensors(shape, 3), context), context.groups, HeadSettings())


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


@dataclass
class Seen:
    """Rows of each matrix product."""

    logits: list[int] = field(default_factory=list)
    hidden_gradient: list[int] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    logits_product, hidden_gradient = paths.logits_product, layer.hidden_gradient

    def product(hidden: Tensor, *args: Any, **kwargs: Any) -> None:
        found.logits.append(hidden.size(0))
        logits_product(hidden, *args, **kwargs)

    def gradient(d_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.hidden_gradient.append(d_logits.size(0))
        return hidden_gradient(d_logits, *args, **kwargs)

    monkeypatch.setattr(paths, "logits_product", product)
    monkeypatch.setattr(layer, "hidden_gradient", gradient)
    return found


# Rows go in sixteens.
@pytest.mark.parametrize(("num_response", "rows"), [(400, [400]), (40, [48]), (1, [16]), (0, [])])
def test_rows_that_meet_the_output_layer(num_response: int, rows: list[int], head: Head, seen: Seen) -> None:
    head(hidden(), batch(num_response))
    assert seen.logits == rows


def gppo(head: Head, *, alpha: float) -> MicroBatch:
    """Two groups: advantage 0 (its samples were all right) in the first half of the response, 1 in the other."""
    micro_batch = batch(NUM_TOKENS)
    micro_batch.advantages = torch.zeros(NUM_TOKENS)
    micro_batch.advantages[NUM_TOKENS // 2 :] = 1.0
    micro_batch.nll_scale = alpha * micro_batch.token_scale
    loss = build_loss(GppoLossConfig(type="gppo"), KlConfig())
    head.judge(hidden(), micro_batch, loss).output.loss.backward()
    return micro_batch


def test_tokens_without_advantage_meet_one_product_of_three(context: ParallelContext, seen: Seen) -> None:
    """Unless the joint SFT term (alpha > 0) teaches them."""
    shape = tiny_shape(tied=False)
    head = Head(
        stage_on_cpu(shape, random_tensors(shape, 3), context), context.groups, HeadSettings(advantage_decides=True)
    )
    assert gppo(head, alpha=0.0).num_gradient_rows == 200
    assert (seen.logits, seen.hidden_gradient) == ([208, 208], [208])
    assert gppo(head, alpha=0.1).num_gradient_rows == 400
    assert (seen.logits[2:], seen.hidden_gradient[1:]) == ([400], [400])


def test_a_head_that_does_not_know_the_advantages_keeps_every_row(head: Head, seen: Seen) -> None:
    assert gppo(head, alpha=0.0).num_gradient_rows == 400
    assert seen.hidden_gradient == [400]


def test_a_tenth_of_the_rows_keeps_a_tenth_of_the_memory(head: Head) -> None:
    """The statistics of a row, 16 bytes; hidden states stay where they are."""
    assert saved_bytes(head, batch(NUM_TOKENS)) == 16 * NUM_TOKENS
    assert saved_bytes(head, batch(NUM_TOKENS // 10)) == 16 * NUM_TOKENS // 10
