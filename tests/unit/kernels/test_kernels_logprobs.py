"""fused_linear_logprobs against plain float64 arithmetic over the whole [T, V]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import (
    WIDTH,
    LinearCase,
    NoTensorOf,
    Outcome,
    by_autograd,
    every_path,
    linear_case,
    relative_error,
)
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import LinearLogprobs, fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

# 1001 and 4099 are no multiple of anything a tile could have.
VOCABULARIES = (1000, 1001, 4099)


def fused(case: LinearCase, hidden: Tensor, weight: Tensor, **settings: Any) -> LinearLogprobs:
    """`settings`: those of the layer, and the function's own."""
    own = {name: settings.pop(name) for name in ("rows", "entropy_gradient", "main_grad") if name in settings}
    vocab = Vocabulary(0, case.num_valid)
    return fused_linear_logprobs(hidden, weight, case.targets, LinearSettings(vocab, **settings), **own)


def upstream_of(case: LinearCase) -> tuple[Tensor, Tensor]:
    """Gradients of log-probs and entropies, [T] each."""
    first, second = torch.randn(2, case.num_tokens, generator=torch.Generator().manual_seed(5))
    return first, second


def run(case: LinearCase, *, weigh: tuple[float, float] = (1.0, 0.0), **settings: Any) -> Outcome:
    """`weigh` says how much log-probs and entropies count in the objective."""
    hidden, weight = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
    found = fused(case, hidden, weight, **settings)
    first, second = upstream_of(case)
    objective = (weigh[0] * first * found.logprobs).sum() + (weigh[1] * second * found.entropy).sum()
    objective.backward()
    assert found.entropy.requires_grad == settings.get("entropy_gradient", False)
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(objective.detach(), found.logprobs.detach(), found.entropy.detach(), hidden.grad, weight.grad)


def reference(case: LinearCase, *, temperature: float = 1.0, weigh: tuple[float, float] = (1.0, 0.0)) -> Outcome:
    first, second = (upstream.double() for upstream in upstream_of(case))
    return by_autograd(
        case,
        lambda logprobs, entropy: (weigh[0] * first * logprobs + weigh[1] * second * entropy).sum(),
        temperature=temperature,
    )


def assert_near(actual: Outcome, expected: Outcome, case: LinearCase, *, atol: float, grad_rtol: float = 1e-5) -> None:
    """Gradients are held against the size of what is summed up in their column, plus one rounding to their dtype."""
    torch.testing.assert_close(actual.logprobs.double(), expected.logprobs, rtol=1e-6, atol=atol)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=atol)
    for mine, theirs, summed in (
        (actual.grad_hidden, expected.grad_hidden, case.weight[: case.num_valid]),
        (actual.grad_weight, expected.grad_weight, case.hidden),
    ):
        # One for the gradient of the logits, one for the result; Triton's interpreter truncates.
        rounding = 2 * torch.finfo(mine.dtype).eps * theirs.abs()
        limit = grad_rtol * summed.double().abs().amax(dim=0) + rounding
        assert ((mine.double() - theirs).abs() <= limit).all()
    assert not actual.grad_weight[case.num_valid :].any(), "padding of the vocabulary got a gradient"


@every_path
@pytest.mark.parametrize(
    ("num_valid", "num_padding", "temperature"), [(1000, 0, 1.0), (1001, 13, 0.7), (4099, 29, 0.7)]
)
def test_values_and_gradients(num_valid: int, num_padding: int, temperature: float, path: PathName) -> None:
    case = linear_case(num_valid, num_padding=num_padding)
    actual = run(case, temperature=temperature, path=path)
    assert actual.logprobs.dtype == actual.entropy.dtype == torch.float32
    assert_near(actual, reference(case, temperature=temperature), case, atol=5e-6)


@every_path
@pytest.mark.parametrize("offset", (0.0, 100.0, 1000.0, -1000.0))
def test_a_common_offset_of_the_logits_costs_only_their_own_rounding(offset: float, path: PathName) -> None:
    """A logit near 1,000 is known to 6e-5 in float32; lse - E[z] would be off by as much as 0.06."""
    case = linear_case(1001, offset=offset)
    rounding = abs(offset) / 0.7 * 2**-23
    actual, expected = run(case, temperature=0.7, path=path), reference(case, temperature=0.7)
    assert_near(actual, expected, case, atol=5e-6 + rounding, grad_rtol=1e-3)
    # The roundings of a thousand logits average out in the entropy, unless the offset enters it again.
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0, atol=5e-6 + rounding / 8)


@every_path
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_operands_give_float32_accuracy_and_gradients_of_their_type(
    dtype: torch.dtype, path: PathName
) -> None:
    case = linear_case(1001, num_padding=7, dtype=dtype)
    actual, expected = run(case, temperature=0.7, path=path), reference(case, temperature=0.7)
    assert actual.logprobs.dtype == torch.float32
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == dtype
    assert_near(actual, expected, case, atol=5e-6, grad_rtol=torch.finfo(dtype).eps)
    limit = torch.finfo(dtype).eps * (0.5 if path == "eager" else 1.5)
    assert relative_error(actual.grad_hidden, expected.grad_hidden) < limit
    assert relative_error(actual.grad_weight, expected.grad_weight) < limit


