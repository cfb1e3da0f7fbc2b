"""The learning rate as a pure function of the update number: nothing to save, nothing to restore wrongly."""

from __future__ import annotations

import math

from megatron_klear.config.recipe import OptimizerConfig


def learning_rate(update: int, config: OptimizerConfig, decay_iters: int) -> float:
    """Rate of update number `update` (from 0): linear warm-up from lr / lr_warmup_iters, then the decay to min_lr.

    `decay_iters` is the update at which min_lr is reached, the warm-up included.
    """
    if update < config.lr_warmup_iters:
        return config.lr * (update + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    span = max(1, decay_iters - config.lr_warmup_iters)
    progress = min(1.0, (update - config.lr_warmup_iters) / span)
    remaining = 1.0 - progress if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * remaining
