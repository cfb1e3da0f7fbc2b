"""RMSNorm as Triton kernels: one pass over the rows each way, float32 inside.

A program takes a tile of whole rows: several of the narrow ones (queries and keys), one of the wide ones. The weight's
gradient is a sum over all rows: each of a fixed number of programs adds up its own rows in registers, torch adds up the
programs. Nothing is atomic, so the result depends on shapes only.

Bytes moved per element of 2 bytes: 6 forward (4 where nothing is kept for a backward), 6 backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_klear_kernels.triton_support import as_rows, next_power_of_2, num_blocks

# 16 elements a thread of 4 warps.
_TILE_ELEMENTS = 2048
# Float32 partial sums of the weight's gradient: 4 MiB at most, for widths up to 4096.
_PARTIAL_ELEMENTS = 2**20
_MIN_PROGRAMS, _MAX_PROGRAMS = 256, 2048


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: int
    block: int
    num_warps: int

    @property
    def num_programs(self) -> int:
        """At most, in the backward."""
        return min(max(_PARTIAL_ELEMENTS // self.block, _MIN_PROGRAMS), _MAX_PROGRAMS)


def _tile(width: int) -> _Tile:
    block = next_power_of_2(width)
    rows = max(_TILE_ELEMENTS // block, 1)
    return _Tile(rows, block, min(max(rows * block // 512, 4), 32))


# One program code whether normed rows are kept or not, and for any number of rows: the same row gives the same bits
# without and with gradients, alone and among others. (Specialised code might add up a row in another order.)
@triton.jit(do_not_specialize=["num_rows", "keep"])
def _forward_tile(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    normed: tl.tensor,
    inverse: tl.tensor,
    num_rows: int,
    width: int,
    x_stride: int,
    keep: int,
    eps: float,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # int64: rows x width passes 2^31 with long micro-batches.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_row = row < num_rows
    inside = in_row[:, None] & (column < width)[None, :]
    given = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    value = given.to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    # Rounded here and again after the weight, as the eager version and transformers do.
    unit = (value * root[:, None]).to(given.dtype)
    place = row[:, None] * width + column[None, :]
    if keep != 0:
        tl.store(normed + place, unit, mask=inside)
        tl.store(inverse + row, root, mask=in_row)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, unit.to(tl.float32) * scale[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_tiles(
    grad: tl.tensor,
    normed: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    partial: tl.tensor,
    num_rows: int,
    width: int,
    grad_stride: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    in_width = column < width
    scale = tl.load(weight + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        in_row = row < num_rows
        inside = in_row[:, None] & in_width[None, :]
        place = row[:, None] * width + column[None, :]
        upstream = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(normed + place, mask=inside, other=0.0).to(tl.float32)
        root = tl.load(inverse + row, mask=in_row, other=0.0)
        total += upstream * unit
        wanted = upstream * scale
        # What points along x changes nothing: the norm takes it out again.
        along = tl.sum(wanted * unit, axis=1) / width
        result = (wanted - unit * along[:, None]) * root[:, None]
        tl.store(grad_x + place, result, mask=inside)
    own = partial + tl.program_id(0).to(tl.int64) * width + column
    tl.store(own, tl.sum(total, axis=0), mask=in_width)


def forward(x: Tensor, weight: Tensor, eps: float, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output, normed, inverse), the last two empty if they are not to be kept."""
    rows, width = as_rows(x), x.size(-1)
    out = torch.empty(x.shape, dtype=torch.result_type(x, weight), device=x.device)
    normed = torch.empty(x.shape if keep else (0,), dtype=x.dtype, device=x.device)
    inverse = torch.empty((*x.shape[:-1], 1) if keep else (0,), dtype=torch.float32, device=x.device)
    tile = _tile(width)
    launch: Any = _forward_tile[(num_blocks(rows.size(0), tile.rows),)]
    launch(
        rows,
        weight,
        out,
        normed,
        inverse,
        rows.size(0),
        width,
        rows.stride(0),
        int(keep),
        eps,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )
    return out, normed, inverse


def backward(grad: Tensor, normed: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    rows, width = as_rows(grad), grad.size(-1)
    tile = _tile(width)
    num_programs = min(num_blocks(rows.size(0), tile.rows), tile.num_programs)
    grad_x = torch.empty_like(normed)
    partial = torch.empty(num_programs, width, dtype=torch.float32, device=grad.device)
    launch: Any = _backward_tiles[(num_programs,)]
    launch(
        rows,
        normed,
        weight,
        inverse,
        grad_x,
        partial,
        rows.size(0),
        width,
        rows.stride(0),
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )
    return grad_x, partial.sum(dim=0).to(weight.dtype)
