"""Compiles for an H100 or H200 what Triton launches would run, on a machine without one; nothing runs.

The interpreter accepts what the compiler refuses (names, types, annotations), so kernels that only ever ran interpreted
may not even compile. In a process with TRITON_INTERPRET=0, call `compile_instead_of_running` before the launches.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DIVISIBLE = ["tt.divisibility", 16]


def type_of(value: Any) -> str:
    """Of an argument that is compiled in by type alone."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), value
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(kernel: JITFunction[Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The compiled kernel of one launch: integers of 1 as constants, pointers and multiples of 16 as such."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    values = inspect.signature(kernel.fn).bind(*args, **named).arguments
    types, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        plain = parameter.do_not_specialize or not isinstance(value, int | Tensor)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not plain):
            types[name], constants[(place,)] = "constexpr", value
            continue
        types[name] = type_of(value)
        if not plain and (isinstance(value, Tensor) or value % 16 == 0):
            hints[(place,)] = [DIVISIBLE]
    return compile(ASTSource(kernel, types, constants, hints), target=HOPPER, options=options)


def compile_instead_of_running() -> list[str]:
    """From now on a launch compiles; the names of the compiled kernels are added to the list."""
    compiled = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert "cubin" in compile_launch(self, args, named).asm
        compiled.append(self.fn.__name__)

    JITFunction.run = run
    return compiled
