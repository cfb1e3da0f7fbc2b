"""RMSNorm, SwiGLU and rotary positions: this project's implementations beside torch's, torch.compile's and Liger's.

    python benchmarks/small_kernels.py [--tokens 16384] [--dtype bfloat16] [--device cuda] [--compile]

Sizes are those of a Qwen3-8B layer. All these operations are bound by memory: the limit is the bandwidth of a plain
copy, measured in the same run. `share` is the time that a copy would need for the bytes that the operation must at
least move, divided by its time; no implementation is charged for what it moves beside them. Forward is that of
training, with what it keeps. Implementations take turns; times are medians.

On a CPU the Triton kernels and Liger's do not run, the C kernels only with --dtype float32, and torch.compile (minutes
there) only with --compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear_kernels.implementations import small_kernels
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu
from megatron_klear_kernels.triton_support import interpreted, why_unavailable

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.rope import LigerRopeFunction  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # pyright: ignore[reportMissingImports]
except ImportError:
    LigerRMSNormFunction = LigerRopeFunction = LigerFusedGateUpSiLUMulFunction = None

HIDDEN, FFN, HEADS, GROUPS, DIM, EPS = 4096, 12288, 32, 8, 128, 1e-6
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One operation. `forward_bytes` and `backward_bytes`: what it must move at least."""

    name: str
    inputs: Sequence[Tensor]
    others: Sequence[Any]
    forward_bytes: int
    backward_bytes: int
    functions: dict[str, Function]


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    halves = (x.chunk(2, dim=-1) for x in (query, key))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves)


def own(function: Function, on_cuda: bool, dtype: torch.dtype) -> dict[str, Function]:
    found = {"eager": lambda *args: function(*args, implementation="eager")}
    if not on_cuda and small_kernels(False, dtype).implementation == "native":
        found["native"] = lambda *args: function(*args, implementation="native")
    if on_cuda and why_unavailable(torch.device("cuda")) is None and not interpreted():
        found["triton"] = lambda *args: function(*args, implementation="triton")
    return found


def liger(on_cuda: bool) -> dict[str, Function]:
    if (
        not on_cuda
        or LigerRMSNormFunction is None
        or LigerRopeFunction is None
        or LigerFusedGateUpSiLUMulFunction is None
    ):
        return {}
    norm, rope, silu = LigerRMSNormFunction.apply, LigerRopeFunction.apply, LigerFusedGateUpSiLUMulFunction.apply

    def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # It takes [batch, heads, positions, dim], and angles of both halves.
        q, k = (x.transpose(0, 1)[None] for x in (query, key))
        return rope(q, k, *(torch.cat((x, x), dim=-1).transpose(0, 1) for x in (cos, sin)))

    return {
        "norm": lambda x, weight, eps: norm(x, weight, eps, 0.0, "llama", False),
        "swiglu": lambda x: silu(x, False),
        "rotation": turn,
    }


def cases(tokens: int, dtype: torch.dtype, device: str, with_compile: bool) -> list[Case]:
    on_cuda, liger_has = device == "cuda", liger(device == "cuda")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    def all_of(function: Function, kind: str, plain: Function, **more: Function) -> dict[str, Function]:
        compiled = {"compile": torch.compile(plain)} if with_compile else {}
        theirs = {"liger": liger_has[kind]} if kind in liger_has else {}
        return own(function, on_cuda, dtype) | more | compiled | theirs

    norms = all_of(rms_norm, "norm", plain_norm, torch=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps))
    angles = torch.rand(tokens, 1, DIM // 2, device=device)
    table = (angles.cos().to(dtype), angles.sin().to(dtype))
    row, heads = tokens * HIDDEN * dtype.itemsize, tokens * HEADS * DIM * dtype.itemsize
    ffn, both = tokens * FFN * dtype.itemsize, tokens * (HEADS + GROUPS) * DIM * dtype.itemsize
    return [
        Case("norm of rows", (random(tokens, HIDDEN), random(HIDDEN)), (EPS,), 2 * row, 3 * row, norms),
        Case("norm of queries", (random(tokens, HEADS, DIM), random(DIM)), (EPS,), 2 * heads, 3 * heads, norms),
        Case("swiglu", (random(tokens, 2 * FFN),), (), 3 * ffn, 5 * ffn, all_of(swiglu, "swiglu", plain_swiglu)),
        Case(
            "rotation",
            (random(tokens, HEADS, DIM), random(tokens, GROUPS, DIM)),
            table,
            2 * both,
            2 * both,
            all_of(rotate, "rotation", plain_rotation),
        ),
    ]


def seconds(function: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        begun = time.perf_counter()
        function()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def measure(case: Case, device: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds forward and backward of each implementation, in turns; the first turn is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in case.functions}
    for _ in range(repeats + 1):
        for name, function in case.functions.items():
            # Liger's rotation writes over what it is given.
            inputs = [x.detach().clone().requires_grad_() for x in case.inputs]
            args = [x.view_as(x) for x in inputs]
            outs: list[Tensor] = []
            forward = seconds(lambda f=function, a=args, o=outs: o.extend(as_tuple(f(*a, *case.others))), device)
            grads = [torch.ones_like(out) for out in outs]
            backward = seconds(lambda o=outs, i=inputs, g=grads: torch.autograd.grad(o, i, g), device)
            times[name].append((forward, backward))
    return {
        name: (statistics.median(f for f, _ in pairs[1:]), statistics.median(b for _, b in pairs[1:]))
        for name, pairs in times.items()
    }


def copy_rate(device: str, repeats: int) -> float:
    """Bytes a second, those read and those written."""
    source, target = (torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device) for _ in range(2))
    times = [seconds(lambda: target.copy_(source), device) for _ in range(repeats + 1)]
    return 2 * source.numel() / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="16384 on CUDA, 512 on a CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU too")
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    tokens, dtype = args.tokens or (16384 if on_cuda else 512), getattr(torch, args.dtype)
    rate = copy_rate(args.device, args.repeats)
    where = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {tokens} tokens, {args.dtype}; a copy moves {rate / 1e9:.1f} GB/s")
    print(f"{'':<16} {'':<8} {'forward ms':>10} {'GB/s':>7} {'share':>6} {'backward ms':>12} {'GB/s':>7} {'share':>6}")
    for case in cases(tokens, dtype, args.device, on_cuda or args.compile):
        for name, (forward, backward) in measure(case, args.device, args.repeats).items():
            there, back = case.forward_bytes / forward, case.backward_bytes / backward
            print(
                f"{case.name:<16} {name:<8} {forward * 1e3:>10.3f} {there / 1e9:>7.1f} {there / rate:>6.2f}"
                f" {backward * 1e3:>12.3f} {back / 1e9:>7.1f} {back / rate:>6.2f}"
            )


if __name__ == "__main__":
    main()
