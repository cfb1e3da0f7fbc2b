"""The reference's weights go in and out of the stage, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.stages import cpu_context, stage_on_cpu
from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.training.reference import Reference


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


@pytest.fixture(params=(False, True), ids=("own_head", "tied"))
def stage(request: pytest.FixtureRequest, context: ParallelContext) -> ModelStage:
    shape = tiny_shape(tied=request.param)
    return stage_on_cpu(shape, random_tensors(shape, 3), context)


def weights(stage: ModelStage) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def train(stage: ModelStage) -> None:
    for parameter in stage.parameters():
        parameter.add_(torch.randn_like(parameter))


def test_inside_are_the_first_weights_and_after_it_the_own_ones_bit_for_bit(stage: ModelStage) -> None:
    first = weights(stage)
    places = {name: parameter.data_ptr() for name, parameter in stage.named_parameters()}
    reference = Reference(stage)
    train(stage)
    own = weights(stage)
    assert not any(torch.equal(own[name], first[name]) for name in own)
    for _ in range(2):
        with reference.swapped_in(stage):
            assert same(weights(stage), first)
        assert same(weights(stage), own)
    assert {name: parameter.data_ptr() for name, parameter in stage.named_parameters()} == places


def test_an_error_inside_gives_the_weights_back_too(stage: ModelStage) -> None:
    reference = Reference(stage)
    train(stage)
    own = weights(stage)
    with pytest.raises(RuntimeError, match="out of memory"), reference.swapped_in(stage):
        raise RuntimeError("out of memory")
    assert same(weights(stage), own)


def test_a_refreshed_reference_holds_todays_weights(stage: ModelStage) -> None:
    reference = Reference(stage)
    train(stage)
    today = weights(stage)
    reference.refresh(stage)
    train(stage)
    with reference.swapped_in(stage):
        assert same(weights(stage), today)


def test_what_is_loaded_through_the_stage_can_become_the_reference(stage: ModelStage) -> None:
    """As a resumed run reads its reference: the stage itself keeps its weights."""
    reference = Reference(stage)
    own = weights(stage)
    with reference.swapped_in(stage):
        train(stage)
        loaded = weights(stage)
        reference.refresh(stage)
    assert same(weights(stage), own)
    with reference.swapped_in(stage):
        assert same(weights(stage), loaded)


def test_its_copy_is_on_the_cpu_and_needs_no_gradient(stage: ModelStage) -> None:
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Reference(stage).swapped_in(stage):
        pass
    for parameter in stage.parameters():
        assert parameter.requires_grad and parameter.grad is not None
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
