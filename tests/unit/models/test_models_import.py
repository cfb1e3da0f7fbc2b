"""Weights into Megatron and back, and its forward against transformers, on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.stages import cpu_context, source_of, stage_on_cpu
from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_shape
from megatron_klear.errors import CheckpointError
from megatron_klear.models.hf_bridge import export_weights, import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.topology import ParallelContext

LENGTHS = (7, 1, 12, 4)
both_ties = pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


@both_ties
def test_export_gives_back_what_was_imported(tied: bool, context: ParallelContext) -> None:
    shape = tiny_shape(tied)
    tensors = random_tensors(shape, 3)
    stage = stage_on_cpu(shape, tensors, context)
    exported = list(export_weights(stage, qwen3_table(shape), context))
    assert sorted(name for name, _ in exported) == sorted(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported)


@both_ties
def test_packed_logits_and_gradients_are_those_of_transformers(tied: bool, context: ParallelContext) -> None:
    shape = tiny_shape(tied)
    tensors = random_tensors(shape, 3)
    stage = stage_on_cpu(shape, tensors, context)
    ids = torch.randint(shape.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    with megatron_scope(context.device):
        hidden = stage.forward_hidden(stage.chunks[0].module, micro_batch_of_lengths(LENGTHS, token_ids=ids))[:, 0]
        logits = (hidden @ stage.core.head_weight().t())[:, : shape.vocab_size]
        upstream = torch.linspace(-1, 1, logits.numel()).cos().view_as(logits)
        logits.backward(upstream)
    model = hf_model(shape, tensors)
    theirs = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-4)
    theirs.backward(upstream)
    parameters, mine = dict(stage.named_parameters()), {}
    for mapping in qwen3_table(shape):
        gradient = parameters[mapping.megatron_name.format(layer=mapping.layer)].grad
        assert gradient is not None
        mine |= dict(zip(mapping.hf_names, mapping.join([gradient]), strict=True))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        limit = 1e-4 * parameter.grad.abs().max().item()
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=limit, msg=name)


def test_a_tensor_of_another_shape_is_refused(context: ParallelContext) -> None:
    shape = tiny_shape(tied=True)
    tensors = random_tensors(shape, 3)
    stage = stage_on_cpu(shape, tensors, context)
    name = "model.layers.1.self_attn.k_proj.weight"
    wrong: dict[str, Tensor] = tensors | {name: torch.zeros(12, 32)}
    message = rf"{name} has shape \(12, 32\), but config.json asks for \(24, 32\); the weights belong to another model"
    with pytest.raises(CheckpointError, match=message):
        import_weights(stage, qwen3_table(shape), source_of(wrong))


def test_a_missing_tensor_is_not_passed_over(context: ParallelContext) -> None:
    shape = tiny_shape(tied=True)
    tensors = random_tensors(shape, 3)
    stage = stage_on_cpu(shape, tensors, context)
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor model\.norm\.weight"):
        import_weights(stage, qwen3_table(shape), source_of(tensors))
