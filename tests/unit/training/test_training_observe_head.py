"""The head on one rank: which rows it works on, and that its numbers are those of the whole logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.losses.terms import SftLoss
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.head import Head, HeadSettings
from megatron_klear.types import MicroBatch

NUM_TOKENS = 9
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


@pytest.fixture(scope="module")
def head(context: ParallelContext) -> Head:
    shape = tiny_shape(tied=False)
    return Head(stage_on_cpu(shape, random_tensors(shape, 3), context), context.groups, HeadSettings(TEMPERATURE))


def batch() -> MicroBatch:
    """A policy loss at 2, 3 and 7, an SFT loss at 3 and 5; a scale may be negative or tiny."""
    made = micro_batch_of_lengths([NUM_TOKENS])
    made.labels = torch.tensor([3, 60, 0, 5, 17, 22, 1, 60, 0])
    made.token_scale, made.nll_scale = torch.zeros(NUM_TOKENS), torch.zeros(NUM_TOKENS)
    made.token_scale[[2, 3, 7]] = torch.tensor([-0.2, 0.1, 1e-30])
    made.nll_scale[[3, 5]] = 0.01
    return made


def hidden() -> Tensor:
    return torch.randn(NUM_TOKENS, 1, 32, generator=torch.Generator().manual_seed(1))


def rows_of(micro_batch: MicroBatch, head: Head) -> list[int]:
    head.choose_rows([micro_batch])
    assert micro_batch.loss_rows is not None
    return micro_batch.loss_rows.tolist()


def test_rows_with_either_loss_are_worked_on(head: Head) -> None:
    assert rows_of(batch(), head) == [2, 3, 5, 7]


def test_a_micro_batch_without_a_loss_works_on_no_row_and_has_gradients_of_zero(head: Head) -> None:
    empty = micro_batch_of_lengths([4])
    assert rows_of(empty, head) == []
    x = hidden()[:4].requires_grad_()
    judged = head.judge(x, empty, SftLoss())
    judged.output.loss.backward()
    assert float(judged.output.loss.detach()) == 0.0
    assert x.grad is not None and not x.grad.any()


def test_logprobs_and_entropies_are_those_of_the_whole_logits(head: Head) -> None:
    logits = head.logits(hidden())
    assert logits.shape == (NUM_TOKENS, 61)
    distribution = (logits.double() / TEMPERATURE).log_softmax(dim=-1)
    expected = distribution.gather(1, batch().labels[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    has_loss = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    has_loss[[2, 3, 5, 7]] = True
    stats = head(hidden(), batch())
    assert stats.entropy is not None
    torch.testing.assert_close(stats.logprobs.double(), expected * has_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.entropy.double(), entropy * has_loss, rtol=1e-5, atol=1e-6)


def test_only_rows_with_a_loss_get_a_gradient(head: Head) -> None:
    x = hidden().requires_grad_()
    head(x, batch()).logprobs.sum().backward()
    assert x.grad is not None
    assert (x.grad[:, 0].abs().sum(dim=1) > 0).nonzero()[:, 0].tolist() == [2, 3, 5, 7]
