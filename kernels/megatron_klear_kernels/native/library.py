"""kernels.c as a library: compiled by the machine's C compiler on first use and kept in the user's cache.

A second's work, once for each processor and version of the source. Triton asks for a C compiler too; where there is
none, or the system is not Linux, torch's operations run instead and `why_missing` says why.

The library brings no OpenMP of its own: it takes its threads from the one that torch has loaded, so that both share
them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
# No flag that lets the compiler change the order of sums or drop NaNs.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
COMPILE_TIMEOUT_S = 120
# Numbers of a vector: heads must be a multiple of it, and columns of a cache.
LANES = 16


class _Floats:
    """A pointer to a contiguous float32 tensor on the host, or NULL."""

    dtype = torch.float32

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        if tensor is None:
            return ctypes.c_void_p(None)
        assert tensor.dtype == cls.dtype and tensor.is_cpu, f"{tensor.dtype} on {tensor.device}"
        return ctypes.c_void_p(tensor.data_ptr())


class _Longs(_Floats):
    """The same of int64."""

    dtype = torch.int64


_TYPES: dict[str, Any] = {"t": _Floats, "l": _Longs, "n": ctypes.c_int64, "f": ctypes.c_float}

# Arguments, by the letters of _TYPES; the number of threads follows in each.
_SIGNATURES = {
    "transpose": "tnnt",
    "rms_norm_forward": "tnnnnntfttt",
    "rms_norm_backward": "ttttnntt",
    "swiglu_forward": "tnnt",
    "swiglu_backward": "ttnnt",
    "rotate": "tnnnnnttft",
    "attention_forward": "tttllnnnnftt",
    "attention_backward": "tttttllnnnnfttt",
    "decode_attention": "tttlnnnnnnfttt",
}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Functions by name, or why there are none."""

    functions: dict[str, Callable[..., int]]
    why_missing: str | None = None


def why_missing() -> str | None:
    """Why the kernels cannot run in this process; None where they can."""
    return _loaded().why_missing


def can_attend(x: Tensor, head_dim: int) -> bool:
    """Whether attention of tensors like x can be computed here."""
    return x.is_cpu and x.dtype == torch.float32 and head_dim % LANES == 0 and why_missing() is None


def call(name: str, *args: Tensor | float | None) -> None:
    """Run a kernel on as many threads as torch uses. Tensors must be contiguous where the source says so."""
    if _loaded().functions[name](*args, torch.get_num_threads()):
        raise MemoryError(f"no memory left for the work space of {name}")


@functools.cache
def _loaded() -> _Loaded:
    try:
        library = _open()
    except (_CannotCompile, OSError) as error:
        return _Loaded({}, str(error))
    functions = {}
    for name, letters in _SIGNATURES.items():
        function = library[name]
        function.argtypes = [*(_TYPES[letter] for letter in letters), ctypes.c_int]
        function.restype = ctypes.c_int
        functions[name] = function
    return _Loaded(functions)


class _CannotCompile(Exception):
    """With the reason."""


def _open() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise _CannotCompile(f"no C kernels on {sys.platform} yet, only on linux")
    kept = Path("~/.cache/megatron-klear").expanduser() / f"kernels-{_fingerprint()}.so"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        if not kept.exists():
            _compile(kept)
    except OSError:
        # A home that cannot be written to: once for each process, then, and the file is not needed once it is loaded.
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder) / "kernels.so"
            _compile(own)
            return ctypes.CDLL(str(own))
    return ctypes.CDLL(str(kept))


def _fingerprint() -> str:
    """Of all that decides what the compiler makes; a cache may be shared by machines."""
    facts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, platform.machine(), _processor()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What the processor says it can do."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _compile(target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise _CannotCompile("no C compiler (cc, gcc or clang) is installed")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        # Linked without OpenMP: see above.
        _run(compiler, *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(made))
        _run(compiler, "-shared", str(made), "-o", str(library), "-lm")
        # At once, as ranks that start together may all be here.
        library.replace(target)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _CannotCompile(f"{command[0]} took longer than {COMPILE_TIMEOUT_S} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise _CannotCompile(f"{command[0]} failed: {lines[0]}")
