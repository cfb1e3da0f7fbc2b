"""The C kernels' library: compiled once, kept, done without where it cannot be had; and e^x, transposes, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_klear_kernels.native.library as library
from megatron_klear_kernels.attention.decode import decode_attention
from megatron_klear_kernels.attention.short import Sequences, short_attention
from megatron_klear_kernels.linear.autograd import linear
from megatron_klear_kernels.native.library import call, can_attend, why_missing
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu

needs_library = pytest.mark.skipif(why_missing() is not None, reason=f"no C kernels: {why_missing()}")
USE = """
import torch
from megatron_klear_kernels.implementations import small_kernels
from megatron_klear_kernels.swiglu.autograd import swiglu
print(small_kernels(False, torch.float32))
print(swiglu(torch.tensor([[0.0, 1.0, 2.0, 3.0]])).mul(1e4).round().tolist())
"""
RIGHT = "[[0.0, 21932.0]]"


def start(home: Path, **environment: str) -> subprocess.Popen[str]:
    """A process with a home of its own that uses a kernel."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", USE],
        env=os.environ | {"PYTHONPATH": paths, "HOME": str(home)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out.splitlines()


def kept(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "megatron-klear").iterdir())


@needs_library
def test_processes_that_start_together_share_one_file(tmp_path: Path) -> None:
    for printed in [ended(process) for process in [start(tmp_path) for _ in range(2)]]:
        assert printed[0] == "small kernels: native (float32 on a CPU)"
    (file,) = kept(tmp_path)
    made = file.stat().st_mtime_ns
    # The next one has no need of a compiler.
    assert ended(start(tmp_path, PATH="/nowhere"))[0].startswith("small kernels: native")
    assert kept(tmp_path) == [file] and file.stat().st_mtime_ns == made


@needs_library
def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file where a folder should be")
    assert ended(start(tmp_path))[0].startswith("small kernels: native")


def test_without_a_compiler_torch_runs(tmp_path: Path) -> None:
    printed = ended(start(tmp_path, PATH="/nowhere"))
    assert printed[0] == "small kernels: eager (no C compiler (cc, gcc or clang) is installed)"
    assert printed[1] == RIGHT


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'no such option: -march' >&2\nexit 1\n")
    compiler.chmod(0o755)
    printed = ended(start(tmp_path, PATH=f"{tmp_path}:/bin:/usr/bin"))
    assert printed[0] == f"small kernels: eager ({compiler} failed: no such option: -march)"
    assert printed[1] == RIGHT and kept(tmp_path) == []


def test_a_shared_home_keeps_a_file_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = library._fingerprint()
    assert library._fingerprint() == before
    monkeypatch.setattr(library, "_processor", lambda: "flags : sse2")
    assert library._fingerprint() != before


def test_asked_for_by_name_where_it_cannot_run() -> None:
    with pytest.raises(ValueError, match=r'"native" was asked for, but it is for float32 on a CPU, not torch.bfloat16'):
        swiglu(torch.ones(2, 4, dtype=torch.bfloat16), implementation="native")


def test_a_shape_without_memory_takes_torch() -> None:
    assert swiglu(torch.empty(2, 4, device="meta")).shape == (2, 2)


@needs_library
def test_what_attention_can_take() -> None:
    x = torch.ones(1)
    assert can_attend(x, 32) and not can_attend(x, 24) and not can_attend(x.bfloat16(), 32)


@needs_library
def test_the_exponential_over_all_its_range() -> None:
    """Through silu, which is x / (1 + e^-x)."""
    x = torch.cat((torch.linspace(-87, 88.7, 200_001), torch.tensor([-300.0, 300.0, torch.inf, torch.nan])))
    out = swiglu(torch.stack((x, torch.ones_like(x)), dim=1), implementation="native")[:, 0].double()
    exact = x.double() * torch.sigmoid(x.double())
    numbers = slice(0, -2)
    assert ((out - exact).abs()[numbers] <= 4e-7 * exact.abs()[numbers] + 1e-36).all()
    assert out[-2] == torch.inf and out[-1].isnan()


@needs_library
@pytest.mark.parametrize("size", [(1, 1), (3, 40), (16, 16), (17, 33), (1000, 5), (129, 300)], ids=str)
def test_transpose(size: tuple[int, int]) -> None:
    x = torch.randn(size)
    out = torch.full((size[1], size[0]), torch.nan)
    call("transpose", x, *size, out)
    assert torch.equal(out, x.t())


@needs_library
def test_the_number_of_threads_changes_no_bit_of_what_rows_give() -> None:
    x, weight = torch.randn(3000, 128), torch.randn(256, 128)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(swiglu(x, implementation="native"))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    out = linear(x.requires_grad_(), weight)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3000, 128), rtol=1e-4, atol=1e-4)


@needs_library
def test_sizes_that_do_not_fit_never_reach_the_kernels() -> None:
    """They would read and write behind the end of a tensor."""
    x = torch.randn(5, 2, 16)
    with pytest.raises(AssertionError, match=r"weight \(8,\) of rows of 16"):
        rms_norm(x, torch.ones(8), 1e-6, implementation="native")
    with pytest.raises(AssertionError):
        rotate(x, x, torch.ones(4, 1, 8), torch.ones(4, 1, 8), implementation="native")
    with pytest.raises(AssertionError):
        short_attention(x, x[:4], x[:4], 1.0, Sequences(torch.tensor([0]), torch.tensor([5]), cover_all=True))
    keys, values = torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, 32, 16)
    for end in (0, 33):
        with pytest.raises(AssertionError):
            decode_attention(
                torch.ones(1, 48), torch.ones(1, 2, 16), torch.ones(1, 8, 2), keys, values, torch.tensor([0]), end, 1e-6
            )
