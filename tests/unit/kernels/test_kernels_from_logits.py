"""The policy loss of logits that are there already, beside autograd in float64; in place or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import (
    EAGER,
    TRITON,
    LinearCase,
    NoTensorOf,
    Tokens,
    extra_tokens,
    linear_case,
    policy_objective,
    policy_tokens,
    relative_error,
    with_values,
)
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.policy_loss import FusedPolicyLoss, policy_loss_from_logits

both_paths = pytest.mark.parametrize("path", [EAGER, TRITON])
both_ways = pytest.mark.parametrize("inplace", (False, True), ids=("copied", "inplace"))


@dataclass(frozen=True)
class LogitCase:
    """logits [T, V] with padding columns, and the tokens of a policy loss with an entropy bonus."""

    logits: Tensor
    targets: Tensor
    num_valid: int
    tokens: Tokens
    entropy_scale: Tensor

    def loss(self, logits: Tensor, **settings: Any) -> FusedPolicyLoss:
        given = {"vocab_size": self.num_valid, "entropy_scale": self.entropy_scale} | settings
        return policy_loss_from_logits(logits, self.targets, *self.tokens.arguments(), **given)


def logit_case(num_valid: int = 1001, num_padding: int = 23, dtype: torch.dtype = torch.float32) -> LogitCase:
    """Tokens near those of the rounded logits, or else every ratio is far off."""
    case = linear_case(num_valid, num_padding=num_padding, scale=2.0)
    logits = (case.hidden @ case.weight.t()).to(dtype)
    eye = torch.eye(num_valid + num_padding)
    as_linear = LinearCase(logits.float(), eye, case.targets, num_valid)
    tokens = policy_tokens(as_linear, temperature=0.7)
    bonus = extra_tokens(as_linear, tokens, temperature=0.7).entropy_scale
    return LogitCase(logits, case.targets, num_valid, tokens, bonus)


@dataclass(frozen=True)
class Expected:
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def reference(case: LogitCase) -> Expected:
    logits = case.logits.double().requires_grad_()
    log_p = (logits[:, : case.num_valid] / 0.7).log_softmax(dim=1)
    logprobs = log_p.gather(1, case.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    loss = policy_objective(case.tokens, {"entropy_scale": case.entropy_scale})(logprobs, entropy)
    (gradient,) = torch.autograd.grad(loss, logits)
    return Expected(loss.detach(), logprobs.detach(), entropy.detach(), gradient)


@both_paths
@both_ways
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_values_and_gradient(dtype: torch.dtype, inplace: bool, path: PathName) -> None:
    case = logit_case(dtype=dtype)
    expected = reference(case)
    logits = case.logits.clone().requires_grad_()
    fused = case.loss(logits, temperature=0.7, inplace=inplace, path=path)
    assert torch.equal(logits, case.logits), "logits are logits until the backward"
    (3 * fused.loss).backward()
    found = fused.statistics
    torch.testing.assert_close(found.logprobs.double(), expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), expected.entropy, rtol=0, atol=1e-5)
    assert fused.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    assert logits.grad is not None and logits.grad.dtype == dtype
    limit = {torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert relative_error(logits.grad, 3 * expected.gradient) < (limit if path == "eager" else 2 * limit)
    assert not logits.grad[:, case.num_valid :].any()
    assert torch.equal(logits.detach(), logits.grad if inplace else case.logits)
    assert found.path.name == path


@both_paths
@both_ways
@pytest.mark.parametrize("layout", ("slice", "transposed", "rows_apart"))
def test_strides(layout: str, inplace: bool, path: PathName) -> None:
    """A slice of padded logits, columns that are not neighbours, rows with gaps: what lies beside stays as it was."""
    case = logit_case(num_padding=0)
    num_rows, num_columns = case.logits.shape
    around = torch.full((2 * num_rows, num_columns + 40), 7.0)
    if layout == "transposed":
        view = case.logits.t().contiguous().t()
    else:
        view = (around[:num_rows] if layout == "slice" else around[::2])[:, 8 : 8 + num_columns]
        view.copy_(case.logits)
    assert not view.is_contiguous()
    untouched = (around != 7.0).sum()
    view.requires_grad_()
    fused = case.loss(view, temperature=0.7, inplace=inplace, path=path)
    (gradient,) = torch.autograd.grad(fused.loss, view)
    expected = reference(case)
    torch.testing.assert_close(fused.statistics.logprobs.double(), expected.logprobs, rtol=0, atol=1e-5)
    assert relative_error(gradient, expected.gradient) < 5e-6
    assert torch.equal(view.detach(), gradient if inplace else case.logits)
    assert (around.detach() != 7.0).sum() == untouched


@both_paths
def test_a_backward_that_needs_overwritten_logits_is_refused(path: PathName) -> None:
    """Triton does not raise a tensor's version when it writes; we must, or the other gradient is silently wrong."""
    case = logit_case()
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 1.0
    other = logits.square().sum()
    case.loss(logits, inplace=True, path=path).loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@both_paths
