"""What is chosen where, and that Triton kernels compile although nothing here can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_klear_kernels.implementations as support
import megatron_klear_kernels.triton_support as triton_support
from megatron_klear_kernels.implementations import small_kernels
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.triton_support import why_unavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu
from megatron_klear_kernels.implementations import small_kernels
swiglu(rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6))
rotate(torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 1), torch.ones(1, 1, 1))
print(small_kernels(True, torch.bfloat16))
"""

COMPILE = """
from helpers.triton_compile import compile_instead_of_running
compiled = compile_instead_of_running()
import torch
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu
from megatron_klear_kernels.triton_support import interpreted
assert not interpreted()
import megatron_klear_kernels.implementations as support
support.why_unavailable = lambda device: None
for dtype in (torch.bfloat16, torch.float32):
    for width in (128, 4096, 1000):
        x, weight = (torch.ones(*shape, width, dtype=dtype, requires_grad=True) for shape in ((32,), ()))
        rms_norm(x, weight, 1e-6, implementation="triton").sum().backward()
        swiglu(x, implementation="triton").sum().backward()
    for heads in (32, 5):
        query, key = (torch.ones(16, n, 128, dtype=dtype, requires_grad=True) for n in (heads, 1))
        table = torch.ones(2, 16, 1, 64, dtype=dtype)
        sum(out.sum() for out in rotate(query, key, *table, implementation="triton")).backward()
print(len(compiled), *sorted(set(compiled)))
"""


def run(code: str, **environment: str) -> str:
    """What the code prints in a process of its own."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_on_a_cpu_triton_never_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the interpreter could."""
    choose = small_kernels.__wrapped__
    assert (
        str(choose(False, torch.bfloat16)) == "small kernels: eager (the C kernels are for float32, not torch.bfloat16)"
    )
    monkeypatch.setattr(support, "why_missing", lambda: None)
    assert str(choose(False, torch.float32)) == "small kernels: native (float32 on a CPU)"
    monkeypatch.setattr(support, "why_missing", lambda: "no C compiler")
    assert str(choose(False, torch.float32)) == "small kernels: eager (no C compiler)"


@pytest.mark.parametrize(
    ("missing", "interpreted", "dtype", "choice"),
    [
        (None, False, torch.bfloat16, "triton (CUDA tensors)"),
        (None, False, torch.float64, "eager (the Triton kernels compute in float32, less than torch.float64)"),
        (None, True, torch.bfloat16, "eager (TRITON_INTERPRET is set, and the interpreter is for tests)"),
        ("too old a card", False, torch.bfloat16, "eager (too old a card)"),
    ],
)
def test_on_cuda_triton_runs_where_it_is_there(
    missing: str | None, interpreted: bool, dtype: torch.dtype, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "why_unavailable", lambda device: missing)
    monkeypatch.setattr(support, "interpreted", lambda: interpreted)
    # Past the cache, which belongs to the machine as it is.
    assert str(small_kernels.__wrapped__(True, dtype)) == f"small kernels: {choice}"


def test_triton_asked_for_where_it_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_unavailable(CUDA) is None
    with pytest.raises(ValueError, match=r"the tensors are on cpu.*TRITON_INTERPRET=1.*ask for \"eager\""):
        rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6, implementation="triton")


def test_without_triton_all_imports_and_torch_runs() -> None:
    assert run(IMPORT_WITHOUT_TRITON).startswith("small kernels: eager (the package triton is not installed")


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """An empty cache: else another test's compiled kernel would be found."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    printed = run(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert printed == "32 _backward_block _backward_tiles _forward_block _forward_tile _rotate_position"
