"""A Qwen3-MoE on one rank against transformers, its router and load-balancing loss against their formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import MoEAuxLossAutoScaler
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.stages import cpu_context, source_of, stage_on_cpu
from helpers.tiny_qwen3 import hf_model, random_tensors, tiny_moe_shape, unstacked
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import _holders, export_weights, import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.models.qwen3.moe import Router, take_balance_losses
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.types import Topology

LENGTHS = (7, 1, 12, 4)
SHAPES = {
    "one dense layer": tiny_moe_shape(),
    "weights do not add up to 1": tiny_moe_shape(norm_topk_prob=False),
    "one expert a token": tiny_moe_shape(num_experts_per_tok=1, norm_topk_prob=False),
    "every expert": tiny_moe_shape(num_experts_per_tok=4, mlp_only_layers=()),
    "every second layer": tiny_moe_shape(mlp_only_layers=(), decoder_sparse_step=2, num_experts=5),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


def token_ids(shape: Qwen3Shape) -> Tensor:
    return torch.randint(shape.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def logits_of(stage: ModelStage) -> Tensor:
    """[T, V] of packed sequences; inside the scope."""
    batch = micro_batch_of_lengths(LENGTHS, token_ids=token_ids(stage.shape))
    hidden = stage.forward_hidden(stage.chunks[0].module, batch)[:, 0]
    return (hidden @ stage.core.head_weight().t())[:, : stage.shape.vocab_size]


def gradients_by_name(stage: ModelStage, context: ParallelContext) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in stage.core.parameters():
            # An expert that no token chose has no gradient here, and zeros in transformers' stack.
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return dict(export_weights(stage, qwen3_table(stage.shape), context))


@every_shape
def test_logits_and_gradients_are_those_of_transformers(shape: Qwen3Shape, context: ParallelContext) -> None:
    tensors = random_tensors(shape, 3)
    stage = stage_on_cpu(shape, tensors, context)
    with megatron_scope(context.device):
        logits = logits_of(stage)
        upstream = torch.linspace(-1, 1, logits.numel()).cos().view_as(logits)
        logits.backward(upstream)
    model = hf_model(shape, tensors)
    wanted = torch.cat([model(row[None]).logits[0] for row in token_ids(shape).split(LENGTHS)])
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    wanted.backward(upstream)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = unstacked(shape, {name: grad for name, grad in theirs.items() if grad is not None})
    ours = gradients_by_name(stage, context)
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-5 * grad.norm(), name


@every_shape
def test_what_is_imported_is_exported(shape: Qwen3Shape, context: ParallelContext) -> None:
    tensors = random_tensors(shape, 3)
    exported = list(export_weights(stage_on_cpu(shape, tensors, context), qwen3_table(shape), context))
    assert [name for name, _ in exported] == list(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported)


def test_a_missing_expert_is_named(context: ParallelContext) -> None:
    shape, tensors = tiny_moe_shape(), random_tensors(tiny_moe_shape(), 3)
    stage = stage_on_cpu(shape, tensors, context)
    lost = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[lost]
    with pytest.raises(CheckpointError, match=f"no tensor {lost}"):
        import_weights(stage, qwen3_table(shape), source_of(tensors))


def first_router(stage: ModelStage) -> Router:
    return next(module for module in stage.core.modules() if isinstance(module, Router))


def balance_loss(logits: Tensor, num_per_token: int) -> Tensor:
    """Switch's loss of one layer and micro-batch, for k experts a token."""
    num_tokens, num_experts = logits.shape
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(num_per_token).indices, 1.0)
    share = chosen.sum(0) / (num_tokens * num_per_token)
    return num_experts * (share * probs.mean(0)).sum()


