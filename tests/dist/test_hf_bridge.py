"""Hugging Face tensors -> shards of any layout -> Hugging Face tensors: values exact, logits those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dist.jobs_bridge import Bridged
from dist.pool import Pool
from dist.world import Arrays, Layout
from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_shape
from megatron_klear.config.model import Qwen3Shape

# tp4 has more ranks than KV heads.
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2), Layout(tp=2, pp=2, sp=True)]
ROWS = [[5, 60, 3, 0, 17, 42, 9], [1], [33, 2, 2, 58]]


def hf_logits(shape: Qwen3Shape, tensors: Arrays) -> np.ndarray:
    """What transformers computes for ROWS, one row after the other."""
    model = hf_model(shape, {name: torch.from_numpy(array) for name, array in tensors.items()})
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits[0] for row in ROWS]).numpy()


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def assert_close_logits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def through(pool: Pool, layout: Layout, tied: bool, tensors: Arrays, dtype: str = "float32") -> tuple[Bridged, Bridged]:
    return pool.run(layout.world_size, "dist.jobs_bridge:through", layout, tied, dtype, tensors, ROWS)[0]


def arrays(tied: bool, dtype: torch.dtype = torch.float32) -> Arrays:
    return {name: t.to(dtype).float().numpy() for name, t in random_tensors(tiny_shape(tied), seed=3).items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_import_and_export_are_exact_and_logits_agree_with_transformers(pool: Pool, layout: Layout, tied: bool) -> None:
    shape, tensors = tiny_shape(tied), arrays(tied)
    before, after = through(pool, layout, tied, tensors)
    assert_same(before.tensors, tensors)
    assert_close_logits(before.logits, hf_logits(shape, tensors))
    # Also when training has moved every tensor.
    assert all(np.abs(after.tensors[name] - tensors[name]).max() > 1e-4 for name in tensors)
    assert_close_logits(after.logits, hf_logits(shape, after.tensors))
    again, _ = through(pool, Layout(), tied, after.tensors)
    assert_same(again.tensors, after.tensors)


def test_a_bfloat16_model_is_exported_bit_for_bit(pool: Pool) -> None:
    tensors = arrays(True, torch.bfloat16)
    before, after = through(pool, Layout(tp=2, pp=2), True, tensors, "bfloat16")
    assert_same(before.tensors, tensors)
    again, _ = through(pool, Layout(), True, after.tensors, "bfloat16")
    assert_same(again.tensors, after.tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder as transformers writes it, in two shards."""
    shape = tiny_shape(True)
    hf_model(shape, random_tensors(shape, seed=5)).save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    return tmp_path / "hf"


def convert(pool: Pool, layout: Layout, *argv: object) -> list[tuple[int | str, str]]:
    sizes = ("--tensor-model-parallel-size", layout.tp, "--pipeline-model-parallel-size", layout.pp)
    return pool.run(layout.world_size, "dist.jobs_bridge:command", [str(word) for word in (*argv, *sizes)])


def tensors_in(folder: Path) -> Arrays:
    """As transformers reads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def test_the_command_converts_verifies_and_converts_back(pool: Pool, folder: Path, tmp_path: Path) -> None:
    here = ("--hf", folder, "--megatron", tmp_path / "mcore", "--params-dtype", "float32")
    many = Layout(tp=2, pp=2)
    ranks = convert(pool, many, "import", *here)
    assert [code for code, _ in ranks] == [0] * 4
    assert [printed for _, printed in ranks] == [f"imported {folder} to {tmp_path}/mcore/iter_0000000\n", "", "", ""]

    for layout in (many, Layout()):
        (code, printed), *_ = convert(pool, layout, "verify", *here)
        assert code == 0 and printed.startswith("OK: 86 positions, largest logit difference ")

    out = ("--out", tmp_path / "back", "--max-shard-bytes", 20_000)
    assert convert(pool, many, "export", *here, *out)[0][0] == 0
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert_same(tensors_in(tmp_path / "back"), tensors_in(folder))


def test_verify_says_different_and_fails(pool: Pool, folder: Path, tmp_path: Path) -> None:
    shape = tiny_shape(True)
    tensors = random_tensors(shape, seed=5)
    # As small a mistake as a mapping can make: the q and k norms of one layer swapped.
    q, k = (f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]
    hf_model(shape, tensors).save_pretrained(tmp_path / "swapped")
    here = ("--megatron", tmp_path / "mcore", "--params-dtype", "float32")
    convert(pool, Layout(), "import", "--hf", folder, *here)
    ((code, printed),) = convert(pool, Layout(), "verify", "--hf", tmp_path / "swapped", *here)
    assert code == 1 and printed.startswith("DIFFERENT: ")


def test_the_command_refuses_words_that_make_no_sense(pool: Pool, folder: Path) -> None:
    with pytest.raises(AssertionError, match="SystemExit: 2"):
        convert(pool, Layout(), "export", "--hf", folder, "--megatron", "m")


def test_a_layout_the_model_does_not_fit_is_refused_before_it_is_built(pool: Pool, folder: Path) -> None:
    for layout, reason in (
        (Layout(tp=3), "num_key_value_heads 2"),
        (Layout(pp=4), "2 layers for 4 stages"),
    ):
        for code, _ in convert(pool, layout, "import", "--hf", folder, "--megatron", "m"):
            assert str(code).startswith("ConfigError") and reason in str(code)


def test_a_tensor_of_another_shape_is_named(pool: Pool, tmp_path: Path) -> None:
    shape = tiny_shape(True)
    hf_model(shape, random_tensors(shape, seed=5)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    ranks = convert(pool, Layout(tp=2), "import", "--hf", tmp_path, "--megatron", tmp_path / "mcore")
    for code, _ in ranks:
        assert code == (
            "CheckpointError: model.layers.0.mlp.gate_proj.weight has shape (48, 32), but config.json asks for"
            " (64, 32); the weights belong to another model"
        )
    assert not (tmp_path / "mcore").exists()
