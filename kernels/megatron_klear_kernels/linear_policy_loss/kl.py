"""Estimates of KL(pi || reference) at sampled tokens, with d = log pi - log reference: values and slopes.

    estimator  value            slope in log pi
    k1         d                1                  unbiased value; its gradient has mean zero on-policy
    k2         d^2 / 2          d                  biased value; the gradient of the true KL on-policy
    k3         e^-d - 1 + d     1 - e^-d           unbiased value, never negative (GRPO, arXiv 2402.03300 Eq. 4)
    k3+        e^-d - 1 + d     d                  the value of k3 with the gradient of k2, straight through
(joschu.net/blog/kl-approx.html)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "k3+"]

# e^20: a token that far from the reference is penalised enough; float32 must not overflow. Only what exp() sees is
# bounded: a clamp inside autograd would leave +1 where the slope is about -e^20.
MAX_ABS_DIFFERENCE = 20.0


@dataclass(frozen=True, slots=True)
class KlEstimate:
    """Shaped and typed like the difference, without gradient."""

    value: Tensor
    slope: Tensor


@torch.no_grad()
def kl_estimate(difference: Tensor, kind: KlType) -> KlEstimate:
    """Estimate at each token from d = log pi - log reference."""
    if kind == "k1":
        return KlEstimate(difference, torch.ones_like(difference))
    if kind == "k2":
        return KlEstimate(difference.square() / 2, difference)
    inverse_ratio = (-difference).clamp(-MAX_ABS_DIFFERENCE, MAX_ABS_DIFFERENCE).exp()
    value = inverse_ratio - 1 + difference
    return KlEstimate(value, difference if kind == "k3+" else 1 - inverse_ratio)
