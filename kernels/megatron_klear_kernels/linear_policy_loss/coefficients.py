"""The clipped policy gradient in closed form: ONE formula for reference, eager and fused code.

With ratio r = exp(current_logprob - old_logprob) and advantage A, a token's loss is -value * A and its gradient with
respect to the current log-prob is -gradient * A:

    cell                       PPO value  gradient   GPPO value  gradient
    r > 1 + eps_high, A > 0    1+eps_high 0          1+eps_high  1+eps_high
    r < 1 - eps_low,  A < 0    1-eps_low  0          1-eps_low   1-eps_low
    everywhere else            r          r          r           r

(PPO: arXiv 1707.06347 Eq. 7 with the two widths of DAPO, arXiv 2503.14476 Eq. 10. GPPO: Klear-Reasoner, arXiv
2508.07629 Eq. 11-12.) There is no stop-gradient trick and no division by r, so nothing turns into NaN when r underflows
or overflows: only what exp() sees is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) = 4.9e8 is far outside any clip width, and finite in every dtype that is used for ratios.
MAX_ABS_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyCoefficients:
    """Per-token weights, all without gradient, shaped and typed like the log-ratio [T]."""

    ratio: Tensor
    value: Tensor  # loss = -value * advantage
    gradient: Tensor  # d loss / d logprob = -gradient * advantage
    clipped_low: Tensor  # bool: ratio below 1 - eps_low with a negative advantage
    clipped_high: Tensor  # bool: ratio above 1 + eps_high with a positive advantage


@torch.no_grad()
def policy_coefficients(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, keep_low: float, keep_high: float
) -> PolicyCoefficients:
    """Clip weights of each token. `keep_low` and `keep_high` scale the gradient that clipped tokens keep.

    PPO keeps 0 on both sides, GPPO 1. A ratio exactly at 1 - eps_low or 1 + eps_high is not clipped.
    """
    ratio = log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    clipped_high = (advantages > 0) & (ratio > 1 + eps_high)
    clipped_low = (advantages < 0) & (ratio < 1 - eps_low)
    value = ratio.masked_fill(clipped_high, 1 + eps_high).masked_fill(clipped_low, 1 - eps_low)
    gradient = ratio.masked_fill(clipped_high, keep_high * (1 + eps_high)).masked_fill(
        clipped_low, keep_low * (1 - eps_low)
    )
    return PolicyCoefficients(ratio, value, gradient, clipped_low, clipped_high)
