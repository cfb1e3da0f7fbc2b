"""Jobs of the layout law: one update of the ragged batch, measured; and ways to get it wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

import megatron_klear.training.policy as policy_module
from dist.world import (
    Arrays,
    Layout,
    World,
    by_sample,
    exported,
    gppo,
    gradients,
    ragged_samples,
    tiny,
    to_array,
    world,
)
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.protocols import PolicyLoss
from megatron_klear.training.policy import Policy
from megatron_klear.types import LossOutput, MicroBatch, TokenStats, TrainBatch

STILL = OptimizerConfig(lr=0.0, clip_grad=0.0)
# A large eps keeps Adam from turning the rounding of a tiny gradient into a whole step.
MOVING = OptimizerConfig(lr=1e-2, adam_eps=1e-2, weight_decay=0.1, clip_grad=0.5)
NUM_UPDATES = 3


@dataclass(frozen=True)
class Variant:
    """One way to cut the work, and one way to break it."""

    tied: bool
    max_tokens: int
    mutant: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank saw. Arrays by name; gradients and weights are full tensors, on rank 0 only."""

    num_micro_batches: int
    metrics: dict[str, float]
    grad_norm: float
    logprobs: Arrays
    gradients: Arrays
    tied_copy: np.ndarray | None
    """Gradient of this rank's shard of the tied embedding, on first and last stage."""
    moved: Arrays
    """Weights after some updates with the sharded optimizer, less those at the start."""


def measure(rank: int, world_size: int, layout: Layout, variants: list[Variant]) -> list[Measured]:
    with world(layout) as here:
        return [_measure(here, variant) for variant in variants]


def _measure(here: World, variant: Variant) -> Measured:
    shape, samples = tiny(variant.tied), ragged_samples()
    policy = here.policy(shape, optimizer=STILL, sharded_optimizer=False)
    loss = MUTANTS[variant.mutant](policy)
    batch = here.batch(samples, variant.max_tokens)
    outcome = policy.update(batch, loss)
    stats = policy.stats(batch)
    rows = [one.logprobs for one in stats]
    assert all(bool((a == b).all()) for a, b in zip(rows, outcome.logprobs, strict=True)), "stats and update differ"
    return Measured(
        len(batch.micro_batches),
        outcome.report.metrics,
        outcome.report.grad_norm,
        by_sample(policy, batch, rows, samples),
        gradients(policy),
        _tied_copy(policy),
        {} if variant.mutant else _moved(here, variant, batch),
    )


def _tied_copy(policy: Policy) -> np.ndarray | None:
    topology = policy.context.topology
    at_an_end = topology.is_first_stage or topology.is_last_stage
    if not (policy.stage.shape.tie_word_embeddings and at_an_end):
        return None
    weight = policy.stage.core.shared_embedding_or_output_weight()
    return to_array(weight.main_grad)  # type: ignore[attr-defined]


def _moved(here: World, variant: Variant, batch: TrainBatch) -> Arrays:
    policy = here.policy(tiny(variant.tied), optimizer=MOVING)
    before = exported(policy)
    for _ in range(NUM_UPDATES):
        policy.update(batch, gppo())
    return {name: tensor - before[name] for name, tensor in exported(policy).items()}


def _right(policy: Policy) -> PolicyLoss:
    return gppo()


def _times_data_size(policy: Policy) -> PolicyLoss:
    """A loss for a trainer that averages gradients over the replicas, in one that sums them."""
    loss, size = gppo(), policy.context.topology.data_size

    def wrong(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        output = loss(stats, micro_batch)
        return LossOutput(output.loss * size, output.metrics)

    return wrong


def _two_tuple(policy: Policy) -> PolicyLoss:
    """Megatron divides a 2-tuple's loss by the number of micro-batches."""

    def two_tuple(loss: Tensor, report: object) -> tuple[Tensor, object]:
        # The schedule divides in place what it is given, and the report holds the undivided loss.
        return loss.clone(), report

    setattr(policy_module, "loss_tuple", two_tuple)  # noqa: B010  of another type, which is the point
    return gppo()


def _unmarked_norms(policy: Policy) -> PolicyLoss:
    """Norm weights whose gradient is not summed over the ranks of sequence parallelism."""
    for name, parameter in policy.stage.core.named_parameters():
        if "layernorm" in name:
            setattr(parameter, "sequence_parallel", False)  # noqa: B010  an attribute Megatron reads
    return gppo()


def _unmarked_shards(policy: Policy) -> PolicyLoss:
    """Sharded weights that pass for replicated ones."""
    for parameter in policy.stage.core.parameters():
        setattr(parameter, "tensor_model_parallel", False)  # noqa: B010  an attribute Megatron reads
    return gppo()


def _local_sft_count(policy: Policy) -> PolicyLoss:
    """alpha / (tokens of right samples on THIS replica) instead of all of them."""
    loss = gppo()

    def wrong(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        right = (micro_batch.nll_scale != 0).sum().clamp(min=1)
        total = micro_batch.nll_scale.max().clamp(min=1e-30).reciprocal() * 0.1
        old, micro_batch.nll_scale = micro_batch.nll_scale, micro_batch.nll_scale * (total / right)
        output = loss(stats, micro_batch)
        micro_batch.nll_scale = old
        return output

    return wrong


MUTANTS: dict[str, Callable[[Policy], PolicyLoss]] = {
    "": _right,
    "loss times the data-parallel size": _times_data_size,
    "loss divided by the number of micro-batches": _two_tuple,
    "norm weights unmarked under sequence parallelism": _unmarked_norms,
    "shards unmarked as tensor-parallel": _unmarked_shards,
    "SFT tokens counted locally": _local_sft_count,
}
