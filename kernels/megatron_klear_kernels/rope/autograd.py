"""Rotary positions of packed queries and keys, from a table of cosines and sines.

The gradient of a rotation is the rotation by the opposite angle: nothing but the table is kept. Results are new
tensors: what comes in may be a leaf, a view of the fused projection, or a gradient that others hold too, and writing
over it would save no traffic.

In half precision the eager implementation rounds the first product before it adds the second, the Triton one rounds the
sum alone.

What libraries give: torch has no such operation. Transformer Engine's, where that is installed, works out positions
from the starts of sequences again in each call instead of reading a table; Liger's writes over what it is given.
benchmarks/small_kernels.py compares; no GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.implementations import Implementation, implementation_for, load_kernels

_Rotation = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""query, key, cos, sin, by the opposite angle -> rotated query and key."""


def _eager(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    # One pass over whole rows is faster than one over each half of them.
    both_cos = torch.cat((cos, cos), dim=-1)
    sign = -1 if inverse else 1
    return _rotated(query, both_cos, sin, sign), _rotated(key, both_cos, sin, sign)


def _rotated(x: Tensor, both_cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = x * both_cos
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    out_a.addcmul_(b, sin, value=-sign)
    out_b.addcmul_(a, sin, value=sign)
    return out


def _rotation(implementation: Implementation) -> _Rotation:
    return _eager if implementation == "eager" else load_kernels(f"rope.{implementation}_kernels").rotate


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotation: _Rotation
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.rotation = rotation
        return rotation(query, key, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return *ctx.rotation(grads[0], grads[1], cos, sin, True), None, None, None


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of the last dimension of q [T, H, D] and k [T, G, D], by the angles of a table [T, 1, D/2].

    (Hugging Face's layout of rotary pairs.) The table gets no gradient. Without `implementation` implementations.py
    chooses; ValueError if the one asked for cannot run here.
    """
    return _Rotary.apply(query, key, cos, sin, _rotation(implementation_for(query, implementation)))
