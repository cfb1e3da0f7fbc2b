"""RMSNorm in C, float32 on a CPU: one pass over a row while it is in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear_kernels.native.library import call


def forward(x: Tensor, weight: Tensor, eps: float, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., H], weight [H] -> output and normed [..., H], inverse [..., 1]; the last two are empty without `keep`."""
    width = x.size(-1)
    assert weight.shape == (width,), f"weight {tuple(weight.shape)} of rows of {width}"
    rows = x.reshape(-1, x.size(-2), width) if x.dim() > 2 else x.reshape(-1, 1, width)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    out = x.new_empty(x.shape)
    normed, inverse = (x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)) if keep else (None, None)
    outer, heads, _ = rows.shape
    strides = rows.stride()
    call("rms_norm_forward", rows, outer, heads, *strides[:2], width, weight.contiguous(), eps, out, normed, inverse)
    return out, x.new_empty(0) if normed is None else normed, x.new_empty(0) if inverse is None else inverse


def backward(grad: Tensor, normed: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., H] and of the weight [H]; sums over rows end in float64."""
    width = normed.size(-1)
    assert grad.shape == normed.shape
    grad_x, grad_weight = torch.empty_like(normed), weight.new_empty(width)
    call(
        "rms_norm_backward",
        grad.contiguous(),
        normed,
        weight.contiguous(),
        inverse,
        normed.numel() // width,
        width,
        grad_x,
        grad_weight,
    )
    return grad_x, grad_weight
