"""RMSNorm, all implementations with one set of tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.small_kernels import (
    DTYPES,
    EPS,
    ON_CPU,
    Where,
    cases,
    check_rms_norm,
    exact_rms_norm,
    rows_of_many_sizes,
)
from megatron_klear_kernels.implementations import Implementation
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.triton_support import interpreted

# Megatron norms [T, 1, hidden], and [T, 1, heads, head_dim] for queries and keys.
SHAPES = [(1, 1, 1), (7, 1, 32), (5, 1, 4, 12), (37, 3, 128), (3, 1, 1000), (2, 1001), (2, 16384)]
each = pytest.mark.parametrize("implementation", ON_CPU)
each_case = pytest.mark.parametrize(("implementation", "dtype"), cases(*DTYPES), ids=str)


def test_the_closed_form_is_the_derivative() -> None:
    """Central differences, in float64."""
    where = Where("eager", torch.float32)
    x, weight, grad = (where.random(s, seed).double() for seed, s in enumerate(((3, 5), (5,), (3, 5))))
    _, grad_x, grad_weight = exact_rms_norm(x, weight, grad)

    def value(x: Tensor, weight: Tensor) -> float:
        return float((exact_rms_norm(x, weight, grad)[0] * grad).sum())

    for index in range(15):
        step = torch.zeros(15, dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-6).view(3, 5)
        slope = (value(x + step, weight) - value(x - step, weight)) / 2e-6
        assert slope == pytest.approx(float(grad_x.flatten()[index]), abs=1e-8)
    for index in range(5):
        step = torch.zeros(5, dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-6)
        slope = (value(x, weight + step) - value(x, weight - step)) / 2e-6
        assert slope == pytest.approx(float(grad_weight[index]), abs=1e-8)


@each_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, implementation: Implementation) -> None:
    where = Where(implementation, dtype)
    check_rms_norm(rows_of_many_sizes(shape, where), where.random(shape[-1:], 2), where.random(shape, 3), where)


@each
def test_rows_may_lie_apart(implementation: Implementation) -> None:
    """Keys are a slice of the fused projection, an expanded gradient has no strides at all."""
    where = Where(implementation, torch.float32)
    whole, weight = where.random((6, 1, 3, 40), 1), where.random((12,), 2)
    for part in (whole[..., 7:19], whole[::2, :, 1, 28:], whole.transpose(0, 3)[:12].transpose(0, 3)):
        assert not part.is_contiguous()
        check_rms_norm(part, weight, where.random((*part.shape[:-1], 20), 3)[..., 8:], where)
        check_rms_norm(part, weight, where.random((1,), 4).expand(part.shape), where)
    columns = where.random((12, 5), 5).t()
    check_rms_norm(columns, weight, where.random((12, 5), 6).t(), where)


@each
def test_no_rows_give_no_output_and_a_gradient_of_zero(implementation: Implementation) -> None:
    x, weight = torch.randn(0, 1, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    out = rms_norm(x, weight, EPS, implementation=implementation)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None and weight.grad is not None
    assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize(("implementation", "dtype"), cases(torch.float32, torch.float16), ids=str)
def test_the_first_saved_tensor_gives_the_output_again(dtype: torch.dtype, implementation: Implementation) -> None:
    """To the bit: a layer that keeps no output computes it from there."""
    where = Where(implementation, dtype)
    x, weight = rows_of_many_sizes((9, 1, 50), where).requires_grad_(), where.random((50,), 2)
    out = rms_norm(x, weight, EPS, implementation=implementation)
    assert out.grad_fn is not None
    normed, kept_weight, inverse = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert torch.equal(normed * weight, out) and kept_weight is not None
    assert inverse.dtype == torch.float32 and inverse.shape == (9, 1, 1)


@each
def test_a_row_gives_the_same_bits_alone_and_without_gradients(implementation: Implementation) -> None:
    where = Where(implementation, torch.float32)
    x, weight = where.random((70, 37), 1).requires_grad_(), where.random((37,), 2)
    whole = rms_norm(x, weight, EPS, implementation=implementation)
    with torch.no_grad():
        silent = rms_norm(x, weight, EPS, implementation=implementation)
        alone = rms_norm(x[41:42], weight, EPS, implementation=implementation)
    assert silent.grad_fn is None and torch.equal(silent, whole)
    assert torch.equal(alone, whole[41:42])


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is not in use")
@pytest.mark.parametrize("width", [37, 1500])
def test_the_gradient_of_the_weight_is_a_sum_over_programs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer programs than tiles each takes several, the last of them cut off; run twice, the same bits."""
    monkeypatch.setattr("megatron_klear_kernels.rms_norm.triton_kernels._MIN_PROGRAMS", 3)
    monkeypatch.setattr("megatron_klear_kernels.rms_norm.triton_kernels._MAX_PROGRAMS", 3)
    where, num_rows = Where("triton", torch.float32), 7 * max(2048 // width, 1) + 1
    x, grad = where.random((num_rows, width), 1), where.random((num_rows, width), 3)
    weight = where.random((width,), 2)
    check_rms_norm(x, weight, grad, where)
    found = []
    for _ in range(2):
        leaf = weight.clone().requires_grad_()
        rms_norm(x, leaf, EPS, implementation="triton").backward(grad)
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is not in use")
def test_offsets_beyond_32_bits(huge_buffer: Tensor) -> None:
    """Row 2 of a view whose row stride is 2^30 lies at 2^31: an int32 product would point before the tensor."""
    where = Where("triton", torch.float16)
    x = huge_buffer.as_strided((3, 16), (2**30, 1))
    x.copy_(where.random((3, 16), 1))
    check_rms_norm(x, where.random((16,), 2), where.random((3, 16), 3), where)
