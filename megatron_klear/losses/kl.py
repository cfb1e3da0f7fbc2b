"""KL(pi || reference) from log-probs of sampled tokens, with d = log pi - log reference.

    estimator  value            d value / d log pi
    k1         d                1                  unbiased value; its gradient has mean zero on-policy
    k2         d^2 / 2          d                  biased value; the gradient of the true KL on-policy
    k3         e^-d - 1 + d     1 - e^-d           unbiased value, never negative (GRPO, arXiv 2402.03300 Eq. 4)
    k3+        e^-d - 1 + d     d                  the value of k3 with the gradient of k2, straight through
(joschu.net/blog/kl-approx.html)
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlType = Literal["k1", "k2", "k3", "k3+"]

# e^20: a token that far from the reference is penalised enough; float32 must not overflow.
MAX_ABS_DIFFERENCE = 20.0


def kl_estimate(current: Tensor, reference: Tensor, kind: KlType) -> Tensor:
    """[T] estimate of the KL at each token; the gradient flows to `current` [T] as the module's table says."""
    difference = current - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference)
        case "k3+":
            k2 = difference.square() / 2
            return _k3(difference).detach() + k2 - k2.detach()


def _k3(difference: Tensor) -> Tensor:
    """Only what exp() sees is bounded: a clamp inside autograd would leave +1 where the slope is about -e^20."""
    inverse_ratio = (-difference.detach()).clamp(-MAX_ABS_DIFFERENCE, MAX_ABS_DIFFERENCE).exp()
    value = inverse_ratio - 1 + difference.detach()
    # The difference is exactly 0, its derivative exactly 1.
    return value + (1 - inverse_ratio) * (difference - difference.detach())
