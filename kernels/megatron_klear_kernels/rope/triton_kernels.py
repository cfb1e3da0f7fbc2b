"""Rotary positions as one Triton kernel for queries and keys: each element is read and written once, float32 inside.

A program takes one position, so that the angles are read once for all its heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_klear_kernels.triton_support import next_power_of_2

_MAX_BLOCK_HEADS = 16


@triton.jit
def _rotate_heads(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    num_heads: int,
    half: int,
    row_stride: int,
    head_stride: int,
    dim_stride: int,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """All heads of one position; `cos` and `sin` [1, PAIRS] are its angles."""
    pair = tl.arange(0, PAIRS)[None, :].to(tl.int64)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None].to(tl.int64)
        inside = (head < num_heads) & (pair < half)
        start = x + row * row_stride + head * head_stride
        a = tl.load(start + pair * dim_stride, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(start + (pair + half) * dim_stride, mask=inside, other=0.0).to(tl.float32)
        place = out + (row * num_heads + head) * 2 * half + pair
        tl.store(place, a * cos - b * sin, mask=inside)
        tl.store(place + half, b * cos + a * sin, mask=inside)


@triton.jit
def _rotate_position(
    query: tl.tensor,
    key: tl.tensor,
    out_query: tl.tensor,
    out_key: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_queries: int,
    num_keys: int,
    half: int,
    query_row: int,
    query_head: int,
    query_dim: int,
    key_row: int,
    key_head: int,
    key_dim: int,
    cos_row: int,
    cos_pair: int,
    sin_row: int,
    sin_pair: int,
    INVERSE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    # int64: positions x heads x width passes 2^31 with long micro-batches.
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    c = tl.load(cos + row * cos_row + pair * cos_pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * sin_row + pair * sin_pair, mask=pair < half, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    _rotate_heads(query, out_query, c, s, row, num_queries, half, query_row, query_head, query_dim, QUERIES, PAIRS)
    _rotate_heads(key, out_key, c, s, row, num_keys, half, key_row, key_head, key_dim, KEYS, PAIRS)


def _block_heads(num_heads: int) -> int:
    return min(next_power_of_2(num_heads), _MAX_BLOCK_HEADS)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotated copies, contiguous whatever the strides of what is read."""
    half = query.size(-1) // 2
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    launch: Any = _rotate_position[(query.size(0),)]
    launch(
        query,
        key,
        *outs,
        cos,
        sin,
        query.size(1),
        key.size(1),
        half,
        *query.stride(),
        *key.stride(),
        cos.stride(0),
        cos.stride(-1),
        sin.stride(0),
        sin.stride(-1),
        INVERSE=inverse,
        QUERIES=_block_heads(query.size(1)),
        KEYS=_block_heads(key.size(1)),
        PAIRS=next_power_of_2(half),
    )
    return outs[0], outs[1]
