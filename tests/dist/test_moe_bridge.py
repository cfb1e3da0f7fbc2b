"""Experts of a Hugging Face folder -> expert-parallel ranks -> Hugging Face folder. See test_hf_bridge.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dist.pool import Pool
from dist.test_hf_bridge import ROWS, assert_close_logits, assert_same, hf_logits
from dist.world import ONE, Arrays, Layout
from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_moe_shape

SHAPE = tiny_moe_shape()
FULL = Layout(tp=2, pp=2, sp=True, ep=2)
LAYOUTS = [
    ONE,
    Layout(tp=2, sp=True),
    Layout(dp=2, ep=2),
    Layout(dp=2, ep=2, dispatcher="allgather"),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, sp=True, ep=2),
    Layout(tp=2, sp=True, dp=2, ep=4),
    FULL,
]


def arrays(dtype: torch.dtype = torch.float32) -> Arrays:
    return {name: t.to(dtype).float().numpy() for name, t in random_tensors(SHAPE, seed=3).items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_import_and_export_are_exact_and_logits_agree_with_transformers(pool: Pool, layout: Layout) -> None:
    tensors = arrays()
    through = "dist.jobs_bridge:through"
    before, after = pool.run(layout.world_size, through, layout, SHAPE, "float32", tensors, ROWS)[0]
    assert_same(before.tensors, tensors)
    assert_close_logits(before.logits, hf_logits(SHAPE, tensors))
    # Also when training has moved every tensor.
    assert all(np.abs(after.tensors[name] - tensors[name]).max() > 1e-4 for name in tensors)
    assert_close_logits(after.logits, hf_logits(SHAPE, after.tensors))
    again, _ = pool.run(1, through, ONE, SHAPE, "float32", after.tensors, ROWS)[0]
    assert_same(again.tensors, after.tensors)


def test_a_bfloat16_model_is_exported_bit_for_bit(pool: Pool) -> None:
    tensors = arrays(torch.bfloat16)
    job = ("dist.jobs_bridge:through", Layout(dp=2, ep=2), SHAPE, "bfloat16", tensors, ROWS)
    before, after = pool.run(2, *job)[0]
    assert_same(before.tensors, tensors)
    again, _ = pool.run(1, "dist.jobs_bridge:through", ONE, SHAPE, "bfloat16", after.tensors, ROWS)[0]
    assert_same(again.tensors, after.tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder as transformers writes it, in several shards."""
    hf_model(SHAPE, random_tensors(SHAPE, seed=5)).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    return tmp_path / "hf"


def convert(pool: Pool, layout: Layout, *argv: object) -> list[tuple[int | str, str]]:
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "expert": layout.ep}
    words = [word for name, size in sizes.items() for word in (f"--{name}-model-parallel-size", size)]
    return pool.run(layout.world_size, "dist.jobs_bridge:command", [str(word) for word in (*argv, *words)])


def tensors_in(folder: Path) -> Arrays:
    return {name: t.numpy() for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_the_command_converts_verifies_and_converts_back(pool: Pool, folder: Path, tmp_path: Path) -> None:
    here = ("--hf", folder, "--megatron", tmp_path / "mcore", "--params-dtype", "float32")
    ranks = convert(pool, FULL, "import", *here)
    assert [code for code, _ in ranks] == [0] * 4, ranks
    for layout in (FULL, ONE, Layout(dp=2, ep=2)):
        (code, printed), *_ = convert(pool, layout, "verify", *here)
        assert code == 0 and printed.startswith("OK: 86 positions, largest logit difference "), printed
    for layout in (Layout(pp=2, dp=2, ep=2), ONE):
        out = tmp_path / str(layout)
        assert convert(pool, layout, "export", *here, "--out", out, "--max-shard-bytes", 20_000)[0][0] == 0
        assert_same(tensors_in(out), tensors_in(folder))


def test_verify_finds_two_experts_that_changed_places(pool: Pool, folder: Path, tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE, seed=5)
    one, other = (f"model.layers.2.mlp.experts.{i}.down_proj.weight" for i in (1, 2))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    hf_model(SHAPE, tensors).save_pretrained(tmp_path / "swapped")
    here = ("--megatron", tmp_path / "mcore", "--params-dtype", "float32")
    convert(pool, Layout(dp=2, ep=2), "import", "--hf", folder, *here)
    ((code, printed),) = convert(pool, ONE, "verify", "--hf", tmp_path / "swapped", *here)
    assert code == 1 and printed.startswith("DIFFERENT: ")


def test_missing_and_unknown_experts_are_named(pool: Pool, tmp_path: Path) -> None:
    hf_model(SHAPE, random_tensors(SHAPE, seed=5)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost, extra = (f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in (3, 4))
    tensors[extra] = tensors.pop(lost)
    save_file(tensors, tmp_path / "model.safetensors")
    ranks = convert(pool, Layout(dp=2, ep=2), "import", "--hf", tmp_path, "--megatron", tmp_path / "mcore")
    for code, _ in ranks:
        assert str(code).startswith("CheckpointError") and f"missing ['{lost}'], unknown ['{extra}']" in str(code)


def test_a_layout_that_the_experts_do_not_fit_is_refused(pool: Pool, folder: Path) -> None:
    cases = (
        (Layout(dp=3, ep=3), "does not divide num_experts 4"),
        (Layout(dp=2, ep=4), "expert_model_parallel_size 4 does not divide the 2 ranks of a pipeline stage (2 ranks"),
    )
    for layout, reason in cases:
        for code, _ in convert(pool, layout, "import", "--hf", folder, "--megatron", "m"):
            assert str(code).startswith("ConfigError") and reason in str(code)
