"""Jobs on what the planner predicts: parameters, optimizer state and saved activations of each rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dist.world import Layout, gppo, ragged_samples, tiny, world
from megatron_klear.config.model import Qwen3Shape
from helpers.micro_batches import micro_batch_of_lengths
from helpers.saved_tensors import saved_tensors
from megatron_klear.checkpoint.optimizer_state import optimizer_parts
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.training.policy import Policy


@dataclass(frozen=True)
class Counted:
    """What one rank holds."""

    stage: int
    parameters: int
    optimizer_bytes: int
    activation_bytes: int
    """0 where a pipeline would have to send activations."""


def four_layers(tied: bool) -> Qwen3Shape:
    return tiny(tied).model_copy(update={"num_hidden_layers": 4})


def count(
    rank: int, world_size: int, layout: Layout, tied: bool, dtype: str, sharded: bool, lengths: list[int]
) -> Counted:
    with world(layout) as here:
        policy = here.policy(four_layers(tied), optimizer=OptimizerConfig(lr=1e-3), dtype=dtype, sharded_optimizer=sharded)
        policy.update(here.batch(ragged_samples(), 80), gppo())
        saved = 0
        if layout.pp == 1:
            with megatron_scope(here.context.device), saved_tensors(policy.stage) as tensors:
                policy.stage.forward_hidden(policy.stage.chunks[-1].module, micro_batch_of_lengths(lengths))
            saved = tensors.num_bytes
        parameters = sum(parameter.numel() for parameter in policy.stage.parameters())
        return Counted(here.context.topology.pipeline_rank, parameters, _optimizer_bytes(policy), saved)


def _optimizer_bytes(policy: Policy) -> int:
    """Of moments and main weights, without what shares its memory with the model's own weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in policy.stage.parameters()}
    kept: dict[int, int] = {}
    for part in optimizer_parts(policy.optimizer):
        tensors = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        for state in part.optimizer.state.values():
            tensors += [value for name, value in state.items() if torch.is_tensor(value) and name != "step"]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
    return sum(kept.values())
