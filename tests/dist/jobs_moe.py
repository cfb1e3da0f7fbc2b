"""Jobs of the layout law for experts: one update of a ragged batch, measured, and ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import megatron_klear.models.build as build_module
import megatron_klear.training.learner as learner_module
import megatron_klear.training.optimizer as optimizer_module
from dist.world import Arrays, Layout, World, exported, gppo, gradients, ragged_samples, random_fill, world
from helpers.tiny_qwen3 import tiny_moe_shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.models.qwen3.moe import Router
from megatron_klear.parallel.context import split_batch
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.policy import Policy, build_policy
from megatron_klear.types import TrainBatch

STILL = OptimizerConfig(lr=0.0, clip_grad=0.0)
MOVING = OptimizerConfig(lr=1e-2, adam_eps=1e-2, weight_decay=0.1, clip_grad=0.5)
SHAPE = tiny_moe_shape()
NUM_UPDATES = 2


@dataclass(frozen=True)
class Variant:
    """How one update is cut, the weight of the load-balancing loss, and a way to get it wrong."""

    max_tokens: int = 80
    coefficient: float = 0.0
    mutant: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank saw; gradients and weights are full tensors, on rank 0 only."""

    num_micro_batches: int
    metrics: dict[str, float]
    grad_norm: float
    gradients: Arrays
    moved: Arrays
    """Weights after some updates with the sharded optimizer, less those at the start."""


def measure(rank: int, world_size: int, layout: Layout, variant: Variant) -> Measured:
    with world(layout) as here:
        BEFORE.get(variant.mutant, lambda: None)()
        policy = _policy(here, variant, STILL, sharded_optimizer=False)
        AFTER.get(variant.mutant, lambda policy: None)(policy)
        batch = _batch(here, variant)
        report = policy.update(batch, gppo()).report
        found = gradients(policy)
        policy = _policy(here, variant, MOVING, sharded_optimizer=True)
        AFTER.get(variant.mutant, lambda policy: None)(policy)
        start = exported(policy)
        for _ in range(NUM_UPDATES):
            policy.update(batch, gppo())
        moved = {name: tensor - start[name] for name, tensor in exported(policy).items()}
        return Measured(len(batch.micro_batches), report.metrics, report.grad_norm, found, moved)


def _policy(here: World, variant: Variant, optimizer: OptimizerConfig, *, sharded_optimizer: bool) -> Policy:
    settings = replace(
        here.settings(optimizer, sharded_optimizer=sharded_optimizer), moe_aux_loss_coeff=variant.coefficient
    )
    return build_policy(SHAPE, random_fill(SHAPE), here.context, settings, HeadSettings(4.0))


def _batch(here: World, variant: Variant) -> TrainBatch:
    """T is a multiple of 2 in every layout, so that padding, which routers see, is the same."""
    layout, rank = here.layout, here.context.topology.data_rank
    # The balance loss is one of micro-batches, so with it they must be the same in every layout too: four, dealt out.
    dealt = variant.coefficient > 0
    spec = PackSpec(
        1 if dealt else layout.dp,
        variant.max_tokens,
        2,
        context_parallel_size=layout.cp,
        num_micro_batches_multiple=layout.pp if layout.vpp > 1 else 1,
    )
    batches = pack(ragged_samples(), spec, sft_loss_coef=0.1)
    own = batches[0 if dealt else rank]
    if dealt:
        own = replace(own, micro_batches=own.micro_batches[rank :: layout.dp])
    batch = split_batch(own, here.context)
    for micro_batch in batch.micro_batches:
        micro_batch.old_logprobs = micro_batch.rollout_logprobs
    return batch


def routers(policy: Policy) -> list[Router]:
    return [module for module in policy.stage.core.modules() if isinstance(module, Router)]


def _halved_expert_gradients(policy: Policy) -> None:
    """Experts' gradients averaged over two ranks, dense ones summed."""
    for buffer in policy.ddps[0].expert_parallel_buffers:
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor = 0.5


def _experts_apart(policy: Policy) -> None:
    """Ranks that hold the same experts do not sum their gradients."""
    for group in policy.ddps[0].expert_parallel_bucket_groups:
        group.finish_grad_sync = group.start_grad_sync = lambda *args, **kwargs: None


@torch.no_grad()
def _swapped_experts(policy: Policy) -> None:
    """The first two experts of each rank, but not the router, change places."""
    for name, weight in policy.stage.core.named_parameters():
        if "local_experts.0." in name:
            other = policy.stage.core.get_parameter(name.replace("local_experts.0.", "local_experts.1."))
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)


def _not_normalized(policy: Policy) -> None:
    """A softmax over all experts, as if norm_topk_prob were false."""
    policy.stage.core.config.moe_router_pre_softmax = True


def _local_tokens(policy: Policy) -> None:
    """Megatron's own scaling of the load-balancing loss under per-token loss."""
    for router in routers(policy):
        router.calculate_per_token_loss = True


def _unmarked_routers(policy: Policy) -> None:
    """Under sequence parallelism each tensor rank routes a part of the sequence."""
    for router in routers(policy):
        router.weight.sequence_parallel = False  # type: ignore[attr-defined]


def _experts_taken_for_dense() -> None:
    """As Megatron does it without expert parallelism."""
    build_module.mark_experts = lambda module: None


def _micro_batches_forgotten() -> None:
    """A load-balancing loss summed over micro-batches and replicas."""
    learner_module.balance_loss_coefficient = lambda coefficient, **sizes: coefficient


def _no_gather_of_experts() -> None:
    """One replica needs no all-gather of parameters, so none for experts either."""

    def start_param_sync(self: optimizer_module._DataParallel, *args: Any, **kwargs: Any) -> None:
        if self.dp_group.size() > 1:
            super(optimizer_module._DataParallel, self).start_param_sync(*args, **kwargs)

    optimizer_module._DataParallel.start_param_sync = start_param_sync  # type: ignore[method-assign]


AFTER: dict[str, Callable[[Policy], None]] = {
    "expert gradients averaged": _halved_expert_gradients,
    "expert gradients not summed": _experts_apart,
    "experts swapped": _swapped_experts,
    "router not normalised": _not_normalized,
    "balance loss times local tokens": _local_tokens,
    "routers unmarked under sequence parallelism": _unmarked_routers,
}
BEFORE: dict[str, Callable[[], None]] = {
    "experts taken for dense weights": _experts_taken_for_dense,
    "balance loss summed over micro-batches": _micro_batches_forgotten,
    "experts not gathered after a step": _no_gather_of_experts,
}
