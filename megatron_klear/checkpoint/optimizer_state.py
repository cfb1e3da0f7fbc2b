"""Megatron's optimizers as a checkpoint sees them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron chained, or the one there is."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def optimizer_form(optimizer: MegatronOptimizer) -> Literal["distributed", "plain"]:
    """Which of the two forms of state it has; neither can be read as the other."""
    sharded = all(isinstance(part, DistributedOptimizer) for part in optimizer_parts(optimizer))
    return "distributed" if sharded else "plain"


def make_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that made no step yet the state it would start with, to save it or to load into it.

    Megatron's own way takes a step with zero gradients, which counts, and decays the weights.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        if not isinstance(part, DistributedOptimizer) or not isinstance(inner, torch.optim.AdamW) or inner.state:
            continue
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            inner.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def load_keeping_settings(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load moments, main weights and step counts. Weight decay, betas and the like stay the recipe's."""
    parts = optimizer_parts(optimizer)
    # Megatron numbers the parts where there are two: dense weights and experts.
    states = [state[number] for number in range(len(parts))] if len(parts) > 1 else [state]
    if optimizer_form(optimizer) == "distributed":
        # These lists are rank 0's, which may hold no expert: then its expert part has made no step.
        step = states[0]["optimizer"]["param_groups"][0]["step"]
        for group in (group for own in states for group in own["optimizer"]["param_groups"]):
            group["step"] = step
    settings = [
        [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
        for groups in (part.optimizer.param_groups for part in parts)
    ]
    optimizer.load_state_dict(state)
    for part, own in zip(parts, settings, strict=True):
        for group, values in zip(part.optimizer.param_groups, own, strict=True):
            group.update(values)
