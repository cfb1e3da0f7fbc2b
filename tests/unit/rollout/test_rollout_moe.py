"""The embedded engine with a Qwen3-MoE, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_moe_shape
from megatron_klear.checkpoint.hf import open_folder
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.errors import WeightSyncError
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.types import Completion, GenerationRequest

SEED = 11
SHAPES = {
    "one dense layer": tiny_moe_shape(),
    "weights do not add up to 1": tiny_moe_shape(norm_topk_prob=False),
    "one expert a token": tiny_moe_shape(num_experts_per_tok=1, norm_topk_prob=False),
}


def engine(shape: Qwen3Shape, *, dtype: torch.dtype = torch.float32, slots: int = 3) -> EmbeddedEngine:
    made = EmbeddedEngine(shape, max_running_requests=slots)
    made.load_weights(random_tensors(shape, SEED, dtype).items(), 7)
    return made


def requests() -> list[GenerationRequest]:
    """Prompts of 1 to 9 tokens and up to 14 new ones."""
    numbers = torch.randint(61, (9, 9), generator=torch.Generator().manual_seed(2)).tolist()
    return [GenerationRequest(f"r{i}", tuple(row[: i + 1]), 14 - i, seed=1000 + i) for i, row in enumerate(numbers)]


@torch.no_grad()
def rescored(shape: Qwen3Shape, request: GenerationRequest, completion: Completion) -> Tensor:
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    own = hf_model(shape, random_tensors(shape, SEED))(ids).logits[0, len(request.token_ids) - 1 : -1]
    return own.log_softmax(dim=-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logprobs_are_those_of_transformers(shape: Qwen3Shape) -> None:
    for request, completion in zip(requests(), engine(shape).generate(requests()), strict=True):
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, rescored(shape, request, completion), rtol=0, atol=1e-5)


def test_the_number_of_slots_changes_nothing() -> None:
    shape = tiny_moe_shape()
    for few, many in zip(engine(shape).generate(requests()), engine(shape, slots=16).generate(requests()), strict=True):
        assert few.token_ids == many.token_ids
        torch.testing.assert_close(torch.tensor(few.logprobs), torch.tensor(many.logprobs), rtol=0, atol=1e-5)


def test_a_bfloat16_engine_runs() -> None:
    (completion, *_) = engine(tiny_moe_shape(), dtype=torch.bfloat16).generate(requests())
    assert len(completion.token_ids) == 14 and torch.tensor(completion.logprobs).isfinite().all()


def test_a_hugging_face_folder_serves_as_weights(tmp_path: Path) -> None:
    """As transformers 5 saves it: experts by their own names, their number under another key of config.json."""
    hf_model(tiny_moe_shape(), random_tensors(tiny_moe_shape(), SEED)).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.num_experts == 4
    made = EmbeddedEngine(shape, max_running_requests=3)
    with open_folder(tmp_path, shape) as source:
        made.load_weights(((name, source(name)) for name in shape.tensor_shapes()), 7)
    assert made.generate(requests()) == engine(tiny_moe_shape()).generate(requests())


def test_a_missing_and_an_unknown_expert_are_named() -> None:
    shape = tiny_moe_shape()
    tensors = random_tensors(shape, SEED)
    made = EmbeddedEngine(shape)
    lost = "model.layers.2.mlp.experts.1.down_proj.weight"
    with pytest.raises(WeightSyncError, match=f"1 of {len(tensors)} weights did not come, first of them {lost}"):
        made.load_weights(((name, tensor) for name, tensor in tensors.items() if name != lost), 7)
    extra = {"model.layers.2.mlp.experts.4.down_proj.weight": tensors[lost]}
    with pytest.raises(WeightSyncError, match=r"unknown weight model\.layers\.2\.mlp\.experts\.4\.down_proj\.weight"):
        made.load_weights((tensors | extra).items(), 7)