def test_bfloat16_weight_gradients_do_not_depend_on_the_number_of_chunks() -> None:
    """They add up in float32 and are rounded once."""
    case = linear_case(1000, num_tokens=64, dtype=torch.bfloat16)
    whole, split = run(case), run(case, chunk_bytes=1)
    torch.testing.assert_close(split.grad_weight, whole.grad_weight, rtol=2**-7, atol=0)
    assert (split.grad_weight != whole.grad_weight).float().mean() < 0.01


@pytest.mark.parametrize("scale", (30.0, 300.0))
def test_peaked_rows(scale: float) -> None:
    case = linear_case(1001, num_padding=7, scale=scale)
    best = (case.hidden.double() @ case.weight[:1001].double().t()).argmax(dim=1)
    case = replace(case, targets=torch.where(torch.arange(37) % 2 == 0, best, case.targets))
    actual = run(case)
    assert_near(actual, reference(case), case, atol=scale * 2e-6, grad_rtol=scale * 1e-5)
    assert (actual.logprobs <= 0).all() and (actual.entropy >= 0).all()
    assert actual.logprobs.min() < -scale and actual.logprobs.max() > -1e-3


@every_path
@pytest.mark.parametrize("num_valid", VOCABULARIES)
def test_a_logprob_is_never_positive_and_an_entropy_never_negative(num_valid: int, path: PathName) -> None:
    """Padding columns in the log-sum-exp, or logits in reduced precision, once gave +123 elsewhere."""
    hot = linear_case(num_valid, num_padding=13, num_tokens=50, scale=1000.0)
    logits = hot.hidden.double() @ hot.weight[:num_valid].double().t()
    found = run(replace(hot, targets=logits.argmax(dim=1)), path=path)
    assert (found.logprobs <= 0).all() and (found.entropy >= 0).all()


