"""Which rows meet the output layer: plans, chunks, and that what is left out is as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.linear_cases import (
    CPU,
    LinearCase,
    Tokens,
    by_autograd,
    every_path,
    linear_case,
    policy_objective,
    policy_tokens,
    relative_error,
)
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.policy_loss import FusedPolicyLoss, fused_linear_policy_loss
from megatron_klear_kernels.linear_policy_loss.rows import RowPlan, padded, plan_rows
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary


def plan_of(token_scale: list[float], nll_scale: list[float], advantages: list[float], every: bool = False) -> RowPlan:
    rows = (torch.tensor(row) for row in (token_scale, nll_scale, advantages))
    return plan_rows(*rows, every_loss_row_has_gradient=every)


def test_rows_without_any_scale_are_left_out_and_rows_without_gradient_come_last() -> None:
    token_scale, nll_scale = [0.0, 0.5, 0.5, 0.0, -0.5, 0.5, -0.5], [0.0, 0.0, 0.0, 0.2, 0.0, 0.1, 0.0]
    plan = plan_of(token_scale, nll_scale, [1.0, 0.0, 1.0, 0.0, -1.0, 0.0, 0.0])
    assert (plan.index.tolist(), plan.num_gradient) == ([2, 3, 4, 5, 1, 6], 4)
    assert plan.index.dtype == torch.int64


def test_a_penalty_gives_every_row_with_a_loss_a_gradient() -> None:
    plan = plan_of([0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0], every=True)
    assert (plan.index.tolist(), plan.num_gradient) == ([1, 2], 2)


def test_half_the_groups_without_spread_meet_one_product_of_three() -> None:
    """With the joint SFT term a group whose samples were all right stays."""
    ones, zeros = torch.ones(64), torch.zeros(64)
    advantages = torch.cat((zeros[:32], ones[:32]))
    without = plan_rows(ones, zeros, advantages, every_loss_row_has_gradient=False)
    joint = plan_rows(ones, 0.1 * ones, advantages, every_loss_row_has_gradient=False)
    assert (without.index.numel(), without.num_gradient) == (64, 32)
    assert (joint.index.numel(), joint.num_gradient) == (64, 64)


@settings(deadline=None, max_examples=200)
@given(
    num_gradient=st.integers(0, 200),
    num_others=st.integers(0, 200),
    multiple=st.sampled_from((1, 16, 128)),
    factor=st.integers(1, 6),
)
def test_chunks_cover_each_row_once_and_never_mix(
    num_gradient: int, num_others: int, multiple: int, factor: int
) -> None:
    total, most_rows = num_gradient + num_others, factor * multiple
    plan = RowPlan(torch.randperm(total), num_gradient)
    chunks = list(plan.chunks(most_rows, multiple))
    assert torch.cat([plan.index[:0], *(chunk.index for chunk in chunks)]).equal(plan.index)
    start = 0
    for chunk in chunks:
        assert (chunk.start, chunk.stop - chunk.start) == (start, chunk.index.numel())
        start = chunk.stop
        assert 0 < chunk.index.numel() <= most_rows
        assert chunk.has_gradient == (chunk.stop <= num_gradient) and not chunk.start < num_gradient < chunk.stop
        # Only the last of a kind may be no multiple: it is filled up with rows of zeros.
        assert chunk.index.numel() % multiple == 0 or chunk.stop in (num_gradient, total)
    assert start == total


def test_chunks_are_as_equal_as_multiples_allow() -> None:
    plan = RowPlan.every_row(100, CPU)
    assert [chunk.index.numel() for chunk in plan.chunks(64, 16)] == [64, 36]
    assert [chunk.index.numel() for chunk in plan.chunks(96, 16)] == [64, 36]
    assert [chunk.index.numel() for chunk in plan.chunks(48, 16)] == [48, 48, 4]
    assert [chunk.index.numel() for chunk in plan.chunks(1024, 16)] == [100]


def test_no_row_no_chunk() -> None:
    assert list(RowPlan.every_row(0, CPU).chunks(64, 16)) == []
    assert list(plan_of([0.0, 0.0], [0.0, 0.0], [1.0, 1.0]).chunks(64, 16)) == []


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_padded(number: int, expected: int) -> None:
    assert padded(number, 16) == expected


CASE = linear_case(1001, num_padding=7)
TOKENS = policy_tokens(CASE)


def run(rows: RowPlan | None, **settings: Any) -> tuple[FusedPolicyLoss, Tensor, Tensor]:
    hidden, weight = CASE.hidden.clone().requires_grad_(), CASE.weight.clone().requires_grad_()
    fused = fused_linear_policy_loss(
        hidden, weight, CASE.targets, *TOKENS.arguments(), vocab_size=1001, rows=rows, **settings
    )
    fused.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return fused, hidden.grad, weight.grad


@every_path
@pytest.mark.parametrize("chunk_bytes", (1, None))
def test_a_plan_changes_neither_loss_nor_gradient(chunk_bytes: int | None, path: PathName) -> None:
    nothing = torch.zeros(CASE.num_tokens)
    plan = plan_rows(TOKENS.token_scale, nothing, TOKENS.advantages, every_loss_row_has_gradient=False)
    fused, grad_hidden, grad_weight = run(plan, path=path, chunk_bytes=chunk_bytes)
    expected = by_autograd(CASE, policy_objective(TOKENS, {}))
    assert fused.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    assert relative_error(grad_hidden, expected.grad_hidden) < 5e-6
    assert relative_error(grad_weight, expected.grad_weight) < 5e-6
    left_out = TOKENS.token_scale == 0
    assert left_out.sum() > 0 and plan.num_gradient < plan.index.numel()
    for row in (fused.statistics.logprobs, fused.statistics.entropy, grad_hidden):
        assert not row[left_out].any()
    value_only = plan.index[plan.num_gradient :]
    torch.testing.assert_close(
        fused.statistics.logprobs[value_only].double(), expected.logprobs[value_only], rtol=0, atol=1e-5
    )
    assert (fused.statistics.entropy[value_only] > 0).all() and not grad_hidden[value_only].any()


def test_rows_in_any_order() -> None:
    """A plan's order is its own; results lie where the tokens are."""
    shuffled = RowPlan(torch.randperm(37, generator=torch.Generator().manual_seed(1)), 37)
    plain, mixed = run(None), run(shuffled, chunk_bytes=1)
    assert torch.equal(plain[0].statistics.logprobs, mixed[0].statistics.logprobs)
    assert relative_error(mixed[1], plain[1]) < 1e-6 and relative_error(mixed[2], plain[2]) < 1e-6


