"""Triton path B: a product whose epilogue keeps exponentials instead of logits.

The product's float32 accumulators exist only inside a program. For its tile of columns it writes the statistics
(m, s, t, zt) of triton_rows.py, in float32, and E = exp(z - m) in the hidden states' 2-byte dtype: half the memory of
float32 logits, written once, read once. What is rounded to two bytes is thus only ever a probability on its way to the
gradient, never a logit on its way to a log-prob. With peak, log_sum and entropy of the whole row

    p = E * exp((m - peak) - log_sum)        log p = log E + (m - peak) - log_sum

but the target's p is exact, exp(logprob), because 1 - p cancels. The kernels are checked under Triton's interpreter
and compile for Hopper; they have not run on hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.triton_config import (
    check_num_valid,
    check_rows,
    launch,
    product_tiles,
)
from megatron_klear_kernels.triton_support import interpreted, num_blocks

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# exp2 is 0 here, as at -inf, but a weight of 0 times this is 0 and not NaN.
LOWEST = tl.constexpr(-1e4)
# Smallest normal float32.
LEAST = tl.constexpr(2.0**-126)
# float16 has 2^-14 as smallest normal number: multiplied by 2^14, E keeps its precision down to 2^-28.
FLOAT16_LIFT = 2.0**14
GRADIENT_BLOCK = 4096
MERGE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class ExpStatistics:
    """Statistics of every tile of columns; `merge_tiles` makes the shard's of them.

    parts: [tiles, 4, C] float32, (m, s, t, zt) as of `row_statistics`; a tile of padding has (-inf, 0, 0, 0).
    tile_columns: columns of a tile.
    """

    parts: Tensor
    tile_columns: int


@triton.jit
def _exp_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    weight_stride: tl.tensor,
    out_stride: tl.tensor,
    start: tl.tensor,
    num_valid: tl.tensor,
    inv_temperature: tl.tensor,
    LIFT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # Programs that run at the same time form a block of GROUP row tiles by some column tiles: both operands are then
    # read from L2 more often than from memory.
    program = tl.program_id(0)
    per_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    first = program // per_group * GROUP
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    row_tile = first + program % per_group % height
    column_tile = program % per_group // height

    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows and columns outside read row and column 0, which costs no mask; what comes of it is not stored.
    safe_row = tl.where(row < num_rows, row, 0)
    safe_column = tl.where(column < num_columns, column, 0).to(tl.int64)
    left = hidden + safe_row[:, None] * hidden_stride + depth[None, :]
    right = weight + safe_column[None, :] * weight_stride + depth[:, None]
    logit = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, width, DEPTH):
        if IS_EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=depth[None, :] < width - begin, other=0.0)
            b = tl.load(right, mask=depth[:, None] < width - begin, other=0.0)
        if UPCAST:
            # The interpreter's dot multiplies the bit patterns of bfloat16.
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        logit = tl.dot(a, b, logit, input_precision="ieee")
        left += DEPTH
        right += DEPTH

    logit = tl.where((column < num_valid)[None, :], logit, -float("inf"))
    peak = tl.max(logit, 1)
    # -inf - -inf is NaN: a tile of padding is shifted by 0 instead.
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    # Subtract before scaling: logits with a large common offset differ exactly, their rounded multiples do not.
    distance = (logit - origin[:, None]) * (inv_temperature * LOG2_E)
    distance = tl.maximum(distance, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    weights = tl.exp2(distance)
    total = tl.sum(weights, 1)
    moment = tl.sum(weights * distance, 1) * LN_2
    is_row = row < num_rows
    target = tl.load(targets + row, mask=is_row, other=-1) - start
    # -1 is no column, while any id of another shard might be one of this shard's padding.
    target = tl.where((target >= 0) & (target < num_valid), target, -1).to(tl.int32)
    z_target = tl.sum(tl.where(column[None, :] == target[:, None], logit, 0.0), 1) * inv_temperature

    part = parts + column_tile.to(tl.int64) * 4 * num_rows + row
    tl.store(part, peak * inv_temperature, mask=is_row)
    tl.store(part + num_rows, total, mask=is_row)
    tl.store(part + 2 * num_rows, moment, mask=is_row)
    tl.store(part + 3 * num_rows, z_target, mask=is_row)
    corner = out + row[:, None] * out_stride + column[None, :]
    is_inside = is_row[:, None] & (column < num_columns)[None, :]
    tl.store(corner, weights * LIFT, mask=is_inside)


def _check_matrix(name: str, matrix: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    if matrix.shape != shape or matrix.dtype != like.dtype or matrix.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {shape} on {like.device},"
            f" but is {matrix.dtype} of shape {tuple(matrix.shape)} on {matrix.device}"
        )
    if matrix.stride(1) != 1:
        raise ValueError(f"{name} has strides {matrix.stride()}: its rows must be contiguous, so copy it first")


def _lift(dtype: torch.dtype) -> float:
    """What E is multiplied by."""
    return FLOAT16_LIFT if dtype == torch.float16 else 1.0


def exp_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int,
    num_valid: int,
    inv_temperature: float,
    out: Tensor,
) -> ExpStatistics:
    """Write E (0 in padding columns) into `out` and return the tiles' statistics; see the module.

    Args:
        hidden: [C, H] bfloat16, float16 or float32; any row stride.
        weight: [V, H] of the same dtype, this shard's rows; any row stride.
        targets: [C] int64 GLOBAL ids.
        start: global id of column 0.
        num_valid: LOCAL number of columns that are tokens.
        inv_temperature: positive.
        out: [C, V] of the same dtype; any row stride.
    """
    (num_rows, width), num_columns = hidden.shape, weight.size(0)
    _check_matrix("hidden", hidden, (num_rows, width), hidden)
    _check_matrix("weight", weight, (num_columns, width), hidden)
    _check_matrix("out", out, (num_rows, num_columns), hidden)
    check_rows(num_rows, hidden.device, targets=targets)
    check_num_valid(num_valid, num_columns)
    tiles = product_tiles(hidden.dtype, hidden.device)
    num_tiles = num_blocks(num_columns, tiles.columns)
    parts = hidden.new_empty((num_tiles, 4, num_rows), dtype=torch.float32)
    launch(
        _exp_kernel,
        (num_tiles * num_blocks(num_rows, tiles.rows),),
        hidden,
        weight,
        targets,
        out,
        parts,
        num_rows,
        num_columns,
        width,
        hidden.stride(0),
        weight.stride(0),
        out.stride(0),
        start,
        num_valid,
        inv_temperature,
        LIFT=_lift(hidden.dtype),
        IS_EVEN=width % tiles.depth == 0,
        UPCAST=interpreted(),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        GROUP=tiles.group,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return ExpStatistics(parts, tiles.columns)


@triton.jit
def _merge_kernel(
    parts: tl.tensor,
    statistics: tl.tensor,
    num_tiles: tl.tensor,
    num_rows: tl.tensor,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    z_target = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        part = parts + tile.to(tl.int64)[:, None] * 4 * num_rows + row[None, :]
        is_inside = (tile < num_tiles)[:, None] & is_row[None, :]
        m = tl.load(part, mask=is_inside, other=-float("inf"))
        s = tl.load(part + num_rows, mask=is_inside, other=0.0)
        t = tl.load(part + 2 * num_rows, mask=is_inside, other=0.0)
        z_target += tl.sum(tl.load(part + 3 * num_rows, mask=is_inside, other=0.0), 0)
        higher = tl.maximum(peak, tl.max(m, 0))
        origin = tl.where(higher == -float("inf"), 0.0, higher)
        drop = tl.maximum(peak - origin, LOWEST)
        shift = tl.maximum(m - origin[None, :], LOWEST)
        decay = tl.exp(drop)
        weight = tl.exp(shift)
        moment = decay * (moment + drop * total) + tl.sum(weight * (t + shift * s), 0)
        total = decay * total + tl.sum(weight * s, 0)
        peak = higher
    tl.store(statistics + row, peak, mask=is_row)
    tl.store(statistics + num_rows + row, total, mask=is_row)
    tl.store(statistics + 2 * num_rows + row, moment, mask=is_row)
    tl.store(statistics + 3 * num_rows + row, z_target, mask=is_row)


def merge_tiles(statistics: ExpStatistics) -> Tensor:
    """Statistics [4, C] of the shard, as `row_statistics` returns them.

    In an order that depends on the number of tiles alone. Sums of torch over the tiles depend on C: the log-probs of a
    row would then change in the last bit with the size of its chunk.
    """
    num_tiles, _, num_rows = statistics.parts.shape
    merged = statistics.parts.new_empty((4, num_rows))
    grid = (num_blocks(num_rows, MERGE_BLOCK),)
    launch(_merge_kernel, grid, statistics.parts, merged, num_tiles, num_rows, TILES=MERGE_BLOCK, ROWS=MERGE_BLOCK)
    return merged


@triton.jit
def _exp_gradient_kernel(
    exponentials: tl.tensor,
    parts: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    logprobs: tl.tensor,
    d_logprobs: tl.tensor,
    d_entropies: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    start: tl.tensor,
    num_valid: tl.tensor,
    inv_temperature: tl.tensor,
    LIFT: tl.constexpr,
    LOG_LIFT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    line = exponentials + row * row_stride
    target = tl.load(targets + row) - start
    target = tl.where((target >= 0) & (target < num_valid), target, -1).to(tl.int32)
    peak = tl.load(peaks + row)
    log_sum = tl.load(log_sums + row)
    logprob = tl.load(logprobs + row)
    d_logprob = tl.load(d_logprobs + row) * inv_temperature
    p_target = tl.exp(logprob)
    target_gradient = d_logprob * (1.0 - p_target)
    if HAS_ENTROPY:
        d_entropy = tl.load(d_entropies + row) * inv_temperature
        entropy = tl.load(entropies + row)
        target_gradient -= d_entropy * p_target * (logprob + entropy)
    num_tiles = tl.cdiv(num_columns, COLUMNS)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        exponent = tl.load(parts + tile.to(tl.int64) * 4 * num_rows + row, mask=tile < num_tiles, other=-float("inf"))
        log_scale = (exponent - peak) - log_sum
        scale = tl.exp(log_scale) / LIFT
        column = tile[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        e = tl.load(line + column, mask=column < num_columns, other=0.0).to(tl.float32)
        # Of padding E is 0, and so is what follows.
        gradient = e * scale[:, None]
        if HAS_ENTROPY:
            # A tile of padding has log_scale = -inf, an E of 0 log E = -inf: both finite here, as 0 * -inf is NaN.
            constant = tl.maximum(log_scale, LOWEST) - LOG_LIFT + entropy
            log_e = tl.log2(tl.maximum(e, LEAST)) * LN_2
            gradient *= -d_entropy * log_e - (d_entropy * constant + d_logprob)[:, None]
        else:
            gradient *= -d_logprob
        gradient = tl.where(column == target, target_gradient, gradient)
        # In place is safe: each number is read and written by one thread, once.
        tl.store(line + column, gradient, mask=column < num_columns)


def exp_gradient(
    exponentials: Tensor,
    statistics: ExpStatistics,
    targets: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    logprob: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    *,
    start: int,
    num_valid: int,
    inv_temperature: float,
) -> None:
    """Turn E [C, V] into dL/dlogit in place; padding columns get exactly 0.

    `exponentials` and `statistics` are those of ONE `exp_statistics` call, as are `targets`, `start`, `num_valid` and
    `inv_temperature`; the other vectors are [C] float32 of the whole (merged) row.
    """
    num_rows, num_columns = exponentials.shape
    _check_matrix("exponentials", exponentials, (num_rows, num_columns), exponentials)
    num_tiles = num_blocks(num_columns, statistics.tile_columns)
    if statistics.parts.shape != (num_tiles, 4, num_rows):
        raise ValueError(
            f"statistics have parts of shape {tuple(statistics.parts.shape)}, but exponentials of shape"
            f" {tuple(exponentials.shape)} need {(num_tiles, 4, num_rows)}: both must come from one exp_statistics call"
        )
    check_rows(num_rows, exponentials.device, targets=targets, peak=peak, log_sum=log_sum, entropy=entropy)
    check_rows(num_rows, exponentials.device, logprob=logprob, d_logprob=d_logprob)
    if d_entropy is not None:
        check_rows(num_rows, exponentials.device, d_entropy=d_entropy)
    check_num_valid(num_valid, num_columns)
    launch(
        _exp_gradient_kernel,
        (num_rows,),
        exponentials,
        statistics.parts,
        targets,
        peak,
        log_sum,
        entropy,
        logprob,
        d_logprob,
        d_logprob if d_entropy is None else d_entropy,  # the interpreter takes no None; it is not read
        num_rows,
        num_columns,
        exponentials.stride(0),
        start,
        num_valid,
        inv_temperature,
        LIFT=_lift(exponentials.dtype),
        LOG_LIFT=math.log(_lift(exponentials.dtype)),
        HAS_ENTROPY=d_entropy is not None,
        TILES=max(1, GRADIENT_BLOCK // statistics.tile_columns),
        COLUMNS=statistics.tile_columns,
        num_warps=8,
    )