@pytest.mark.parametrize("rows", (1, 5, 36, 37, 100))
def test_chunks_change_nothing(rows: int) -> None:
    case = linear_case(1001, num_padding=7)
    whole, split = run(case, temperature=0.7), run(case, temperature=0.7, chunk_bytes=rows * 4 * 1008)
    for mine, theirs in zip(vars(split).values(), vars(whole).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_same_call_gives_the_same_bits() -> None:
    case = linear_case(1001, num_padding=7)
    first, second = run(case), run(case)
    assert torch.equal(first.logprobs, second.logprobs) and torch.equal(first.grad_weight, second.grad_weight)


def test_a_gradient_of_the_entropy_changes_no_value() -> None:
    case = linear_case(1000)
    value, gradient = run(case), run(case, entropy_gradient=True)
    assert torch.equal(value.entropy, gradient.entropy) and torch.equal(value.logprobs, gradient.logprobs)
    assert torch.equal(value.grad_hidden, gradient.grad_hidden)
    assert torch.equal(value.grad_weight, gradient.grad_weight)


@every_path
@pytest.mark.parametrize("weigh", [(0.0, 1.0), (1.0, 1.0)], ids=("entropy_alone", "with_logprobs"))
@pytest.mark.parametrize(("num_valid", "num_padding", "temperature"), [(1000, 0, 1.0), (1001, 13, 0.7)])
def test_gradient_of_the_entropy(
    num_valid: int, num_padding: int, temperature: float, weigh: tuple[float, float], path: PathName
) -> None:
    case = linear_case(num_valid, num_padding=num_padding, scale=2.0)
    expected = reference(case, temperature=temperature, weigh=weigh)
    actual = run(case, weigh=weigh, entropy_gradient=True, temperature=temperature, path=path, chunk_bytes=1)
    assert_near(actual, expected, case, atol=1e-5)


@every_path
def test_gradient_of_the_entropy_of_certain_and_of_uniform_rows(path: PathName) -> None:
    """Where probabilities underflow, p log p is 0, not NaN; where all are equal, the entropy is at its top."""
    case = linear_case(1001, num_padding=7, scale=300.0)
    hidden = case.hidden.clone()
    hidden[::2] = 0.0
    case = replace(case, hidden=hidden)
    actual = run(case, weigh=(0.0, 1.0), entropy_gradient=True, path=path)
    expected = reference(case, weigh=(0.0, 1.0))
    assert actual.grad_hidden.isfinite().all() and actual.grad_weight.isfinite().all()
    assert_near(actual, expected, case, atol=6e-4, grad_rtol=3e-3)
    assert actual.grad_hidden[::2].abs().max() < 1e-5


def test_without_its_gradient_an_entropy_moves_nothing() -> None:
    case = linear_case(1001, num_padding=7)
    plain, silent = run(case), run(case, weigh=(1.0, 1.0))
    assert torch.equal(silent.grad_hidden, plain.grad_hidden) and torch.equal(silent.grad_weight, plain.grad_weight)


@every_path
def test_strided_operands(path: PathName) -> None:
    case = linear_case(1001)
    hidden = torch.stack((case.hidden, torch.full_like(case.hidden, 9.0)), dim=1)[:, 0]
    weight = case.weight.t().contiguous().t()
    assert not hidden.is_contiguous() and not weight.is_contiguous()
    assert_near(run(replace(case, hidden=hidden, weight=weight), path=path), reference(case), case, atol=5e-6)


@every_path
@pytest.mark.parametrize("entropy_gradient", (False, True))
def test_nothing_of_the_size_of_all_logits_is_ever_held(entropy_gradient: bool, path: PathName) -> None:
    """Forward and backward, and what autograd keeps: a chunked head whose chunks survive would bound nothing."""
    num_tokens, num_valid = 80, 1001
    case = linear_case(num_valid, num_tokens=num_tokens, width=16)
    limit = num_tokens * num_valid // 4
    settings = {"path": path, "entropy_gradient": entropy_gradient}
    with NoTensorOf(limit):
        run(case, chunk_bytes=1, **settings)
    with NoTensorOf(limit), pytest.raises(AssertionError, match="made a tensor of"):
        run(case, chunk_bytes=1 << 26, **settings)


def test_autograd_keeps_inputs_and_four_numbers_a_token() -> None:
    case = linear_case(1001, num_tokens=64)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(case, case.hidden.clone().requires_grad_(), case.weight, chunk_bytes=1)
    assert sorted(kept) == sorted((case.hidden.numel(), case.weight.numel(), 4 * 64))


def test_a_changed_weight_is_noticed_by_the_backward() -> None:
    """Its logits would be made again, and would be others."""
    case = linear_case(1000)
    weight = case.weight.clone()
    found = fused(case, case.hidden.clone().requires_grad_(), weight)
    weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.logprobs.sum().backward()


@pytest.mark.parametrize("wanted", ("hidden", "weight"))
def test_only_one_of_them_has_a_gradient(wanted: str) -> None:
    case = linear_case(1000)
    operands = {"hidden": case.hidden.clone(), "weight": case.weight.clone()}
    operands[wanted].requires_grad_()
    found = fused(case, operands["hidden"], operands["weight"])
    (found.logprobs * upstream_of(case)[0]).sum().backward()
    both = run(case)
    grad = operands[wanted].grad
    assert grad is not None and torch.equal(grad, both.grad_hidden if wanted == "hidden" else both.grad_weight)


@pytest.mark.parametrize("passes", (1, 2))
def test_the_backward_adds_to_main_grad_and_autograd_gets_zeros(passes: int) -> None:
    case = linear_case(1000, dtype=torch.bfloat16)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    main_grad = before.clone()
    found = fused(case, hidden, weight, main_grad=main_grad, chunk_bytes=1)
    assert torch.equal(main_grad, before)
    objective = (found.logprobs * upstream_of(case)[0]).sum()
    for _ in range(passes):
        objective.backward(retain_graph=True)
    assert weight.grad is not None and not weight.grad.any()
    assert relative_error(main_grad - before, passes * reference(case).grad_weight) < 3e-3
    with torch.no_grad():
        fused(case, hidden, weight, main_grad=main_grad)
    assert relative_error(main_grad - before, passes * reference(case).grad_weight) < 3e-3


def test_without_gradients_nothing_is_recorded() -> None:
    case = linear_case(1000)
    hidden = case.hidden.clone().requires_grad_()
    with torch.no_grad():
        quiet = fused(case, hidden, case.weight)
    frozen = fused(case, case.hidden, case.weight)
    assert not quiet.logprobs.requires_grad and not frozen.logprobs.requires_grad
    assert torch.equal(quiet.logprobs, fused(case, hidden, case.weight).logprobs)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = linear_case(1000)
    message = (
        r"hidden states are \[37, 1000\] but the output weight is \[1000, 24\]: expected \[T, H\] and"
        r" \[V/tp, H\] of one width H; hand over hidden states, not logits"
    )
    with pytest.raises(ValueError, match=message):
        fused(case, torch.zeros(37, 1000), case.weight)
    with pytest.raises(ValueError, match=r"hidden states are \[37, 1, 24\] but"):
        fused(case, case.hidden[:, None], case.weight)
    with pytest.raises(ValueError, match=r"expected one target for each of 36 rows, got targets \[37\]"):
        fused(case, case.hidden[:36], case.weight)
    with pytest.raises(ValueError, match=r"hidden states are torch.bfloat16 but the output weight is torch.float32"):
        fused(case, case.hidden.bfloat16(), case.weight)
    for main_grad in (torch.zeros(WIDTH), torch.zeros(1000, WIDTH, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"main_grad is torch\..*: expected float32 \[1000, 24\], the shape"):
            fused(case, case.hidden, case.weight, main_grad=main_grad)
