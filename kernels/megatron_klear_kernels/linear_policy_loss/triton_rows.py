"""Triton path A: statistics and gradient of rows of float32 logits that a product outside has made.

With z = logit * inv_temperature over a shard's valid columns: m = max z, s = sum exp(z - m),
t = sum exp(z - m) (z - m), zt = z of the target (0 on a shard that does not hold it). Once the shards' statistics are
merged into peak, log_sum and entropy of the whole row, log p = (z - peak) - log_sum and

    dL/dlogit = inv_temperature * (d_logprob * ([target] - p) - d_entropy * p * (log p + entropy))

A row's result depends on nothing but that row and the strides: one program works on it, in a fixed order. The kernels
are checked under Triton's interpreter and compile for Hopper; they have not run on hardware.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.triton_config import (
    check_num_valid,
    check_rows,
    launch,
    row_tiles,
)
from megatron_klear_kernels.triton_support import num_blocks

# A scaling that exits early still starts its programs: a few a multiprocessor, each with many blocks.
SCALE_BLOCK, SCALE_PROGRAMS = 4096, 1024
# exp is 0 here, as at -inf, but a weight of 0 times this is 0 and not NaN.
LOWEST = tl.constexpr(-1e4)


@triton.jit
def _statistics_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    statistics: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    start: tl.tensor,
    num_valid: tl.tensor,
    inv_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # int64: rows x columns exceeds 2^31 at 14,135 rows of Qwen3's vocabulary.
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    lane = tl.arange(0, BLOCK)
    peak = tl.full((), -float("inf"), tl.float32)
    # One sum a lane, added up at the end: only the maximum is exchanged between threads in each block.
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, num_valid, BLOCK):
        column = begin + lane
        # The mask ends at num_columns, which unlike num_valid is a multiple of 16 in practice: loads stay vectors.
        cell = line + column.to(tl.int64) * column_stride
        logit = tl.load(cell, mask=column < num_columns, other=0.0).to(tl.float32)
        logit = tl.where(column < num_valid, logit, -float("inf"))
        higher = tl.maximum(peak, tl.max(logit, 0))
        # -inf - -inf is NaN: while no column is finite, shift by 0 instead.
        origin = tl.where(higher == -float("inf"), 0.0, higher)
        drop = tl.maximum((peak - origin) * inv_temperature, LOWEST)
        decay = tl.exp(drop)
        # Subtract before scaling: logits with a large common offset differ exactly, their rounded multiples do not.
        distance = tl.maximum((logit - origin) * inv_temperature, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.exp(distance)
        moment = decay * (moment + drop * total) + weight * distance
        total = decay * total + weight
        peak = higher
    target = tl.load(targets + row) - start
    is_mine = (target >= 0) & (target < num_valid)
    z_target = tl.load(line + target * column_stride, mask=is_mine, other=0.0).to(tl.float32) * inv_temperature
    tl.store(statistics + row, peak * inv_temperature)
    tl.store(statistics + num_rows + row, tl.sum(total, 0))
    tl.store(statistics + 2 * num_rows + row, tl.sum(moment, 0))
    tl.store(statistics + 3 * num_rows + row, z_target)


def row_statistics(logits: Tensor, targets: Tensor, *, start: int, num_valid: int, inv_temperature: float) -> Tensor:
    """Statistics [4, C] float32 (m, s, t, zt) of this shard; see the module. One read of the logits.

    Args:
        logits: [C, V] float32, bfloat16 or float16, of any strides.
        targets: [C] int64 GLOBAL ids.
        start: global id of column 0.
        num_valid: LOCAL number of columns that are tokens; the others are padding, whatever they hold. With 0 the
            statistics are (-inf, 0, 0, 0).
        inv_temperature: positive.
    """
    num_rows, num_columns = logits.shape
    check_rows(num_rows, logits.device, targets=targets)
    check_num_valid(num_valid, num_columns)
    statistics = logits.new_empty((4, num_rows), dtype=torch.float32)
    tiles = row_tiles(num_columns)
    launch(
        _statistics_kernel,
        (num_rows,),
        logits,
        targets,
        statistics,
        num_rows,
        num_columns,
        *logits.stride(),
        start,
        num_valid,
        inv_temperature,
        BLOCK=tiles.block,
        num_warps=tiles.num_warps,
    )
    return statistics


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    log_sums: tl.tensor,
    entropies: tl.tensor,
    d_logprobs: tl.tensor,
    d_entropies: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_column_stride: tl.tensor,
    start: tl.tensor,
    num_valid: tl.tensor,
    inv_temperature: tl.tensor,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    sink = out + row * out_row_stride
    lane = tl.arange(0, BLOCK)
    target = tl.load(targets + row) - start
    # -1 is no column, while any id of another shard might be one of this shard's padding.
    target = tl.where((target >= 0) & (target < num_valid), target, -1).to(tl.int32)
    peak = tl.load(peaks + row)
    log_sum = tl.load(log_sums + row)
    d_logprob = tl.load(d_logprobs + row) * inv_temperature
    for begin in range(0, num_columns, BLOCK):  # type: ignore[arg-type]
        column = begin + lane
        cell = source + column.to(tl.int64) * column_stride
        logit = tl.load(cell, mask=column < num_columns, other=0.0).to(tl.float32)
        log_p = (logit * inv_temperature - peak) - log_sum
        p = tl.exp(log_p)
        gradient = d_logprob * (tl.where(column == target, 1.0, 0.0) - p)
        if HAS_ENTROPY:
            d_entropy = tl.load(d_entropies + row) * inv_temperature
            entropy = tl.load(entropies + row)
            # p = 0 has log p = -inf where the logit is: 0 * -inf is NaN.
            gradient -= d_entropy * tl.where(p == 0.0, 0.0, p * (log_p + entropy))
        gradient = tl.where(column < num_valid, gradient, 0.0)
        # `out` may be the memory of `logits`, with narrower elements. Gradients [begin, begin + BLOCK) then lie on
        # logits of index at most theirs, of this row: blocks before (read) and, at begin = 0, this very block, which
        # the barrier makes sure that all threads have read. Rows do not overlap, and no other program has this row.
        tl.debug_barrier()
        cell = sink + column.to(tl.int64) * out_column_stride
        tl.store(cell, gradient, mask=column < num_columns)


def gradient_view(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, V] of `dtype` on the memory of contiguous float32 logits [C, V]: each row begins where its logits begin.

    For 2-byte dtypes the row stride is 2 V elements, which products take as it is.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"expected contiguous float32 logits, got {logits.dtype} with strides {logits.stride()};"
            " give logit_gradient an `out` of its own instead"
        )
    return logits.view(dtype)[:, : logits.size(1)]


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    *,
    start: int,
    num_valid: int,
    inv_temperature: float,
    out: Tensor,
) -> None:
    """Write dL/dlogit into `out` [C, V], of any floating dtype and strides; padding columns get exactly 0.

    `logits`, `targets`, `start`, `num_valid`, `inv_temperature` as for `row_statistics`; the other vectors are [C]
    float32 of the whole (merged) row. `out` may be the memory of `logits`: the same tensor, or `gradient_view` of it.
    """
    num_rows, num_columns = logits.shape
    check_rows(num_rows, logits.device, targets=targets, peak=peak, log_sum=log_sum, entropy=entropy)
    check_rows(num_rows, logits.device, d_logprob=d_logprob)
    if d_entropy is not None:
        check_rows(num_rows, logits.device, d_entropy=d_entropy)
    check_num_valid(num_valid, num_columns)
    _check_out(logits, out)
    tiles = row_tiles(num_columns)
    launch(
        _gradient_kernel,
        (num_rows,),
        logits,
        out,
        targets,
        peak,
        log_sum,
        entropy,
        d_logprob,
        d_logprob if d_entropy is None else d_entropy,  # the interpreter takes no None; it is not read
        num_columns,
        *logits.stride(),
        *out.stride(),
        start,
        num_valid,
        inv_temperature,
        HAS_ENTROPY=d_entropy is not None,
        BLOCK=tiles.block,
        num_warps=tiles.num_warps,
        # Pipelining would move the next block's load before this block's store.
        num_stages=1,
    )


def _last_byte(matrix: Tensor) -> int:
    extent = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True))
    return matrix.data_ptr() + (extent + 1) * matrix.element_size()


def _check_out(logits: Tensor, out: Tensor) -> None:
    """Shapes, and that a gradient never lands on a logit that its program has yet to read, or on another row's."""
    if out.shape != logits.shape or out.device != logits.device:
        raise ValueError(
            f"out must have the shape {tuple(logits.shape)} and device {logits.device} of the logits,"
            f" but has {tuple(out.shape)} and {out.device}"
        )
    if logits.numel() == 0 or out.data_ptr() >= _last_byte(logits) or logits.data_ptr() >= _last_byte(out):
        return
    row_bytes, column_bytes = (stride * logits.element_size() for stride in logits.stride())
    out_row_bytes, out_column_bytes = (stride * out.element_size() for stride in out.stride())
    is_same_rows = out.data_ptr() == logits.data_ptr() and (logits.size(0) == 1 or out_row_bytes == row_bytes)
    is_dense = logits.stride(1) == 1 and out.stride(1) == 1
    is_behind = out_column_bytes == column_bytes or (is_dense and out_column_bytes < column_bytes)
    if not is_same_rows or not is_behind or out.element_size() > logits.element_size():
        raise ValueError(
            f"out ({out.dtype}, strides {out.stride()}) overlaps the logits ({logits.dtype}, strides"
            f" {logits.stride()}) so that gradients would overwrite logits before they are read:"
            " use gradient_view(logits, dtype), the logits themselves, or separate memory"
        )


@triton.jit
def _scale_kernel(values: tl.tensor, factors: tl.tensor, num_values: tl.tensor, BLOCK: tl.constexpr) -> None:
    factor = tl.load(factors).to(tl.float32)
    if factor != 1.0:
        lane = tl.arange(0, BLOCK)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for begin in range(first, num_values, tl.num_programs(0) * BLOCK):  # type: ignore[arg-type]
            index = begin + lane
            value = tl.load(values + index, mask=index < num_values, other=0.0).to(tl.float32)
            tl.store(values + index, value * factor, mask=index < num_values)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """tensor *= factor (one number on the same device), without asking the host; with 1 nothing is read or written."""
    if not tensor.is_contiguous() or factor.numel() != 1 or factor.device != tensor.device:
        raise ValueError(
            f"expected a contiguous tensor and one number on its device {tensor.device}, got strides"
            f" {tensor.stride()} and {factor.numel()} numbers on {factor.device}"
        )
    programs = min(num_blocks(tensor.numel(), SCALE_BLOCK), SCALE_PROGRAMS)
    launch(_scale_kernel, (programs,), tensor, factor, tensor.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