@pytest.mark.parametrize("normalized", [True, False])
def test_routing_is_a_softmax_over_all_experts_and_the_best_of_it(normalized: bool, context: ParallelContext) -> None:
    shape = tiny_moe_shape(norm_topk_prob=normalized)
    router = first_router(stage_on_cpu(shape, random_tensors(shape, 3), context))
    x = torch.randn(50, 1, shape.hidden_size, generator=torch.Generator().manual_seed(4))
    with megatron_scope(context.device):
        probs, chosen = router(x)
    wanted = (x[:, 0].double() @ router.weight.double().t()).softmax(-1)
    best = torch.zeros_like(wanted, dtype=torch.bool).scatter(1, wanted.topk(2).indices, True)
    wanted = torch.where(best, wanted, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalized else wanted
    assert torch.equal(chosen, best)
    torch.testing.assert_close(probs.double(), wanted, rtol=1e-5, atol=1e-7)


def test_a_bfloat16_router_computes_in_float32(context: ParallelContext) -> None:
    shape = tiny_moe_shape()
    router = first_router(stage_on_cpu(shape, random_tensors(shape, 3), context)).bfloat16()
    x = torch.randn(9, 1, shape.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16().requires_grad_()
    logits = router.gating(x)
    exact = x.detach().double().requires_grad_()
    weight = router.weight.detach().double().requires_grad_()
    wanted = exact @ weight.t()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    upstream = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    logits.backward(upstream)
    wanted.backward(upstream.double())
    assert x.grad is not None and router.weight.grad is not None and exact.grad is not None and weight.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("num_per_token", [1, 2, 3])
def test_the_balance_loss_is_switchs(num_per_token: int, context: ParallelContext) -> None:
    """Value and gradient of one router, whose output is used for nothing else."""
    shape = tiny_moe_shape(num_experts_per_tok=num_per_token, norm_topk_prob=num_per_token > 1)
    stage = stage_on_cpu(shape, random_tensors(shape, 3), context)
    router, coefficient = first_router(stage), 0.3
    stage.core.config.moe_aux_loss_coeff = coefficient
    x = torch.randn(50, 1, shape.hidden_size, generator=torch.Generator().manual_seed(4))
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    with megatron_scope(context.device):
        probs, _ = router(x)
        (probs.sum() * 0).backward()
    weight = router.weight.detach().double().requires_grad_()
    wanted = balance_loss(x[:, 0].double() @ weight.t(), num_per_token)
    (coefficient * wanted).backward()
    assert router.weight.grad is not None and weight.grad is not None
    (found,) = take_balance_losses(stage.core)
    assert float(found) == pytest.approx(float(wanted.detach()), rel=1e-5)
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-7)
    assert list(take_balance_losses(stage.core)) == []


def test_perfect_balance_is_1() -> None:
    logits = 1e-3 * torch.eye(4, dtype=torch.float64).repeat(5, 1)
    assert float(balance_loss(logits, 1)) == pytest.approx(1.0, abs=1e-6)


def ranks_of(places: Mapping[int, tuple[int, int, int, int]]) -> list[Topology]:
    """By rank: stage, replica, tensor rank, expert rank."""
    return [
        Topology(rank=rank, pipeline_rank=stage, data_rank=replica, tensor_rank=tensor, expert_rank=expert)
        for rank, (stage, replica, tensor, expert) in places.items()
    ]


def test_shards_come_from_replica_0_and_experts_from_whoever_holds_them() -> None:
    # Two stages, each two replicas of two tensor ranks, four expert-parallel ranks in two of them.
    places = {0: (0, 0, 0, 0), 1: (0, 0, 1, 1), 2: (0, 1, 0, 0), 3: (0, 1, 1, 1)}
    places |= {4: (1, 0, 1, 0), 5: (1, 0, 0, 1), 6: (1, 1, 0, 2), 7: (1, 1, 1, 3)}
    assert _holders(ranks_of(places)) == {
        (0, None): [0, 1],
        (0, 0): [0],
        (0, 1): [1],
        (1, None): [5, 4],
        (1, 0): [4],
        (1, 1): [5],
        (1, 2): [6],
        (1, 3): [7],
    }
