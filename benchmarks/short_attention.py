"""Attention of packed sequences on a CPU: the C kernel beside products in dense blocks and torch's fused kernel.

    python benchmarks/short_attention.py [--repeats 10]

float32, about 2,048 tokens in sequences of one length, forward and backward. `blocks` is what runs where the C kernel
cannot; `torch` is scaled_dot_product_attention sequence by sequence, which is what long sequences go through. They take
turns; times are medians, ratios are over the C kernel's. All three must agree.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear.models.qwen3.dense_attention import Share, dense_attention, dense_plan
from megatron_klear.parallel.device import keep_freed_memory
from megatron_klear_kernels.attention.short import Sequences, short_attention
from megatron_klear_kernels.native.library import why_missing

TOKENS = 2048
# Of the quickstart's model, and of Qwen3-0.6B and 8B: query heads, key heads, numbers of a head.
HEADS = ((4, 2, 32), (16, 8, 128), (32, 8, 128))
LENGTHS = (32, 128, 512, 1024, 2048)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, *, lengths: list[int], scale: float) -> Tensor:
    """torch's kernel for each sequence."""
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True, scale=scale) for part in parts]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


def contenders(length: int, heads: int, groups: int, dim: int) -> dict[str, Attention]:
    sizes, scale = torch.full((TOKENS // length,), length), dim**-0.5
    starts = F.pad(sizes.cumsum(0), (1, 0)).int()
    plan = dense_plan(starts, Share(), heads=heads, groups=groups, longest=length, dtype=torch.float32)
    sequences = Sequences(starts[:-1].long(), sizes, cover_all=True)
    return {
        "C": functools.partial(short_attention, scale=scale, sequences=sequences),
        "blocks": functools.partial(dense_attention, scale=scale, plan=plan),
        "torch": functools.partial(one_by_one, lengths=sizes.tolist(), scale=scale),
    }


def milliseconds(attention: Attention, operands: list[Tensor], upstream: Tensor) -> tuple[float, list[Tensor]]:
    begun = time.perf_counter()
    out = attention(*operands)
    found = torch.autograd.grad(out, operands, upstream)
    return 1e3 * (time.perf_counter() - begun), [out.detach(), *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    if (reason := why_missing()) is not None:
        raise SystemExit(f"the C kernels cannot run here: {reason}")
    keep_freed_memory()
    print(f"float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    names = ("heads", "length", "C ms", "blocks ms", "torch ms", "blocks / C", "torch / C")
    print(" ".join(f"{name:>10}" for name in names))
    for heads, groups, dim in HEADS:
        for length in LENGTHS:
            operands = [torch.randn(TOKENS, n, dim).requires_grad_() for n in (heads, groups, groups)]
            upstream, own = torch.randn(TOKENS, heads, dim), contenders(length, heads, groups, dim)
            times: dict[str, list[float]] = {name: [] for name in own}
            for turn in range(args.repeats + 1):
                results = {}
                for name, attention in own.items():
                    taken, results[name] = milliseconds(attention, operands, upstream)
                    # The first turn is not counted.
                    times[name] += [taken] if turn else []
                for name in ("blocks", "torch"):
                    torch.testing.assert_close(results[name], results["C"], rtol=1e-3, atol=1e-4)
            c, blocks, torchs = (statistics.median(times[name]) for name in own)
            size = f"{heads}/{groups} x {dim}"
            numbers = (c, blocks, torchs, blocks / c, torchs / c)
            print(f"{size:>10} {length:10} " + " ".join(f"{number:10.2f}" for number in numbers))


if __name__ == "__main__":
    main()
