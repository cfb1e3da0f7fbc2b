"""The three products: what is multiplied in which precision, and where the weight's gradient adds up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import CPU, by_autograd, linear_case, relative_error
from megatron_klear_kernels.linear_policy_loss import products
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.products import (
    WeightGradient,
    fast_products,
    hidden_gradient,
    logits_product,
    operand,
)
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

SETTING = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture
def bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has them, as far as our code is concerned."""
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: True)


@pytest.fixture(params=("none", "ieee"))
def precision_before(request: pytest.FixtureRequest) -> Iterator[str]:
    before = SETTING.fp32_precision
    SETTING.fp32_precision = request.param
    yield request.param
    SETTING.fp32_precision = before


@pytest.mark.usefixtures("bfloat16_units")
def test_the_setting_is_on_inside_and_restored_after(precision_before: str) -> None:
    with fast_products(torch.bfloat16, CPU):
        assert SETTING.fp32_precision == "bf16"
    assert SETTING.fp32_precision == precision_before


@pytest.mark.usefixtures("bfloat16_units")
def test_the_setting_is_restored_after_an_error(precision_before: str) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), fast_products(torch.bfloat16, CPU):
        raise RuntimeError("in the middle")
    assert SETTING.fp32_precision == precision_before


@pytest.mark.usefixtures("bfloat16_units")
def test_calls_within_calls_leave_it_as_it_was(precision_before: str) -> None:
    with fast_products(torch.bfloat16, CPU):
        with fast_products(torch.bfloat16, CPU):
            pass
        assert SETTING.fp32_precision == "bf16"
    assert SETTING.fp32_precision == precision_before


@pytest.mark.usefixtures("bfloat16_units")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_only_bfloat16_values_are_multiplied_that_way(dtype: torch.dtype, precision_before: str) -> None:
    """float32 values would lose digits, float16's do not fit."""
    with fast_products(dtype, CPU):
        assert SETTING.fp32_precision == precision_before


def test_a_cpu_without_such_units_is_left_alone(monkeypatch: pytest.MonkeyPatch, precision_before: str) -> None:
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: False)
    with fast_products(torch.bfloat16, CPU):
        assert SETTING.fp32_precision == precision_before


def test_float32_results_are_those_of_float32_products() -> None:
    """An error of bfloat16 products would be a thousand times as large."""
    case = linear_case(512, num_tokens=64, width=256)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    found = fused_linear_logprobs(hidden, weight, case.targets, LinearSettings(Vocabulary(0, 512)))
    found.logprobs.sum().backward()
    expected = by_autograd(case, lambda logprobs, _: logprobs.sum())
    torch.testing.assert_close(found.logprobs.double(), expected.logprobs, rtol=0, atol=1e-5)
    assert hidden.grad is not None and relative_error(hidden.grad, expected.grad_hidden) < 2e-6
    assert weight.grad is not None and relative_error(weight.grad, expected.grad_weight) < 2e-6


def test_after_a_bfloat16_call_other_products_are_as_before() -> None:
    first, second = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    before = first @ second
    case = linear_case(512, num_tokens=64, width=256, dtype=torch.bfloat16)
    hidden = case.hidden.clone().requires_grad_()
    found = fused_linear_logprobs(hidden, case.weight, case.targets, LinearSettings(Vocabulary(0, 512)))
    found.logprobs.sum().backward()
    assert torch.equal(first @ second, before)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_operands_on_a_cpu_are_float32(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype)
    assert operand(tensor).dtype == torch.float32 and torch.equal(operand(tensor), tensor.float())
    assert (operand(tensor) is tensor) == (dtype == torch.float32)


def test_bfloat16_values_give_float32_logits() -> None:
    case = linear_case(1000, num_tokens=48, width=128, dtype=torch.bfloat16)
    logits = torch.empty(48, 1000)
    with fast_products(torch.bfloat16, CPU):
        logits_product(operand(case.hidden), operand(case.weight), out=logits)
    exact = case.hidden.double() @ case.weight.double().t()
    # Rounding to bfloat16 would show as 2^-9 of the largest logit.
    assert (logits.double() - exact).abs().max() < 2**-16 * exact.abs().max()


def randoms(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("in_float32", (False, True))
def test_hidden_gradient(in_float32: bool) -> None:
    d_logits, weight = randoms((32, 100), (100, 8))
    found = hidden_gradient(d_logits, weight, in_float32=in_float32)
    torch.testing.assert_close(found, d_logits @ weight)


@pytest.mark.parametrize("with_main_grad", (False, True))
def test_the_weight_gradient_adds_up(with_main_grad: bool) -> None:
    d_logits, hidden, weight, before = randoms((96, 100), (96, 8), (100, 8), (100, 8))
    main_grad = before.clone() if with_main_grad else None
    total = WeightGradient(weight, main_grad)
    for rows in (slice(0, 32), slice(32, 64), slice(64, 96)):
        total.add(d_logits[rows], hidden[rows])
    expected = d_logits.t() @ hidden
    if main_grad is None:
        torch.testing.assert_close(total.result(), expected)
    else:
        torch.testing.assert_close(main_grad, before + expected)
        assert total.own is None and not total.result().any() and total.result().shape == weight.shape


def poisoned(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def test_what_memory_held_before_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product overwrites; NaN that lay there must not survive a factor of 0."""
    d_logits, hidden, weight = randoms((32, 100), (32, 8), (100, 8))
    monkeypatch.setattr(torch, "empty", poisoned)
    for dtype in (torch.float32, torch.bfloat16):
        total = WeightGradient(weight, None)
        with fast_products(dtype, CPU):
            total.add(d_logits, hidden)
        torch.testing.assert_close(total.result(), d_logits.t() @ hidden, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_without_any_product_the_gradient_is_zeros_of_the_weight_s_type(dtype: torch.dtype) -> None:
    found = WeightGradient(torch.ones(100, 8, dtype=dtype), None).result()
    assert found.shape == (100, 8) and found.dtype == dtype and not found.any()


def test_results_are_rounded_to_the_weight_s_type_once() -> None:
    """Sixteen additions of 1/256 to 1 in bfloat16 would all be lost."""
    total = WeightGradient(torch.zeros(4, 4, dtype=torch.bfloat16), None)
    total.add(torch.eye(4), torch.eye(4))
    for _ in range(16):
        total.add(torch.eye(4) / 256, torch.eye(4))
    assert torch.equal(total.result(), (torch.eye(4) * (1 + 16 / 256)).bfloat16())


def test_bfloat16_gradients_do_not_depend_on_the_number_of_chunks() -> None:
    case = linear_case(512, num_tokens=256, width=64, dtype=torch.bfloat16)

    def grad_weight(chunk_bytes: int) -> Tensor:
        weight = case.weight.clone().requires_grad_()
        settings = LinearSettings(Vocabulary(0, 512), chunk_bytes=chunk_bytes)
        fused_linear_logprobs(case.hidden, weight, case.targets, settings).logprobs.sum().backward()
        assert weight.grad is not None
        return weight.grad

    whole, split = grad_weight(1 << 30), grad_weight(1)
    expected = by_autograd(case, lambda logprobs, _: logprobs.sum()).grad_weight
    assert (split != whole).float().mean() < 0.01
    for found in (whole, split):
        assert relative_error(found, expected) < 3e-3
