"""What `megatron-klear convert` promises though it reads and writes at the same time, and holds no model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist.pool import Pool
from dist.world import ONE, Layout
from helpers.tiny_qwen3 import hf_config, random_tensors, tiny_shape

# Padded to 48 rows on one rank, and to 64 on two.
SHAPE = tiny_shape(False, vocab_size=33)
TENSORS = random_tensors(SHAPE, seed=7)
MANY = Layout(tp=2, pp=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    hf_config(SHAPE).save_pretrained(tmp_path / "hf")
    save_file(TENSORS, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf"


def convert(pool: Pool, layout: Layout, action: str, folder: Path, *words: object, dtype: str = "float32") -> list[str]:
    """`done`, or the error, of each rank; a checkpoint lies beside the folder, an export too."""
    out = ("--out", folder.with_name("out")) if action == "export" else ()
    sizes = ("--tensor-model-parallel-size", layout.tp, "--pipeline-model-parallel-size", layout.pp)
    files = ("--hf", folder, "--megatron", folder.with_name("mcore"), "--params-dtype", dtype)
    argv = [str(word) for word in (action, *files, *out, *sizes, *words)]
    ranks = pool.run(layout.world_size, "dist.jobs_bridge:command", argv)
    return ["done" if code == 0 else str(code) for code, _ in ranks]


@pytest.mark.parametrize(
    ("there", "back"), [(ONE, MANY), (MANY, ONE), (Layout(tp=2), Layout(tp=4)), (ONE, ONE)], ids=str
)
def test_each_layouts_checkpoint_is_exported_by_each_bit_for_bit(
    pool: Pool, folder: Path, there: Layout, back: Layout
) -> None:
    assert convert(pool, there, "import", folder) == ["done"] * there.world_size
    assert convert(pool, back, "export", folder) == ["done"] * back.world_size
    found = load_file(folder.with_name("out") / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", [ONE, MANY], ids=str)
def test_another_dtype_than_the_files_is_made_on_the_way(pool: Pool, folder: Path, layout: Layout) -> None:
    assert set(convert(pool, layout, "import", folder, dtype="bfloat16")) == {"done"}
    assert set(convert(pool, layout, "export", folder, dtype="bfloat16")) == {"done"}
    found = load_file(folder.with_name("out") / "model.safetensors")
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_a_checkpoint_of_another_dtype_is_exported_as_asked(pool: Pool, folder: Path) -> None:
    convert(pool, ONE, "import", folder)
    for layout in (ONE, Layout(tp=2)):
        assert set(convert(pool, layout, "export", folder, dtype="bfloat16")) == {"done"}
        found = load_file(folder.with_name("out") / "model.safetensors")
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor.bfloat16()), name


@pytest.mark.parametrize("layout", [ONE, Layout(tp=2)], ids=str)
@pytest.mark.parametrize("where", [0.5, 0.0, 1.0], ids=["middle", "begin", "end"])
def test_a_changed_byte_is_found_before_the_export_has_a_name(
    pool: Pool, folder: Path, layout: Layout, where: float
) -> None:
    convert(pool, ONE, "import", folder)
    (path,) = folder.with_name("mcore").glob("iter_*/__0_1.distcp")
    data = bytearray(path.read_bytes())
    data[round(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    for error in convert(pool, layout, "export", folder):
        assert "CheckpointError" in error and "__0_1.distcp has changed since it was written" in error
    assert not folder.with_name("out").exists()


def test_a_file_cut_short_is_found_before_it_is_read(pool: Pool, folder: Path) -> None:
    convert(pool, ONE, "import", folder)
    (path,) = folder.with_name("mcore").glob("iter_*/__0_0.distcp")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    (error,) = convert(pool, ONE, "export", folder)
    assert f"__0_0.distcp has {len(whole) // 2} bytes instead of {len(whole)}" in error
    assert not folder.with_name("out").exists()
