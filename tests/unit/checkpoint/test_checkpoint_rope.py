"""A model's rope goes with its weights: into checkpoints and exports, and a run does not go on with another one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.fake_checkpoints import SHAPE as OLD_SHAPE
from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import hf_config, hf_model, random_tensors, tiny_shape
from megatron_klear.checkpoint.hf import HfWriter
from megatron_klear.checkpoint.manifest import ModelEntry
from megatron_klear.checkpoint.megatron_files import ModelPart
from megatron_klear.checkpoint.store import CheckpointStore, RunRecord
from megatron_klear.config.model import ModelConfig, Qwen3Shape, model_shape, read_shape
from megatron_klear.errors import CheckpointError
from megatron_klear.parallel.topology import ParallelContext

PLAIN = tiny_shape(True)
TENSORS = random_tensors(PLAIN, seed=6)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A folder of a model without YaRN, as transformers writes it."""
    hf_config(PLAIN).save_pretrained(tmp_path / "template")
    return tmp_path / "template"


def stretched(template: Path) -> Qwen3Shape:
    model = ModelConfig(hf_checkpoint=str(template), yarn_factor=2.5, yarn_original_max_position_embeddings=64)
    return model_shape(model)


def export(shape: Qwen3Shape, template: Path, out: Path) -> Path:
    writer = HfWriter(out, shape, template=template, max_shard_bytes=10**9)
    return writer.write(TENSORS.items(), dtype=torch.float32).folder


def test_an_export_holds_the_rope_it_was_trained_with(template: Path, tmp_path: Path) -> None:
    shape = stretched(template)
    folder = export(shape, template, tmp_path / "out")
    assert read_shape(folder) == shape
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 160
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 2.5,
        "original_max_position_embeddings": 64,
    }
    ids = torch.randint(61, (1, 160), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")(ids).logits
        assert torch.equal(found, hf_model(shape, TENSORS)(ids).logits)


def test_an_export_of_an_export_stays_the_same(template: Path, tmp_path: Path) -> None:
    first = export(stretched(template), template, tmp_path / "one")
    second = export(read_shape(first), first, tmp_path / "two")
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    # And the way back, by a recipe that names no factor and a template without one.
    back = export(read_shape(template), first, tmp_path / "three")
    assert read_shape(back) == PLAIN
    assert AutoConfig.from_pretrained(back).rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}


def test_readers_older_than_rope_parameters_see_the_same(template: Path, tmp_path: Path) -> None:
    config = json.loads((export(stretched(template), template, tmp_path / "out") / "config.json").read_text())
    assert config["rope_theta"] == 1000.0
    assert config["rope_scaling"] == config["rope_parameters"]
    assert json.loads((export(PLAIN, template, tmp_path / "out") / "config.json").read_text())["rope_scaling"] is None


def test_manifests_written_before_there_was_a_rope_are_read() -> None:
    new = ModelEntry(shape=OLD_SHAPE, version=3)
    raw = new.model_dump(mode="json")
    assert ModelEntry.model_validate(raw) == new
    rope = raw["shape"].pop("rope")
    raw["shape"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    assert ModelEntry.model_validate(raw) == new


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as here:
        yield here


@pytest.fixture
def store(context: ParallelContext, tmp_path: Path, template: Path) -> CheckpointStore:
    """Holds a model with YaRN."""
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run", context)
    store.save([ModelPart(stage_on_cpu(stretched(template), TENSORS, context))], RunRecord(1, "weights"))
    return store


def test_a_run_with_another_rope_is_refused(store: CheckpointStore, template: Path) -> None:
    same, other = stretched(template), read_shape(template)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.load(ModelPart(stage_on_cpu(same, TENSORS, store.context)), store.open(), any_rope=True)
    assert not any("was trained with" in str(one.message) for one in told)
    theta = same.model_copy(update={"rope": same.rope.model_copy(update={"rope_theta": 1001.0})})
    for shape in (other, theta):
        part = ModelPart(stage_on_cpu(shape, TENSORS, store.context))
        with pytest.raises(CheckpointError) as caught:
            store.load(part, store.open())
        assert str(caught.value) == (
            f"{store.folder}/iter_0000001 was trained with yarn rope (rope_theta 1000.0, factor 2.5,"
            f" original_max_position_embeddings 64), this model has {shape.rope}; give config.json the rope_parameters"
            ' {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.5, "original_max_position_embeddings": 64}'
            " (a recipe: the old model.yarn_factor), or start a fresh run from its weights with model.load"
        )


def test_weights_alone_may_get_another_rope_and_it_is_said(store: CheckpointStore, template: Path) -> None:
    stage = stage_on_cpu(read_shape(template), random_tensors(PLAIN, seed=7), store.context)
    line = (
        r"iter_0000001 was trained with yarn rope .*, this model has default rope \(rope_theta 1000.0\): from here on"
    )
    with pytest.warns(UserWarning, match=line):
        store.load_weights(stage, any_rope=True)
    embedding = stage.core.embedding.word_embeddings.weight[: PLAIN.vocab_size]
    assert torch.equal(embedding.detach(), TENSORS["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="was trained with yarn rope"):
        store.load_weights(stage)


def test_another_model_is_named_before_its_rope(store: CheckpointStore, template: Path) -> None:
    shape = read_shape(template).model_copy(update={"intermediate_size": 64})
    with pytest.raises(CheckpointError) as caught:
        store.load_weights(stage_on_cpu(shape, random_tensors(shape, seed=1), store.context))
    assert "is of another model: intermediate_size 48 instead of 64, rope yarn rope (rope_theta" in str(caught.value)
