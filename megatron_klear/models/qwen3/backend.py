"""Which attention kernel runs: chosen here, once, by what is there. The only importer of the optional ones.

On CUDA, in this order: Transformer Engine, flash-attn, torch's own varlen attention (the last two in half precision
only); elsewhere, and in float32 without Transformer Engine, the plain torch paths of attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

try:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
except ImportError:
    TEDotProductAttention = None
try:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

Kernel = Literal["transformer_engine", "flash_attn", "torch_varlen", "torch"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel, and why it is that one."""

    kernel: Kernel
    why: str

    def __str__(self) -> str:
        return f"attention: {self.kernel} ({self.why})"


@functools.cache
def attention_kernel(dtype: torch.dtype) -> Choice:
    """What runs for activations of this type."""
    if not torch.cuda.is_available():
        return Choice("torch", "no CUDA device")
    if TEDotProductAttention is not None:
        return Choice("transformer_engine", "it imports")
    if dtype == torch.float32:
        return Choice("torch", "flash-attn and varlen attention know no float32")
    if flash_attn_varlen_func is not None:
        return Choice("flash_attn", "Transformer Engine does not import")
    if varlen_attn is not None:
        return Choice("torch_varlen", "neither Transformer Engine nor flash-attn imports")
    return Choice("torch", "neither Transformer Engine, flash-attn nor torch's varlen attention imports")


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Segments of queries with the keys that each may see; in a segment the last query sees all its keys."""

    cu_queries: Tensor  # [N+1] int32
    cu_keys: Tensor  # [N+1] int32
    max_queries: int
    max_keys: int
    key_rows: Tensor | None  # [sum of keys] int64 rows of the packed keys; None: all of them, as they are


VarlenAttention = Callable[[Tensor, Tensor, Tensor, VarlenPlan, float], Tensor]
"""q [t, H, D], k and v [n, G, D] -> [t, H, D]."""


def varlen_plan(cu_seqlens: Tensor, max_seqlen: int, num_queries: int, size: int, rank: int) -> VarlenPlan:
    """`cu_seqlens` [S+1] are the padded starts; `num_queries` are this rank's, of `size` that share the sequences."""
    if size == 1:
        return VarlenPlan(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, None)
    starts = cu_seqlens.to(torch.int64)
    chunk = starts.diff() // (2 * size)
    # Chunks `rank` and `2 size - 1 - rank`, one after the other, each with everything before it.
    keys = torch.stack((chunk * (rank + 1), chunk * (2 * size - rank)), dim=1).flatten()
    # On the host, so that nothing waits for the device.
    total = num_queries // 2 * (2 * size + 1)
    shift = starts[:-1].repeat_interleave(2) - (keys.cumsum(0) - keys)
    rows = torch.arange(total, device=keys.device) + shift.repeat_interleave(keys, output_size=total)
    return VarlenPlan(
        ends(chunk.repeat_interleave(2)),
        ends(keys),
        max_seqlen // (2 * size),
        max_seqlen // (2 * size) * (2 * size - rank),
        rows,
    )


def ends(lengths: Tensor) -> Tensor:
    """[N] lengths -> [N+1] int32: 0, and where each ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def varlen_attention(kernel: Kernel) -> VarlenAttention | None:
    """The kernel as a function; None for those that are no such function."""
    if kernel == "flash_attn":
        return _flash_attn
    return _torch_varlen if kernel == "torch_varlen" else None


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    function: Any = flash_attn_varlen_func
    return function(
        query,
        key,
        value,
        plan.cu_queries,
        plan.cu_keys,
        plan.max_queries,
        plan.max_keys,
        softmax_scale=scale,
        causal=True,
    )


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    assert varlen_attn is not None
    out = varlen_attn(
        query,
        key,
        value,
        plan.cu_queries,
        plan.cu_keys,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out
