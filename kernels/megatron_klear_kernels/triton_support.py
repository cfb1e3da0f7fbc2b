"""Whether Triton kernels can run here, and what they share."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# bfloat16 products and their asynchronous copies begin here.
MIN_CAPABILITY = (8, 0)


@functools.cache
def interpreted() -> bool:
    """Whether kernels run in the interpreter. Triton decides it where a kernel is decorated, so it is asked there."""
    if find_spec("triton") is None:
        return False
    # Not at the top: it takes a while, and a CPU run has no use for it.
    triton: Any = importlib.import_module("triton")
    return not isinstance(triton.jit(interpreted.__wrapped__), triton.JITFunction)


def why_unavailable(device: torch.device) -> str | None:
    """Why no Triton kernel can run on tensors of this device; None where one can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return None
    if device.type != "cuda":
        return (
            f"the tensors are on {device.type}, where Triton needs its interpreter"
            " (for tests: TRITON_INTERPRET=1 in the environment before the start)"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability} is below {MIN_CAPABILITY}, which has no bfloat16 products"
    return None


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] of neighbouring elements: a view with a row stride, a copy only where none is possible."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def next_power_of_2(n: int) -> int:
    """Smallest power of 2 that is not below n, which is at least 1."""
    return 1 << (n - 1).bit_length()


def num_blocks(n: int, block: int) -> int:
    """Blocks that cover n."""
    return -(-n // block)
