"""silu(gate) * up, keeping for the backward only what the linear layer before it gave.

Written out in torch, silu(gate) and a copy of up would be kept beside it: with the product 5 times the width of the MLP
a token instead of 3, which for Qwen3-8B is a quarter of all that a layer keeps.

Both implementations round silu(gate) before the product. In the backward the eager one rounds silu(gate) and
gradient * up too, the Triton one computes in float32 and rounds the result alone.

What libraries give: torch has no such operation; Liger has one (of gate and up side by side, in its newer releases),
and is no dependency. benchmarks/small_kernels.py compares; no GPU has run it yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear_kernels.implementations import Implementation, implementation_for, load_kernels


@dataclass(frozen=True, slots=True)
class _Maths:
    """`forward`: x -> output. `backward`: gradient, x -> gradient of x."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _eager_forward(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _eager_backward(grad: Tensor, x: Tensor) -> Tensor:
    (gate, up), out = x.chunk(2, dim=-1), torch.empty_like(x)
    out_gate, out_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=out_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out_gate)
    return out


@functools.cache
def _maths(implementation: Implementation) -> _Maths:
    if implementation == "eager":
        return _Maths(_eager_forward, _eager_backward)
    kernels = load_kernels(f"swiglu.{implementation}_kernels")
    return _Maths(kernels.forward, kernels.backward)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, maths: _Maths) -> Tensor:
        ctx.save_for_backward(x)
        ctx.maths = maths
        return maths.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.maths.backward(grads[0], x), None


def swiglu(x: Tensor, *, implementation: Implementation | None = None) -> Tensor:
    """Gate and up side by side [..., 2 F] -> [..., F].

    Without `implementation` implementations.py chooses; ValueError if the one asked for cannot run here.
    """
    return _SwiGlu.apply(x, _maths(implementation_for(x, implementation)))
