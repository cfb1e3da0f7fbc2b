"""SwiGLU, all implementations with one set of tests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.small_kernels import DTYPES, ON_CPU, Where, cases, check_swiglu, exact_swiglu
from megatron_klear_kernels.implementations import Implementation
from megatron_klear_kernels.swiglu.autograd import swiglu
from megatron_klear_kernels.triton_support import interpreted

SHAPES = [(1, 2), (7, 1, 96), (40, 3, 130), (2, 1, 2 * 1000), (2, 2 * 5001)]
each = pytest.mark.parametrize("implementation", ON_CPU)
each_case = pytest.mark.parametrize(("implementation", "dtype"), cases(*DTYPES), ids=str)


def test_the_closed_form_is_the_derivative() -> None:
    """Central differences, in float64."""
    where = Where("eager", torch.float32)
    x, grad = where.random((3, 8), 1).double(), where.random((3, 4), 2).double()
    _, grad_x = exact_swiglu(x, grad)

    def value(x: Tensor) -> float:
        return float((exact_swiglu(x, grad)[0] * grad).sum())

    for index in range(24):
        step = torch.zeros(24, dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-6).view(3, 8)
        slope = (value(x + step) - value(x - step)) / 2e-6
        assert slope == pytest.approx(float(grad_x.flatten()[index]), abs=1e-8)


@each_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, implementation: Implementation) -> None:
    where = Where(implementation, dtype)
    check_swiglu(3 * where.random(shape, 1), where.random((*shape[:-1], shape[-1] // 2), 2), where)


@each
def test_rows_may_lie_apart(implementation: Implementation) -> None:
    where = Where(implementation, torch.float32)
    whole = where.random((6, 2, 100), 1)
    for part in (whole[..., 3:67], whole[::2, :1, :64], whole.transpose(0, 1)[..., :64]):
        assert not part.is_contiguous()
        check_swiglu(part, where.random((*part.shape[:-1], 96), 2)[..., 64:], where)
        check_swiglu(part, where.random((1,), 3).expand(*part.shape[:-1], 32), where)
    columns = where.random((64, 5), 4).t()
    check_swiglu(columns, where.random((32, 5), 5).t(), where)


@each
def test_an_expert_without_tokens(implementation: Implementation) -> None:
    x = torch.randn(0, 16, requires_grad=True)
    out = swiglu(x, implementation=implementation)
    out.sum().backward()
    assert out.shape == (0, 8) and x.grad is not None and x.grad.shape == x.shape


@each
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gates_beyond_the_range_of_exp(implementation: Implementation) -> None:
    gates = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4])
    x = torch.cat((gates, torch.full((6,), 2.0)))[None].requires_grad_()
    out = swiglu(x, implementation=implementation)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.tolist() == [[0.0, 0.0, 0.0, 0.0, 200.0, 2e4]]
    assert grad[0, :6].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(("implementation", "dtype"), cases(torch.float32, torch.float16), ids=str)
def test_rounded_as_torch_rounds_it(dtype: torch.dtype, implementation: Implementation) -> None:
    """silu(gate) first, then the product: the bits of torch, but where its exp rounds to the other side."""
    x = (2 * torch.randn(50, 200, generator=torch.Generator().manual_seed(1))).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    out, wanted = swiglu(x, implementation=implementation), F.silu(gate) * up
    few = 0.0 if implementation == "eager" else 0.4 if dtype == torch.float32 else 2e-3
    assert (out != wanted).float().mean() <= few
    torch.testing.assert_close(out, wanted)


@each
def test_only_the_input_is_kept(implementation: Implementation) -> None:
    x, kept = torch.randn(5, 8, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(x, implementation=implementation)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is not in use")
def test_offsets_beyond_32_bits(huge_buffer: Tensor) -> None:
    """Row 2 of a view whose row stride is 2^30 lies at 2^31: an int32 product would point before the tensor."""
    where = Where("triton", torch.float16)
    x = huge_buffer.as_strided((3, 16), (2**30, 1))
    x.copy_(where.random((3, 16), 1))
    check_swiglu(x, where.random((3, 8), 2), where)