def test_a_second_backward_in_place_is_refused(path: PathName) -> None:
    case = logit_case()
    logits = case.logits.clone().requires_grad_()
    loss = case.loss(logits * 1.0, inplace=True, path=path).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_on_a_copy_adds_the_same_again() -> None:
    case = logit_case()
    logits = case.logits.clone().requires_grad_()
    loss = case.loss(logits).loss
    loss.backward(retain_graph=True)
    assert logits.grad is not None
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)


def test_logits_can_be_read_between_forward_and_backward() -> None:
    case = logit_case()
    leaf = case.logits.clone().requires_grad_()
    logits = leaf * 2.0
    fused = case.loss(logits, inplace=True)
    assert torch.equal(logits, 2.0 * case.logits)
    (fused.loss + logits.sum()).backward()
    plain = case.logits.clone().requires_grad_()
    twice = plain * 2.0
    (case.loss(twice).loss + twice.sum()).backward()
    assert leaf.grad is not None and plain.grad is not None
    torch.testing.assert_close(leaf.grad, plain.grad)


# Plain torch works on blocks of a MiB, so it needs more logits than that to show that it does.
@pytest.mark.parametrize(("path", "shape"), [with_values(EAGER, (80, 16_384)), with_values(TRITON, (16, 1001))])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_in_place_nothing_of_the_size_of_the_logits_is_made(
    dtype: torch.dtype, path: PathName, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_columns = shape
    logits = torch.randn(num_tokens, num_columns, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(num_columns, (num_tokens,), generator=generator)
    ones = torch.ones(num_tokens)
    limit = num_tokens * num_columns // 4

    def forward_and_backward(*, inplace: bool) -> None:
        loss = policy_loss_from_logits(
            logits, targets, -ones, ones, ones, temperature=0.7, entropy_scale=ones, inplace=inplace, path=path
        ).loss
        torch.autograd.grad(loss, logits)

    with NoTensorOf(limit, given=logits), pytest.raises(AssertionError, match="made a tensor of"):
        forward_and_backward(inplace=False)
    with NoTensorOf(limit, given=logits):
        forward_and_backward(inplace=True)


def test_without_gradients_only_the_value_is_computed() -> None:
    case = logit_case()
    with torch.no_grad():
        quiet = case.loss(case.logits.clone().requires_grad_(), inplace=True)
    frozen = case.loss(case.logits)
    assert not quiet.loss.requires_grad and not frozen.loss.requires_grad
    assert quiet.loss.item() == frozen.loss.item()


@both_paths
def test_a_shard_of_nothing_but_padding(path: PathName) -> None:
    """Its columns belong to nobody, whatever is in them."""
    case = logit_case()
    logits = torch.full((37, 64), 1e4, requires_grad=True)
    fused = case.loss(logits, vocab_start=1024, path=path)
    assert fused.statistics.logprobs.shape == (37,)
    (gradient,) = torch.autograd.grad(fused.loss, logits)
    assert not gradient.any()


def test_tensors_and_paths_that_do_not_fit_are_refused() -> None:
    case = logit_case()
    with pytest.raises(ValueError, match=r"expected logits \[T, V/tp\] and targets \[T\], got \[37, 1, 1024\]"):
        case.loss(case.logits[:, None])
    with pytest.raises(ValueError, match=r"expected logits \[T, V/tp\] and targets \[T\], got \[36, 1024\] and \[37\]"):
        case.loss(case.logits[:36])
    with pytest.raises(ValueError, match=r"triton_scaled_exp makes its logits from hidden states; ask for auto, eager"):
        case.loss(case.logits, path="triton_scaled_exp")
    with pytest.raises(ValueError, match=r"kl_coef is 0.1, but there are no reference_logprobs"):
        case.loss(case.logits, kl_coef=0.1)
