"""The rotation in C, float32 on a CPU."""

from __future__ import annotations

from torch import Tensor

from megatron_klear_kernels.native.library import call


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, G, D] turned by the angles [T, 1, D/2], or by the opposite ones."""
    cos, sin, sign = cos.contiguous(), sin.contiguous(), -1.0 if inverse else 1.0
    return _rotated(query, cos, sin, sign), _rotated(key, cos, sin, sign)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_positions, num_heads, dim = x.shape
    assert cos.numel() == sin.numel() == num_positions * dim // 2
    out = x.new_empty(x.shape)
    call("rotate", x, num_positions, num_heads, dim // 2, *x.stride()[:2], cos, sin, sign, out)
    return out
