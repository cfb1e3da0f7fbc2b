"""Compile the Triton kernels for a Hopper device that need not be there, as their own host functions launch them.

A script, for a process of its own: the interpreter is off in it. Prints one JSON object {kernel: [facts of each of its
variants]}. The interpreter takes a good deal of Python that the compiler does not, and hides races and sizes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_klear_kernels.linear_policy_loss import triton_exp, triton_rows

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")


def described(value: Any) -> tuple[str, bool]:
    """(type, is a multiple of 16) of a kernel's argument, as a launch would tell the compiler."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0


class Compiler:
    """Stands in for `launch`: compiles instead of running."""

    def __init__(self) -> None:
        self.facts: dict[str, list[dict[str, object]]] = defaultdict(list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        constants = {name: value for name, value in options.items() if name not in OPTIONS}
        ordinary = dict(zip((name for name in kernel.arg_names if name not in constants), arguments, strict=True))
        # A launch turns the number 1 into a constant; strides are what that matters for.
        constants |= {name: value for name, value in ordinary.items() if isinstance(value, int) and value == 1}
        types = {name: described(value) for name, value in ordinary.items() if name not in constants}
        place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
        source = ASTSource(
            kernel,
            {name: types[name][0] if name in types else "constexpr" for name in kernel.arg_names},
            {place[name]: value for name, value in constants.items()},
            {place[name]: [["tt.divisibility", 16]] for name, (_, is_even) in types.items() if is_even},
        )
        used = {name: value for name, value in options.items() if name in OPTIONS}
        compiled = triton.compile(source, target=HOPPER, options=used)
        steps = re.findall(r"(ld|st)\.global|(bar)\.sync|(wgmma)\.mma_async|(max\.NaN)", compiled.asm["ptx"])
        self.facts[kernel.__name__].append(
            {"shared": compiled.metadata.shared, "steps": ["".join(found) for found in steps]}
        )


def main() -> None:
    compiler = Compiler()
    triton_rows.launch = triton_exp.launch = compiler
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    num_rows, num_columns, width = 32, 8192, 512
    targets = torch.zeros(num_rows, dtype=torch.int64)
    vector = torch.zeros(num_rows)
    four = (vector, vector, vector, vector)
    where = {"start": 8192, "num_valid": 8000, "inv_temperature": 0.7}
    logits = torch.empty(num_rows, num_columns)
    for x in (logits, logits.bfloat16(), torch.empty(num_columns, num_rows).t()):
        triton_rows.row_statistics(x, targets, **where)
    for dtype, d_entropy in ((torch.float32, vector), (torch.bfloat16, vector), (torch.bfloat16, None)):
        view = triton_rows.gradient_view(logits, dtype)
        triton_rows.logit_gradient(logits, targets, *four, d_entropy, out=view, **where)
    triton_rows.scale_(logits, torch.ones(()))
    operands = [(dtype, width, vector) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    for dtype, columns, d_entropy in (*operands, (torch.bfloat16, width - 1, None)):
        hidden, weight = (torch.empty(n, columns, dtype=dtype) for n in (num_rows, num_columns))
        out = torch.empty(num_rows, num_columns, dtype=dtype)
        statistics = triton_exp.exp_statistics(hidden, weight, targets, out=out, **where)
        triton_exp.exp_gradient(out, statistics, targets, *four, vector, d_entropy, **where)
    triton_exp.merge_tiles(statistics)
    print(json.dumps(compiler.facts))


if __name__ == "__main__":
    main()
