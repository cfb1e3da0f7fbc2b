"""RMSNorm: y = w * x / sqrt(mean(x^2) + eps), the mean and the root in float32.

Kept for the backward are the normed rows (in place of x, which nobody else needs), the weight and 1 / root. The normed
rows are the first of them: a layer that computes the output again from them asks autograd for them.

What libraries give: torch.nn.functional.rms_norm is one kernel each way on CUDA in newer releases (several operations
in 2.6, the oldest that we allow), and Transformer Engine and Liger have one. Ours stays beside them for what they do
not give at once: torch's rounds once, after the weight, where transformers and this project on a CPU round the normed
row first (in bfloat16 a quarter of the outputs differ, measured); Liger's rounds alike and is no dependency; all keep
x, which for keys is a view that holds the whole QKV projection. Should torch's prove faster on a GPU than the agreement
is worth, this file is where it goes in: benchmarks/small_kernels.py compares, and no GPU has run it yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.implementations import Implementation, implementation_for, load_kernels


@dataclass(frozen=True, slots=True)
class _Maths:
    """`forward`: x, weight, eps, are the last two kept -> output, normed, inverse [..., 1].

    `backward`: gradient, normed, weight, inverse -> gradients of x and of the weight.
    """

    forward: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _eager_forward(x: Tensor, weight: Tensor, eps: float, _keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
    # Multiply in float32 and round once: what transformers' Qwen3 does, so bf16 models agree with it too.
    normed = x * inverse if x.dtype == torch.float32 else (x.float() * inverse).to(x.dtype)
    return normed * weight, normed, inverse


def _eager_backward(grad: Tensor, normed: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    width = normed.size(-1)
    product = (grad * normed).reshape(-1, width)
    grad_weight = product.sum(dim=0, dtype=torch.float32).to(weight.dtype)
    projection = torch.mv(product, weight).view(*normed.shape[:-1], 1)
    # Over the product, which has been read: on a CPU fresh memory costs as much as a pass.
    grad_x = torch.mul(grad, weight, out=product.view(grad.shape)).addcmul_(normed, projection, value=-1.0 / width)
    return (grad_x.mul_(inverse) if grad_x.dtype == torch.float32 else (grad_x * inverse).to(normed.dtype)), grad_weight


@functools.cache
def _maths(implementation: Implementation) -> _Maths:
    if implementation == "eager":
        return _Maths(_eager_forward, _eager_backward)
    kernels = load_kernels(f"rms_norm.{implementation}_kernels")
    return _Maths(kernels.forward, kernels.backward)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, maths: _Maths) -> Tensor:
        out, normed, inverse = maths.forward(x, weight, eps, True)
        ctx.save_for_backward(normed, weight, inverse)
        ctx.maths = maths
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *ctx.maths.backward(grads[0], *ctx.saved_tensors), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, implementation: Implementation | None = None) -> Tensor:
    """Norm of the last dimension: x [..., H], weight [H] -> [..., H]. Saves normed [..., H] first of all.

    Without `implementation` implementations.py chooses; ValueError if the one asked for cannot run here.
    """
    maths = _maths(implementation_for(x, implementation))
    if not torch.is_grad_enabled():
        return maths.forward(x, weight, eps, False)[0]
    return _RmsNorm.apply(x, weight, eps, maths)
