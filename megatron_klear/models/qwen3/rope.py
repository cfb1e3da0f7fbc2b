"""Angles of rotary positions, one function for trainer and engine; equal to transformers' bit for bit on a CPU.

At position 65,536 one unit in the last place of a frequency is 4e-3 of a turn's radian: frequencies are computed on the
CPU whatever the device, by the operations and in the order that transformers uses, so that nobody rounds differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_klear.config.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str) -> tuple[Tensor, float]:
    """Radians a position of each pair of dimensions [D/2] float32, and what cos and sin are multiplied by."""
    powers = rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    inverse = 1.0 / powers
    if rope.factor is not None:
        kept = 1 - _slow_share(rope, head_dim)
        inverse = 1.0 / (rope.factor * powers) * (1 - kept) + inverse * kept
    return inverse.to(device), rope.attention_scaling


def _slow_share(rope: RopeConfig, head_dim: int) -> Tensor:
    """How far each pair is slowed down [D/2]: 0 for pairs that turn fast, 1 for slow ones, a ramp between."""
    low, high = _pair_turning(rope, head_dim, rope.beta_fast), _pair_turning(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Both ends on one pair: a step instead of a ramp.
    width = high - low or 0.001
    return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width, 0, 1)


def _pair_turning(rope: RopeConfig, head_dim: int, num_turns: float) -> float:
    """Index (a fraction) of the pair that turns `num_turns` times within the original context."""
    assert rope.original_max_position_embeddings is not None
    length = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
    return head_dim * math.log(length) / (2 * math.log(rope.rope_theta))


def rope_table(positions: Tensor, rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of positions [T], as `dtype`, on their device."""
    frequencies, scaling = inverse_frequencies(rope, head_dim, positions.device)
    # float32 whatever `dtype`: bfloat16 has no angles beyond a few hundred positions.
    angles = positions[:, None].float() * frequencies
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
