"""Which implementation of a small kernel runs: chosen in this one place.

The small kernels (rms_norm, swiglu, rope) exist three times behind one autograd function each: as eager torch
operations, as Triton kernels, which run on CUDA tensors, and in C, which runs on float32 tensors of a CPU. Triton's
interpreter runs its kernels on a CPU, thousands of times slower than torch: for tests, which ask for it by name.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_klear_kernels.native.library import why_missing
from megatron_klear_kernels.triton_support import interpreted, why_unavailable

Implementation = Literal["eager", "triton", "native"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation, and why it is that one."""

    implementation: Implementation
    why: str

    def __str__(self) -> str:
        return f"small kernels: {self.implementation} ({self.why})"


def load_kernels(module: str) -> Any:
    """A module of this package by name. Loaded where its kernels run, and nowhere else: it may import triton."""
    return importlib.import_module(f"megatron_klear_kernels.{module}")


@functools.cache
def small_kernels(on_cuda: bool, dtype: torch.dtype) -> Choice:
    """What runs for activations of this type."""
    if not on_cuda:
        if dtype != torch.float32:
            return Choice("eager", f"the C kernels are for float32, not {dtype}")
        if (reason := why_missing()) is not None:
            return Choice("eager", reason)
        return Choice("native", "float32 on a CPU")
    if (reason := why_unavailable(torch.device("cuda"))) is not None:
        return Choice("eager", reason)
    if interpreted():
        return Choice("eager", "TRITON_INTERPRET is set, and the interpreter is for tests")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return Choice("eager", f"the Triton kernels compute in float32, less than {dtype}")
    return Choice("triton", "CUDA tensors")


def implementation_for(x: Tensor, asked: Implementation | None) -> Implementation:
    """What is asked for by name, else what is chosen for x. Raises ValueError where the asked one cannot run."""
    if asked is None:
        # A tensor of another device than these, such as "meta", has torch's operations alone.
        return small_kernels(x.is_cuda, x.dtype).implementation if x.is_cuda or x.is_cpu else "eager"
    reason = None
    if asked == "triton":
        reason = why_unavailable(x.device)
    elif asked == "native":
        reason = (
            why_missing()
            if x.is_cpu and x.dtype == torch.float32
            else f"it is for float32 on a CPU, not {x.dtype} on {x.device}"
        )
    if reason is not None:
        raise ValueError(f'implementation "{asked}" was asked for, but {reason}; leave it out, or ask for "eager"')
    return asked
