"""Gradients made in the forward: who gets them, how often, and what is held meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from helpers.linear_cases import (
    LinearCase,
    NoTensorOf,
    Tokens,
    by_autograd,
    every_path,
    gradient_tolerance,
    linear_case,
    policy_objective,
    policy_tokens,
    relative_error,
)
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.one_pass import LinearLoss, MainGrad, fused_linear_loss
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.policy_loss import fused_linear_policy_loss, policy_token_loss
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

CASE = linear_case(1001, num_padding=7)
TOKENS = policy_tokens(CASE)
BONUS = torch.linspace(0, 0.1, CASE.num_tokens)
POLICY: dict[str, Any] = {"method": "gppo", "entropy_scale": BONUS}
EXPECTED = by_autograd(CASE, policy_objective(TOKENS, POLICY))


def loss_of(hidden: Tensor, weight: Tensor, *, tokens: Tokens = TOKENS, **settings: Any) -> Tensor:
    given: dict[str, Any] = {"vocab_size": CASE.num_valid, "chunk_bytes": 1} | settings
    return fused_linear_policy_loss(hidden, weight, CASE.targets, *tokens.arguments(), **given, **POLICY).loss


def leaves(case: LinearCase = CASE) -> tuple[Tensor, Tensor]:
    return case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_gradients(hidden: Tensor, weight: Tensor, *, factor: float = 1.0) -> None:
    assert relative_error(grad_of(hidden), factor * EXPECTED.grad_hidden) < 5e-6
    assert relative_error(grad_of(weight), factor * EXPECTED.grad_weight) < 5e-6


@pytest.mark.parametrize("factor", (3.0, 0.0, -0.25))
def test_a_multiple_of_the_loss_has_a_multiple_of_the_gradients(factor: float) -> None:
    hidden, weight = leaves()
    (factor * loss_of(hidden, weight)).backward()
    assert_gradients(hidden, weight, factor=factor)


def test_an_upstream_gradient_of_one_leaves_the_bits_alone() -> None:
    first, second = leaves(), leaves()
    loss_of(*first).backward()
    (1.0 * loss_of(*second)).backward()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(grad_of(one), grad_of(other))


def test_the_loss_meets_other_terms() -> None:
    """Its gradients add up with those of whatever else is made of the same tensors."""
    hidden, weight = leaves()
    (loss_of(hidden, weight) + (hidden.square().sum() + weight.square().sum()) / 2).backward()
    assert relative_error(grad_of(hidden), EXPECTED.grad_hidden + CASE.hidden) < 1e-6
    assert relative_error(grad_of(weight), EXPECTED.grad_weight + CASE.weight) < 1e-6


@pytest.mark.parametrize("wanted", (0, 1), ids=("hidden", "weight"))
def test_only_one_of_them_has_a_gradient(wanted: int) -> None:
    operands = [CASE.hidden.clone(), CASE.weight.clone()]
    operands[wanted].requires_grad_()
    (2 * loss_of(*operands)).backward()
    expected = (EXPECTED.grad_hidden, EXPECTED.grad_weight)[wanted]
    assert relative_error(grad_of(operands[wanted]), 2 * expected) < 5e-6
    assert operands[1 - wanted].grad is None


def test_without_gradients_only_the_value_is_computed() -> None:
    hidden, weight = leaves()
    main_grad = torch.zeros(weight.shape)
    with torch.no_grad():
        quiet = loss_of(hidden, weight, main_grad=main_grad)
    frozen = loss_of(CASE.hidden, CASE.weight, main_grad=main_grad)
    assert not quiet.requires_grad and not frozen.requires_grad and not main_grad.any()
    assert quiet.item() == frozen.item() == pytest.approx(EXPECTED.loss.item(), abs=1e-5)
    assert loss_of(hidden, weight).item() == quiet.item()


@pytest.mark.parametrize("with_main_grad", (False, True))
def test_a_second_backward_is_refused(with_main_grad: bool) -> None:
    """The gradients were given away; a silent second helping would be wrong."""
    hidden, weight = leaves()
    loss = loss_of(hidden, weight, main_grad=torch.zeros(weight.shape) if with_main_grad else None)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward through a fused loss: .*; call the loss again"):
        loss.backward()


def main_grad_before() -> Tensor:
    """What earlier micro-batches left."""
    return 0.01 * torch.randn(CASE.weight.shape, generator=torch.Generator().manual_seed(9))


def assert_added(main_grad: Tensor, *, factor: float = 1.0, times: int = 1) -> None:
    assert relative_error(main_grad - main_grad_before(), times * factor * EXPECTED.grad_weight) < 1e-5


@every_path
@pytest.mark.parametrize("chunk_bytes", (1, 1 << 26))
def test_main_grad_gets_the_weight_gradient_on_top_of_what_it_holds(chunk_bytes: int, path: PathName) -> None:
    hidden, weight = leaves()
    main_grad = main_grad_before()
    for times in (1, 2):
        loss_of(hidden, weight, main_grad=main_grad, chunk_bytes=chunk_bytes, path=path).backward()
        assert_added(main_grad, times=times)
    assert not grad_of(weight).any() and grad_of(weight).dtype == weight.dtype
    assert relative_error(grad_of(hidden), 2 * EXPECTED.grad_hidden) < 5e-6


@pytest.mark.parametrize("scale", (0.25, 1 / 3, 65536.0))
def test_upstream_scale(scale: float) -> None:
    hidden, weight = leaves()
    main_grad = main_grad_before()
    loss = loss_of(hidden, weight, main_grad=main_grad, upstream_scale=scale)
    assert loss.item() == pytest.approx(EXPECTED.loss.item(), abs=1e-5), "the loss itself is not scaled"
    (loss * scale).backward()
    assert_added(main_grad, factor=scale)
    assert relative_error(grad_of(hidden), scale * EXPECTED.grad_hidden) < 5e-6


@pytest.mark.parametrize("factor", (1.0, 0.5, -0.25, float("nan")))
def test_an_upstream_gradient_other_than_the_promised_is_refused(factor: float) -> None:
    hidden, weight = leaves()
    loss = loss_of(hidden, weight, main_grad=main_grad_before(), upstream_scale=0.25)
    with pytest.raises(RuntimeError, match=r"is not upstream_scale = 0\.25, .*; pass the factor that the loss is mult"):
        (loss * factor).backward()


def test_main_grad_of_a_frozen_weight_is_left_alone() -> None:
    hidden, _ = leaves()
    main_grad = main_grad_before()
    found = raw_loss(hidden, CASE.weight, MainGrad(main_grad))
    (2 * found.loss).backward()
    assert not found.added_to_main_grad and torch.equal(main_grad, main_grad_before())
    assert relative_error(grad_of(hidden), 2 * EXPECTED.grad_hidden) < 5e-6


def test_main_grad_that_does_not_fit_is_refused() -> None:
    for main_grad in (torch.zeros(24), torch.zeros(CASE.weight.shape, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"main_grad is torch\..*: expected float32 \[1008, 24\], the shape"):
            loss_of(*leaves(), main_grad=main_grad)


def raw_loss(hidden: Tensor, weight: Tensor, main_grad: MainGrad | None) -> LinearLoss:
    settings = LinearSettings(Vocabulary(0, CASE.num_valid), chunk_bytes=1)
    loss = policy_token_loss(*TOKENS.arguments(), method="gppo", entropy_scale=BONUS)
    return fused_linear_loss(hidden, weight, CASE.targets, loss, settings, main_grad=main_grad)


@pytest.mark.parametrize("use_reentrant", (True, False))
@pytest.mark.parametrize("with_layer", (False, True), ids=("loss_alone", "layer_inside"))
def test_under_a_checkpoint_the_weight_gradient_counts_once(use_reentrant: bool, with_layer: bool) -> None:
    """Wherever it went, main_grad and autograd's gradient are in total what they would have been."""
    hidden, weight = leaves()
    main_grad, added = main_grad_before(), list[bool]()
    inner: Callable[[Tensor], Tensor] = torch.tanh if with_layer else (lambda x: x)

    def part(hidden: Tensor, weight: Tensor) -> Tensor:
        found = raw_loss(inner(hidden), weight, MainGrad(main_grad))
        added.append(found.added_to_main_grad)
        return found.loss

    with set_checkpoint_early_stop(False):
        loss = checkpoint(part, hidden, weight, use_reentrant=use_reentrant)
        assert isinstance(loss, Tensor)
        loss.backward()
    plain = leaves()
    raw_loss(inner(plain[0]), plain[1], None).loss.backward()
    total = main_grad - main_grad_before() + grad_of(weight)
    assert relative_error(total, grad_of(plain[1])) < 1e-5
    assert relative_error(grad_of(hidden), grad_of(plain[0])) < 1e-6
    assert sum(added) == (0 if use_reentrant else 1) and len(added) == (1 if not (with_layer or use_reentrant) else 2)
    if use_reentrant:
        assert torch.equal(main_grad, main_grad_before())


