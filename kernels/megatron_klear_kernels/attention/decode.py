"""A step of generation in C, from the fused projection to what attention gives: float32 on a CPU.

What torch does in fifteen operations of a few microseconds of work each: norm and turn queries and the key, write key
and value into the cache, and attend over the row's own columns.
"""

from __future__ import annotations

from torch import Tensor

from megatron_klear_kernels.native.library import LANES, call


def decode_attention(
    qkv: Tensor, qk_norm: Tensor, turns: Tensor, keys: Tensor, values: Tensor, begins: Tensor, end: int, eps: float
) -> Tensor:
    """The last column, `end` - 1, of each row.

    Args:
        qkv: [R, G (Q + 1) D + G D]: a group's queries and its key, group by group, then the values; neighbours in a
            head are turned together.
        qk_norm: [G, Q + 1, D].
        turns: [R, ..., D/2, 2] cosines and sines, scaled so that scores need no scale.
        keys: [>= R, G, D, C], C a multiple of `LANES`; written to.
        values: [>= R, G, C, D]; written to.
        begins: [R] int64, first column of each row.

    Returns:
        [R, G Q D].
    """
    rows, (_, groups, dim, room) = qkv.size(0), keys.shape
    per_group = qk_norm.size(1) - 1
    assert qkv.size(1) == (qk_norm.numel() // dim + groups) * dim and turns.numel() == rows * dim
    assert begins.numel() == rows <= keys.size(0) and 0 < end <= room and room % LANES == 0
    out = qkv.new_empty(rows, groups * per_group * dim)
    sizes = rows, groups, per_group, dim, room, end
    call("decode_attention", qkv, qk_norm, turns, begins, *sizes, eps, keys, values, out)
    return out
