"""A linear layer's three float32 products on a CPU, by oneDNN where that is faster.

torch multiplies float32 on a CPU with the BLAS it was built with, in its wheels MKL, which takes AVX-512 on Intel's
processors alone: on an AMD one that has it, products of training take 1.5 to 2.4 times as long as by oneDNN, which is
in the same wheels. torch itself calls oneDNN's only from compiled code. Where it is missing, and on every other device
and type, the products are torch's.

The weight's gradient dy^T x is a product of few rows and columns over many positions; oneDNN likes the narrower
operand first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.native.library import call, why_missing


def _find_fast_product() -> Any:
    """x [N, in], weight [out, in] -> x weight^T, for any strides; None in a torch without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


_fast_product = _find_fast_product()
# Multiplications from which oneDNN's call (10 us) pays.
FAST_FROM = 1 << 21


def is_fast(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies x [..., in] and weight [out, in]."""
    return (
        _fast_product is not None
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.size(0) >= FAST_FROM
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in], weight [out, in] -> [N, out], without gradient."""
    return _fast_product(x, weight, None, "none", [], "") if is_fast(x, weight) else x @ weight.t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # As it came: whoever computes it again in the backward gives back the same shape.
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        grad_x = product(grad, _transposed(weight))
        narrow_first = rows.size(1) <= grad.size(1)
        grad_weight = product(_transposed(rows), grad.t()).t() if narrow_first else product(_transposed(grad), rows.t())
        return grad_x.view_as(x), grad_weight


def _transposed(x: Tensor) -> Tensor:
    """[N, M] -> [M, N] contiguous, which is what oneDNN's first operand and a weight must be.

    In C where that can run: torch copies a transpose on one thread, at a quarter of the speed.
    """
    if x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() and why_missing() is None:
        out = x.new_empty(x.size(1), x.size(0))
        call("transpose", x, x.size(0), x.size(1), out)
        return out
    return x.t().contiguous()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out], with gradients to both. Saves x and the weight."""
    return _Linear.apply(x, weight)
