"""What the Triton kernels run with: their tile sizes, how they are launched, what they are checked for.

A fixed table instead of autotuning: old and current log-probs must come from the same tiles to be bitwise equal, and
Triton's tuner neither runs under the interpreter nor picks the same tiles on every rank. The sizes are calculated from
registers and shared memory; nothing here has been timed on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.triton_support import interpreted


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` on the device of its first argument, a tensor, whichever device is current."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)


def check_rows(num_rows: int, device: torch.device, **vectors: Tensor) -> None:
    """Kernels read one number a row, blindly: the vectors must be contiguous [num_rows], on the matrix's device."""
    for name, vector in vectors.items():
        wanted = torch.int64 if name == "targets" else torch.float32
        if vector.shape != (num_rows,) or vector.dtype != wanted or vector.device != device:
            raise ValueError(
                f"{name} must be {wanted} of shape ({num_rows},) on {device}, one entry for each row of the matrix,"
                f" but is {vector.dtype} of shape {tuple(vector.shape)} on {vector.device}"
            )
        if not vector.is_contiguous():
            raise ValueError(f"{name} has stride {vector.stride()}: hand over a contiguous copy")


def check_num_valid(num_valid: int, num_columns: int) -> None:
    """The valid columns are the first of the local ones."""
    if not 0 <= num_valid <= num_columns:
        raise ValueError(
            f"num_valid is {num_valid} but this shard has {num_columns} columns: it counts the LOCAL columns that are"
            f" tokens, so it must be from 0 to {num_columns}"
        )


@dataclass(frozen=True, slots=True)
class RowTiles:
    """One program works through a row by blocks of `block` columns."""

    block: int
    num_warps: int


def row_tiles(num_columns: int) -> RowTiles:
    """Blocks of at most 4096: 16 elements a thread, and enough programs on a multiprocessor to hide the loads."""
    block = min(4096, max(128, 1 << (num_columns - 1).bit_length()))
    return RowTiles(block, num_warps=max(1, min(8, block // 512)))


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One program makes `rows` x `columns` of a product, `depth` at a time; `group` row tiles share a column tile."""

    rows: int
    columns: int
    depth: int
    group: int
    num_warps: int
    num_stages: int


# 3 stages of (128 + 256) x 64 x 2 bytes fill 144 of the 227 KiB of shared memory. With 132 multiprocessors, 16 row
# tiles by about 8 column tiles run at once, which read as many bytes of hidden states as of weights.
_WIDE = ProductTiles(rows=128, columns=256, depth=64, group=16, num_warps=8, num_stages=3)
# 64 KiB: fits every device of MIN_CAPABILITY, consumer cards included.
_SMALL = ProductTiles(rows=128, columns=128, depth=32, group=8, num_warps=8, num_stages=4)
# Without tensor cores (a float32 product is a true one) the accumulator shares the registers with both operands.
_FLOAT32 = ProductTiles(rows=64, columns=64, depth=32, group=8, num_warps=4, num_stages=2)
# The interpreter pays by the operation up to about 4096 numbers; tests have few rows and short ones.
_INTERPRETED = ProductTiles(rows=16, columns=1024, depth=64, group=2, num_warps=1, num_stages=1)
_SIXTEEN_BIT_BY_MAJOR = {9: _WIDE, 10: _WIDE}


def product_tiles(dtype: torch.dtype, device: torch.device) -> ProductTiles:
    """Tiles of the product of two matrices of `dtype`."""
    if interpreted():
        return _INTERPRETED
    if dtype == torch.float32:
        return _FLOAT32
    return _SIXTEEN_BIT_BY_MAJOR.get(torch.cuda.get_device_capability(device)[0], _SMALL)
