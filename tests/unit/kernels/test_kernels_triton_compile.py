"""The Triton kernels compile for Hopper on a machine without a device; what runs them, and why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_klear_kernels.triton_support as support
from megatron_klear_kernels.linear_policy_loss import triton_config
from megatron_klear_kernels.linear_policy_loss.triton_config import launch, product_tiles, row_tiles
from megatron_klear_kernels.triton_support import num_blocks, why_unavailable

ROOT = Path(__file__).resolve().parents[3]
# Of a Hopper multiprocessor, for one program.
SHARED_MEMORY = 227 * 1024


def run_python(*arguments: str, tmp_path: Path, **environment: str) -> str:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "tests"))
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    pytest.importorskip("triton", reason="the package triton is not installed")
    script = str(ROOT / "tests" / "helpers" / "compile_triton.py")
    return json.loads(run_python(script, tmp_path=tmp_path_factory.mktemp("compile"), TRITON_INTERPRET="0"))


def test_every_kernel_compiles_and_fits_the_shared_memory(compiled: dict[str, list[dict[str, Any]]]) -> None:
    numbers = {name: len(variants) for name, variants in compiled.items()}
    assert numbers == {
        "_statistics_kernel": 3,
        "_gradient_kernel": 3,
        "_scale_kernel": 1,
        "_exp_kernel": 4,
        "_merge_kernel": 1,
        "_exp_gradient_kernel": 4,
    }
    assert max(one["shared"] for variants in compiled.values() for one in variants) <= SHARED_MEMORY


def test_two_byte_products_run_on_tensor_cores(compiled: dict[str, list[dict[str, Any]]]) -> None:
    assert ["wgmma" in one["steps"] for one in compiled["_exp_kernel"]] == [True, True, False, True]


def test_a_nan_logit_survives_the_lower_bound_of_distances(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """numpy's maximum, which the interpreter uses, keeps NaN anyway; the hardware's drops it unless told."""
    for one in compiled["_statistics_kernel"] + compiled["_exp_kernel"]:
        assert "max.NaN" in one["steps"]


def test_a_barrier_stands_between_a_blocks_loads_and_its_stores(compiled: dict[str, list[dict[str, Any]]]) -> None:
    """What makes gradients on top of logits safe, and what the interpreter cannot show."""
    for one in compiled["_gradient_kernel"]:
        steps = one["steps"]
        barrier = steps.index("bar")
        assert steps.count("bar") == 1
        assert "st" not in steps[:barrier]
        assert "ld" not in steps[barrier:]


def test_where_the_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    monkeypatch.setattr(support, "interpreted", lambda: True)
    assert why_unavailable(torch.device("cpu")) is None
    monkeypatch.setattr(support, "interpreted", lambda: False)
    reason = why_unavailable(torch.device("cpu"))
    assert reason is not None and "the tensors are on cpu, where Triton needs its interpreter" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_unavailable(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_unavailable(torch.device("cuda")) == (
        "compute capability (7, 5) is below (8, 0), which has no bfloat16 products"
    )


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_product_tiles_fit_their_device(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """99 KiB of shared memory is what consumer devices have."""
    monkeypatch.setattr(triton_config, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tiles = product_tiles(dtype, torch.device("cuda"))
        needed = tiles.num_stages * (tiles.rows + tiles.columns) * tiles.depth * dtype.itemsize
        assert needed <= (SHARED_MEMORY if major in (9, 10) else 99 * 1024)


@pytest.mark.parametrize("num_columns", [1, 127, 128, 129, 1001, 4096, 151_936])
def test_row_blocks_are_powers_of_two(num_columns: int) -> None:
    tiles = row_tiles(num_columns)
    assert tiles.block & (tiles.block - 1) == 0
    assert tiles.block >= min(num_columns, 4096)
    assert 1 <= tiles.num_warps <= 8


def test_blocks_cover_their_size() -> None:
    assert [num_blocks(size, 8) for size in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_a_launch_hands_everything_over() -> None:
    seen: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: seen.append((grid, arguments, options))

    tensor = torch.zeros(1)
    launch(Kernel(), (3,), tensor, 4, BLOCK=8)
    assert seen == [((3,), (tensor, 4), {"BLOCK": 8})]
