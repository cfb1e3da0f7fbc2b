"""silu(gate) * up in C, float32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear_kernels.native.library import call


def forward(x: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]."""
    width, x = x.size(-1) // 2, x.contiguous()
    out = x.new_empty(*x.shape[:-1], width)
    call("swiglu_forward", x, x.numel() // (2 * width), width, out)
    return out


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [..., 2 F]."""
    width, x = x.size(-1) // 2, x.contiguous()
    assert 2 * grad.numel() == x.numel()
    grad_x = torch.empty_like(x)
    call("swiglu_backward", grad.contiguous(), x, x.numel() // (2 * width), width, grad_x)
    return grad_x