def test_a_row_that_was_promised_no_gradient_gets_none() -> None:
    """Even if its loss has one: the plan decides."""
    fused, grad_hidden, _ = run(RowPlan(torch.arange(37), 20), chunk_bytes=1)
    whole = run(None)
    assert torch.equal(fused.loss, whole[0].loss) or fused.loss.item() == pytest.approx(whole[0].loss.item(), abs=1e-6)
    assert not grad_hidden[20:].any() and relative_error(grad_hidden[:20], whole[1][:20]) < 1e-6


@every_path
def test_an_empty_plan(path: PathName) -> None:
    fused, grad_hidden, grad_weight = run(RowPlan(torch.arange(0), 0), path=path)
    assert fused.loss.item() == 0.0 and not grad_hidden.any() and not grad_weight.any()
    assert not fused.statistics.logprobs.any() and fused.statistics.logprobs.shape == (37,)


@every_path
def test_no_tokens_at_all(path: PathName) -> None:
    hidden, weight = torch.zeros(0, 24, requires_grad=True), CASE.weight.clone().requires_grad_()
    nothing = torch.zeros(0)
    case = LinearCase(hidden, weight, torch.zeros(0, dtype=torch.int64), 1001)
    tokens = Tokens(nothing, nothing, nothing)
    loss = fused_linear_policy_loss(hidden, weight, case.targets, *tokens.arguments(), vocab_size=1001, path=path).loss
    loss.backward()
    assert loss.item() == 0.0 and weight.grad is not None and not weight.grad.any()


@every_path
def test_logprobs_of_a_plan(path: PathName) -> None:
    plan = RowPlan(torch.tensor([30, 3, 4, 9]), 3)
    hidden, weight = CASE.hidden.clone().requires_grad_(), CASE.weight.clone().requires_grad_()
    layer = LinearSettings(Vocabulary(0, 1001), path=path, chunk_bytes=1)
    found = fused_linear_logprobs(hidden, weight, CASE.targets, layer, rows=plan)
    found.logprobs.sum().backward()
    expected = by_autograd(CASE, lambda logprobs, _: logprobs[plan.index[:3]].sum())
    kept = torch.zeros(37, dtype=torch.bool)
    kept[plan.index] = True
    torch.testing.assert_close(found.logprobs[kept].double(), expected.logprobs[kept], rtol=0, atol=1e-5)
    assert not found.logprobs[~kept].any() and not found.entropy[~kept].any()
    assert hidden.grad is not None and relative_error(hidden.grad, expected.grad_hidden) < 5e-6
    assert weight.grad is not None and relative_error(weight.grad, expected.grad_weight) < 5e-6
