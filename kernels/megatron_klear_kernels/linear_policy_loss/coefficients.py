"""The clipped policy gradient in closed form: ONE formula for reference, eager and fused code.

With ratio r = exp(current_logprob - old_logprob) and advantage A, a token's loss is -value * A and its gradient with
respect to the current log-prob is -gradient * A. `ClipRule` says what the two weights are in each cell:

    cell                              value                   gradient
    A > 0, r > 1 + eps_high           value_high (1+eps_high) keep_high (1+eps_high)
    A < 0, r < 1 - eps_low            value_low (1-eps_low)   keep_low (1-eps_low)
    A < 0, r > dual_clip (if set)     dual_clip               0
    two_sided: r outside, any A       the bound               the bound
    everywhere else                   r                       r

    method        value_low/high  keep_low/high   two_sided
    PPO, DAPO     1, 1            0, 0            no         arXiv 1707.06347 Eq. 7, 2503.14476 Eq. 10
    GPPO          1, 1            1, 1            no         arXiv 2508.07629 Eq. 11-12
    CE-GPPO       b1, b2          b1, b2          no         arXiv 2509.20712
    CISPO         -               -               yes        arXiv 2506.13585 Eq. 4

There is no stop-gradient trick and no division by r, so nothing turns into NaN when r underflows or overflows: only
what exp() sees is bounded. A ratio exactly at a bound is not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) = 4.9e8 is far outside any clip width, and finite in every dtype that is used for ratios.
MAX_ABS_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ClipRule:
    """What the weights of clipped tokens are; see the module's tables. `eps_low` None: no lower bound."""

    eps_low: float | None
    eps_high: float
    value_low: float = 1.0
    value_high: float = 1.0
    keep_low: float = 0.0
    keep_high: float = 0.0
    two_sided: bool = False
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyCoefficients:
    """Per-token weights, all without gradient, shaped and typed like the log-ratio [T]."""

    ratio: Tensor
    value: Tensor  # loss = -value * advantage
    gradient: Tensor  # d loss / d logprob = -gradient * advantage
    clipped_low: Tensor  # bool: the lower bound acts
    clipped_high: Tensor  # bool: the upper bound acts
    clipped_dual: Tensor  # bool: the dual clip acts


@torch.no_grad()
def policy_coefficients(log_ratio: Tensor, advantages: Tensor, rule: ClipRule) -> PolicyCoefficients:
    """Clip weights of each token."""
    ratio = log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    upper, lower = 1 + rule.eps_high, 1 - rule.eps_low if rule.eps_low is not None else 0.0
    high, low = ratio > upper, ratio < lower
    if rule.two_sided:
        bounded = ratio.masked_fill(high, upper).masked_fill(low, lower)
        none = torch.zeros_like(high)
        return PolicyCoefficients(ratio, bounded, bounded, low, high, none)
    high, low = high & (advantages > 0), low & (advantages < 0)
    dual = (advantages < 0) & (ratio > rule.dual_clip) if rule.dual_clip is not None else torch.zeros_like(high)
    value = ratio.masked_fill(high, rule.value_high * upper).masked_fill(low, rule.value_low * lower)
    gradient = ratio.masked_fill(high, rule.keep_high * upper).masked_fill(low, rule.keep_low * lower)
    if rule.dual_clip is not None:
        value, gradient = value.masked_fill(dual, rule.dual_clip), gradient.masked_fill(dual, 0.0)
    return PolicyCoefficients(ratio, value, gradient, low, high, dual)
