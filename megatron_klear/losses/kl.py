"""KL(pi || reference) at sampled tokens, as a number with a gradient; the estimators are the kernels' (kl.py there)."""

from __future__ import annotations

from torch import Tensor

from megatron_klear_kernels.linear_policy_loss import kl as kernel
from megatron_klear_kernels.linear_policy_loss.kl import KlType


def kl_estimate(current: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """[T] estimate of the KL at each token; the gradient that flows to `current` [T] is the estimator's slope."""
    found = kernel.kl_estimate((current - reference).detach(), kind)
    # What is added is exactly 0, its derivative is the slope.
    return found.value + found.slope * (current - current.detach())
