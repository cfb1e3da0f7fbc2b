"""A job on the products of linear layers."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from dist.world import Arrays, Layout, gppo, gradients, ragged_samples, tiny, world
from megatron_klear.config.loss import CorrectionConfig
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.training.annotate import Annotators, annotate
from megatron_klear_kernels.linear import autograd


def one_update(rank: int, world_size: int, layout: Layout, fast_from: int) -> tuple[Arrays, int]:
    """Gradients of an update where oneDNN makes products of at least `fast_from` multiplications, and how many."""
    autograd.FAST_FROM = fast_from
    fast_product, calls = autograd._fast_product, itertools.count()

    def counted(*args: Any) -> Tensor:
        next(calls)
        return fast_product(*args)

    autograd._fast_product = counted
    with world(layout) as here:
        policy = here.policy(tiny(False), optimizer=OptimizerConfig(lr=1e-2), sharded_optimizer=False)
        batch = here.batch(ragged_samples(), 80)
        annotate([batch], Annotators(policy, CorrectionConfig()))
        policy.update(batch, gppo())
        return gradients(policy), next(calls)
