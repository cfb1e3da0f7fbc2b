"""Whether Triton kernels can run here, and which implementation of the small kernels does: chosen in this one place.

The small kernels (rms_norm, swiglu, rope) exist twice, as eager torch operations and as Triton kernels, behind one
autograd function each. On CUDA tensors the Triton ones run. Triton's interpreter runs them on a CPU, thousands of times
slower than torch: for tests, which ask for it by name.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

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


def load_kernels(module: str) -> Any:
    """A module of this package that imports triton. Loaded where its kernels run, and nowhere else."""
    return importlib.import_module(f"megatron_klear_kernels.{module}")


Implementation = Literal["eager", "triton"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation, and why it is that one."""

    implementation: Implementation
    why: str

    def __str__(self) -> str:
        return f"small kernels: {self.implementation} ({self.why})"


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


@functools.cache
def small_kernels(on_cuda: bool, dtype: torch.dtype) -> Choice:
    """What runs for activations of this type."""
    if not on_cuda:
        return Choice("eager", "no CUDA tensors")
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
        return small_kernels(x.is_cuda, x.dtype).implementation
    if asked == "triton" and (reason := why_unavailable(x.device)) is not None:
        raise ValueError(f'implementation "triton" was asked for, but {reason}; leave it out, or ask for "eager"')
    return asked


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