@every_path
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("with_main_grad", (False, True))
def test_nothing_of_the_size_of_all_logits_is_ever_held(
    with_main_grad: bool, dtype: torch.dtype, path: PathName
) -> None:
    case = linear_case(1001, num_tokens=80, width=16, dtype=dtype)
    tokens = policy_tokens(case)
    limit = case.num_tokens * case.num_valid // 4
    ones = torch.ones(case.num_tokens)

    def forward_and_backward(chunk_bytes: int) -> None:
        hidden, weight = leaves(case)
        held: dict[str, Any] = {"main_grad": torch.zeros(weight.shape)} if with_main_grad else {}
        loss = fused_linear_policy_loss(
            hidden,
            weight,
            case.targets,
            *tokens.arguments(),
            chunk_bytes=chunk_bytes,
            path=path,
            nll_scale=ones,
            entropy_scale=ones,
            **held,
        ).loss
        ((1.0 if with_main_grad else 2.0) * loss).backward()

    with NoTensorOf(limit):
        forward_and_backward(1)
    with NoTensorOf(limit), pytest.raises(AssertionError, match="made a tensor of"):
        forward_and_backward(1 << 26)


def test_autograd_keeps_the_gradients_and_nothing_else() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(*leaves())
    assert kept == []


@every_path
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_the_hidden_gradient_summed_over_ranks_is_made_in_float32(dtype: torch.dtype, path: PathName) -> None:
    """On one rank there is nothing to sum, and it must be the same gradient."""
    case = linear_case(1001, num_padding=7, dtype=dtype)
    hidden, weight = leaves(case)
    loss_of(hidden, weight, hidden_grad_reduce=True, path=path).backward()
    expected = by_autograd(case, policy_objective(TOKENS, POLICY))
    assert grad_of(hidden).dtype == dtype
    assert relative_error(grad_of(hidden), expected.grad_hidden) < gradient_tolerance(dtype, path)


def test_autocast_changes_no_bit() -> None:
    """It would take the float32 statistics for something to be sped up."""
    plain, cast = leaves(), leaves()
    first = loss_of(*plain)
    first.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = loss_of(*cast)
    second.backward()
    assert torch.equal(first, second)
    assert all(torch.equal(grad_of(a), grad_of(b)) for a, b in zip(plain, cast, strict=True))


def test_second_derivatives_are_refused() -> None:
    """The gradients were made in the forward, by code that autograd did not see."""
    hidden, weight = leaves()
    (gradient,) = torch.autograd.grad(loss_of(hidden, weight), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize("temperature", (0.0, -1.0, float("nan")))
def test_a_temperature_is_above_0(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature is {temperature}, expected a number above 0"):
        loss_of(*leaves(), temperature=temperature)


def test_a_kl_penalty_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"kl_coef is -0\.1: a penalty cannot be negative"):
        policy_token_loss(*TOKENS.arguments(), kl_coef=-0.1)
