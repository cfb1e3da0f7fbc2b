"""Hugging Face folders in and out: whole, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.tiny_qwen3 import hf_config, hf_model, random_tensors, tiny_shape
from megatron_klear.checkpoint.hf import INDEX, SINGLE, HfExport, HfWriter, open_folder
from megatron_klear.errors import CheckpointError

SHAPE = tiny_shape(True)
TENSORS = random_tensors(SHAPE, seed=1)


def read(folder: Path, shape: object = SHAPE) -> dict[str, Tensor]:
    with open_folder(folder, shape) as source:  # type: ignore[arg-type]
        return {name: source(name) for name in shape.tensor_shapes()}  # type: ignore[attr-defined]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    hf_model(SHAPE, TENSORS).save_pretrained(folder)
    assert (folder / SINGLE).is_file()
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    hf_model(SHAPE, TENSORS).save_pretrained(folder, max_shard_size="30KB")
    assert (folder / INDEX).is_file()
    return folder


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def test_folders_of_transformers_are_read(single: Path, sharded: Path) -> None:
    assert_equal(read(single), TENSORS)
    assert_equal(read(sharded), TENSORS)


def test_a_tied_head_that_is_written_out_is_no_fault(tmp_path: Path) -> None:
    save_file(TENSORS | {"lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}, tmp_path / SINGLE)
    assert_equal(read(tmp_path), TENSORS)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds neither {INDEX} nor {SINGLE}; expected a Hugging Face folder with weights"
    )


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError) as caught:
        read(sharded)
    assert str(caught.value) == (
        f"{sharded} lacks 1 of {len(shards)} weight files, first of them {shards[1].name};"
        " download or copy the folder again"
    )


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_a_truncated_file_is_named(single: Path, sharded: Path, keep: int) -> None:
    for path in (single / SINGLE, sorted(sharded.glob("*.safetensors"))[0]):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError) as caught:
            read(path.parent)
        assert str(caught.value).startswith(f"{path} is not a whole safetensors file (")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        read(sharded)


def test_an_index_that_promises_what_a_shard_does_not_hold_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name = "model.norm.weight"
    wrong = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    index["weight_map"][name] = wrong
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{wrong}.*{name}"):
        read(sharded)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} does not hold the weights that its config.json describes:"
        " missing ['model.norm.weight'], unknown ['model.norm.bias']"
    )


def test_an_untied_model_needs_its_head(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing \['lm_head.weight'\], unknown none"):
        read(single, tiny_shape(False))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Where config.json and the tokenizer come from."""
    folder = tmp_path / "template"
    hf_config(SHAPE).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not copied")
    return folder


def export(
    folder: Path, template: Path, tensors: dict[str, Tensor], *, shard: int = 10**9, dtype: torch.dtype = torch.float32
) -> HfExport:
    return HfWriter(folder, SHAPE, template=template, max_shard_bytes=shard).write(tensors.items(), dtype=dtype)


def test_an_export_is_read_by_transformers(tmp_path: Path, template: Path) -> None:
    for shard in (10**9, 20_000):
        done = export(tmp_path / "out", template, TENSORS, shard=shard)
        assert (done.folder, done.num_tensors) == (tmp_path / "out", len(TENSORS))
        assert done.num_bytes == sum(4 * tensor.numel() for tensor in TENSORS.values())
        assert (done.num_shards > 1) == (shard == 20_000)
        files = sorted(path.name for path in done.folder.glob("*.safetensors"))
        assert len(files) == done.num_shards
        assert files[-1] == (SINGLE if shard == 10**9 else f"model-{len(files):05d}-of-{len(files):05d}.safetensors")
        model = AutoModelForCausalLM.from_pretrained(done.folder, dtype="auto")
        assert model.dtype == torch.float32
        state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        assert_equal(state, TENSORS)
        assert_equal(read(done.folder), TENSORS)
        assert (done.folder / "tokenizer.json").read_text() == "{}"
        assert not (done.folder / "notes.txt").exists()


def test_no_shard_is_larger_than_asked(tmp_path: Path, template: Path) -> None:
    done = export(tmp_path / "out", template, TENSORS, shard=20_000)
    for path in done.folder.glob("*.safetensors"):
        assert sum(4 * tensor.numel() for tensor in load_file(path).values()) <= 20_000
    # A tensor larger than a shard gets one of its own.
    assert export(tmp_path / "out", template, TENSORS, shard=1).num_shards == len(TENSORS)


def test_the_dtype_is_that_of_the_export(tmp_path: Path, template: Path) -> None:
    folder = export(tmp_path / "out", template, TENSORS, dtype=torch.bfloat16).folder
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert_equal(read(folder), {name: tensor.bfloat16() for name, tensor in TENSORS.items()})


def test_tensors_are_taken_one_by_one(tmp_path: Path, template: Path) -> None:
    given: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in TENSORS.items():
            given.append(name)
            yield name, tensor

    writer = HfWriter(tmp_path / "out", SHAPE, template=template, max_shard_bytes=20_000)
    assert writer.write(stream(), dtype=torch.float32).num_tensors == len(given)


@pytest.mark.parametrize("existing", [False, True])
def test_an_incomplete_export_is_refused_and_the_old_folder_stays(
    tmp_path: Path, template: Path, existing: bool
) -> None:
    out = tmp_path / "out"
    if existing:
        export(out, template, TENSORS)
    cut = {name: tensor for name, tensor in TENSORS.items() if "q_norm" not in name}
    with pytest.raises(CheckpointError) as caught:
        export(out, template, cut, shard=20_000)
    assert str(caught.value) == (
        f"refusing to export {out}: 2 tensors missing, first model.layers.0.self_attn.q_norm.weight"
    )
    wrong = TENSORS | {"model.norm.weight": torch.ones(33)}
    with pytest.raises(CheckpointError) as caught:
        export(out, template, wrong)
    assert str(caught.value) == "refusing to export model.norm.weight with shape (33,): expected (32,)"
    with pytest.raises(CheckpointError, match=r"refusing to export lm_head.weight with shape .*: expected None"):
        export(out, template, TENSORS | {"lm_head.weight": torch.ones(61, 32)})
    assert out.exists() == existing
    if existing:
        assert_equal(read(out), TENSORS)


def test_an_export_replaces_what_was_there(tmp_path: Path, template: Path) -> None:
    out = tmp_path / "out"
    export(out, template, TENSORS, shard=20_000)
    other = {name: tensor + 1 for name, tensor in TENSORS.items()}
    export(out, template, other)
    assert_equal(read(out), other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "template"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", SINGLE, "tokenizer.json"]
