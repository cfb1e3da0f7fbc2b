"""RMSNorm, SwiGLU and rotary positions in closed form (float64), and what a test of any implementation checks.

An implementation is named as in implementations.py; the device says where it runs: unit tests run all on a CPU, Triton
in its interpreter, GPU tests run torch's and Triton's on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_klear_kernels.implementations import Implementation
from megatron_klear_kernels.native.library import why_missing
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu
from megatron_klear_kernels.triton_support import interpreted, why_unavailable

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TRITON = pytest.mark.skipif(
    why_unavailable(torch.device("cpu")) is not None, reason="Triton's interpreter is not in use"
)
_NATIVE = pytest.mark.skipif(why_missing() is not None, reason=f"no C kernels: {why_missing()}")
ON_CPU = ("eager", pytest.param("triton", marks=_TRITON), pytest.param("native", marks=_NATIVE))
"""Implementations for pytest's parametrize, where tensors are on a CPU."""


def cases(*dtypes: torch.dtype) -> list[object]:
    """The same with each of these dtypes that they know."""
    return [
        *(("eager", dtype) for dtype in dtypes),
        *(pytest.param("triton", dtype, marks=_TRITON) for dtype in dtypes),
        pytest.param("native", torch.float32, marks=_NATIVE),
    ]


@dataclass(frozen=True)
class Where:
    """Which implementation runs, on what kind of tensors."""

    implementation: Implementation
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def rounding(self) -> float:
        """Largest relative error of one rounding; float32 arithmetic in several steps is allowed sixteen of its own."""
        if self.dtype == torch.float32:
            return 2.0**-20
        if self.dtype == torch.float16:
            return 2.0**-11
        # The interpreter cuts off what does not fit.
        cuts_off = interpreted() and self.implementation == "triton"
        return 2.0**-7 if cuts_off else 2.0**-8

    def random(self, shape: Sequence[int], seed: int) -> Tensor:
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)


def assert_within(found: Tensor, exact: Tensor, limit: Tensor) -> None:
    """No element further from the exact one than its own limit."""
    assert found.shape == exact.shape
    excess = (found.double() - exact).abs() - limit
    assert bool((excess <= 0).all()), f"worst excess {excess.max().item():.3g} of {excess.numel()} elements"


def exact_rms_norm(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradients of x and of the weight, in float64."""
    x, weight, grad = x.detach().double(), weight.detach().double(), grad.double()
    root = (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    unit, wanted = x / root, grad * weight
    grad_x = (wanted - unit * (wanted * unit).mean(dim=-1, keepdim=True)) / root
    return unit * weight, grad_x, (grad * unit).flatten(0, -2).sum(dim=0)


def exact_swiglu(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of x, in float64."""
    (gate, up), grad = x.detach().double().chunk(2, dim=-1), grad.double()
    share = gate.sigmoid()
    grad_gate = grad * up * share * (1 + gate * (1 - share))
    return gate * share * up, torch.cat((grad_gate, grad * gate * share), dim=-1)


def exact_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] as complex numbers turned by the angles [T, 1, D/2] of a table, which may be rounded."""
    turned = torch.complex(*x.detach().double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


def check_rms_norm(x: Tensor, weight: Tensor, grad: Tensor, where: Where) -> None:
    """Values and gradients; x and grad [..., H] of any strides."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = rms_norm(x, weight, EPS, implementation=where.implementation)
    found_x, found_weight = torch.autograd.grad(out, (x, weight), grad)
    assert out.dtype == found_x.dtype == found_weight.dtype == where.dtype
    exact, grad_x, grad_weight = exact_rms_norm(x, weight, grad)
    assert_within(out, exact, 2.1 * where.rounding * exact.abs() + 1e-7)
    # Parts of a gradient cancel: the limit is that of the parts.
    parts = (grad.double() * weight.detach().double()).abs() / x.detach().double().square().mean(-1, keepdim=True).add(
        EPS
    ).sqrt()
    assert_within(found_x, grad_x, 6 * where.rounding * parts.amax(dim=-1, keepdim=True) + 1e-7)
    summed = exact_rms_norm(x.abs(), weight, grad.abs())[2]
    assert_within(found_weight, grad_weight, 3 * where.rounding * summed + 1e-7)


def check_swiglu(x: Tensor, grad: Tensor, where: Where) -> None:
    """Values and gradients; x [..., 2 F] and grad [..., F] of any strides."""
    x = x.detach().requires_grad_()
    out = swiglu(x, implementation=where.implementation)
    (found,) = torch.autograd.grad(out, x, grad)
    assert out.dtype == found.dtype == where.dtype
    exact, grad_x = exact_swiglu(x, grad)
    # The least number above 0 of half precision.
    least = 2.0**-24
    assert_within(out, exact, 2.1 * where.rounding * exact.abs() + 8 * least)
    size = torch.cat((grad, grad), -1).double().abs() * (1 + x.detach().double().abs().amax(-1, keepdim=True))
    assert_within(found, grad_x, 3 * where.rounding * torch.maximum(grad_x.abs(), 0.2 * size) + 8 * least)


def check_rotation(query: Tensor, key: Tensor, table: tuple[Tensor, Tensor], where: Where) -> None:
    """Values and gradients; q [T, H, D] and k [T, G, D] of any strides, cos and sin [T, 1, D/2]."""
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    outs = rotate(query, key, *table, implementation=where.implementation)
    # Not contiguous either: two parts of one gradient.
    both = where.random((query.size(0), query.size(1) + key.size(1), query.size(2)), seed=9)
    grads = both.split([query.size(1), key.size(1)], dim=1)
    found = torch.autograd.grad(outs, (query, key), grads)
    cos, sin = table
    for x, out, grad, found_x in zip((query, key), outs, grads, found, strict=True):
        assert out.dtype == found_x.dtype == where.dtype
        for given, got, back in ((x, out, sin), (grad, found_x, -sin)):
            lengths = torch.hypot(*given.detach().double().chunk(2, dim=-1)).repeat(1, 1, 2)
            assert_within(got, exact_rotation(given, cos, back), 2.1 * where.rounding * lengths + 1e-7)


def angle_table(num_positions: int, half: int, where: Where) -> tuple[Tensor, Tensor]:
    angles = 3 * torch.randn(num_positions, 1, half, generator=torch.Generator().manual_seed(5))
    return angles.cos().to(where.device, where.dtype), angles.sin().to(where.device, where.dtype)


def rows_of_many_sizes(shape: Sequence[int], where: Where) -> Tensor:
    """From a hundredth to a hundredfold, one row all zero where there are two."""
    x = where.random(shape, seed=1) * torch.logspace(-2, 2, shape[0]).to(where.device, where.dtype).view(
        -1, *[1] * (len(shape) - 1)
    )
    if shape[0] > 1:
        x[1] = 0.0
    return x
