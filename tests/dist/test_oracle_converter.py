"""An independent converter, mbridge, and this repository's make the same of the same, bit for bit.

mbridge is no dependency of the package and in none of its extras, for this one test file needs it. It is optional:
`pip install --no-deps mbridge` (0.15.1 was tried) beside the usual environment. It needs neither Transformer Engine
nor a GPU here: it fills and reads models of this repository (see jobs_oracle.py).

What mbridge cannot do and is not compared: a Qwen3-MoE in which some layers are dense (it has no names for these),
an export of several pipeline stages without CUDA.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dist.jobs_oracle import Bits, Compared, bits
from dist.pool import Pool
from dist.world import ONE, Layout
from helpers.tiny_qwen3 import hf_config, random_tensors, tiny_moe_shape, tiny_shape
from megatron_klear.config.model import Qwen3Shape

# 4 layers each, so that two stages of two chunks are possible.
SHAPES = {
    "untied": tiny_shape(False).model_copy(update={"num_hidden_layers": 4}),
    "tied": tiny_shape(True).model_copy(update={"num_hidden_layers": 4}),
    "moe": tiny_moe_shape(mlp_only_layers=()),
}
# tp4 has more ranks than KV heads.
DENSE_LAYOUTS = [ONE, Layout(tp=2), Layout(tp=4), Layout(pp=2, vpp=2), Layout(tp=2, pp=2)]
MOE_LAYOUTS = [
    ONE,
    Layout(tp=2, sp=True),
    Layout(dp=2, ep=2),
    Layout(tp=2, sp=True, ep=2),
    Layout(tp=2, sp=True, pp=2, ep=2),
]
CASES = [
    *((kind, layout) for kind in ("untied", "tied") for layout in DENSE_LAYOUTS),
    *(("moe", layout) for layout in MOE_LAYOUTS),
]


@pytest.fixture(scope="module")
def package() -> str:
    """Folder of mbridge."""
    found = importlib.util.find_spec("mbridge")
    if found is None or not found.submodule_search_locations:
        pytest.skip("mbridge is not importable; `pip install --no-deps mbridge` brings it")
    return found.submodule_search_locations[0]


def compare(
    pool: Pool, package: str, layout: Layout, shape: Qwen3Shape, folder: Path, dtypes: tuple[str, str]
) -> tuple[Bits, list[Compared]]:
    """The tensors in the model's type, and what each rank found; the file and the model may be of different types."""
    in_file, in_model = (vars(torch)[name] for name in dtypes)
    tensors = random_tensors(shape, seed=7, dtype=in_file)
    save_file(tensors, folder / "model.safetensors")
    hf_config(shape).save_pretrained(folder)
    job = ("dist.jobs_oracle:both", package, layout, shape, dtypes[1], str(folder))
    ranks = pool.run(layout.world_size, *job)
    return bits({name: tensor.to(in_model) for name, tensor in tensors.items()}), ranks


def assert_same(found: Bits, wanted: Bits) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


def assert_agree(wanted: Bits, ranks: list[Compared], layout: Layout) -> None:
    for one in ranks:
        assert one.parameters
        assert_same(one.parameters, one.their_parameters)
    assert_same(ranks[0].tensors, wanted)
    assert_same(ranks[0].their_tensors, wanted if layout.pp == 1 else {})


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_mbridge_agrees_both_ways(pool: Pool, package: str, kind: str, layout: Layout, tmp_path: Path) -> None:
    wanted, ranks = compare(pool, package, layout, SHAPES[kind], tmp_path, ("float32", "float32"))
    assert_agree(wanted, ranks, layout)


@pytest.mark.parametrize("kind", ["tied", "moe"])
@pytest.mark.parametrize("in_file", ["float32", "bfloat16"])
def test_mbridge_agrees_on_a_bfloat16_model(pool: Pool, package: str, kind: str, in_file: str, tmp_path: Path) -> None:
    layout = Layout(tp=2, sp=True)
    wanted, ranks = compare(pool, package, layout, SHAPES[kind], tmp_path, (in_file, "bfloat16"))
    assert_agree(wanted, ranks, layout)
