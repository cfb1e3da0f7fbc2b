"""Policy losses as plain sums, one class each; they differ in a `ClipRule`, in what the ratio is of, or in the value.

With token_scale w_t (mask, aggregation and global count in one number, fixed in `pack`), correction weight c_t, value
v_t and gradient weight g_t of `policy_coefficients`, advantage A_t, keep flag k_t of entropy-ratio clipping and
log-prob l_t:
    L = sum_t w_t (-c_t v_t A_t)       dL/dl_t = -w_t c_t k_t g_t A_t
`terms.py` adds the joint SFT term, the KL penalty and the entropy bonus.
"""

from __future__ import annotations

from torch import Tensor

from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    GppoLossConfig,
    GspoLossConfig,
    PpoLossConfig,
)
from megatron_klear.losses.sequences import sequence_mean
from megatron_klear.types import MicroBatch
from megatron_klear_kernels.linear_policy_loss.coefficients import (
    ClipRule,
    PolicyCoefficients,
    policy_coefficients,
)


class ClippedLoss:
    """A token-level clipped loss; the subclasses name their rule and their source."""

    joins_tokens = False
    """Whether a token's ratio depends on others of its sequence."""

    def __init__(self, rule: ClipRule) -> None:
        self.rule = rule

    def log_ratio(self, current: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[T] log of the ratio that is clipped, without gradient."""
        return current.detach() - micro_batch.old_logprobs

    def coefficients(self, current: Tensor, micro_batch: MicroBatch) -> PolicyCoefficients:
        """Weights [T] under the current log-probs [T]."""
        return policy_coefficients(self.log_ratio(current, micro_batch), micro_batch.advantages, self.rule)


class PpoLoss(ClippedLoss):
    """PPO and GRPO: clipped tokens get no gradient (arXiv 1707.06347 Eq. 7; 2402.03300 Eq. 3)."""

    def __init__(self, config: PpoLossConfig) -> None:
        super().__init__(ClipRule(config.eps_clip, config.eps_clip, dual_clip=config.eps_clip_c))


class ClipHigherLoss(ClippedLoss):
    """PPO with two widths (DAPO, arXiv 2503.14476 Eq. 10)."""

    def __init__(self, config: ClipHigherLossConfig) -> None:
        super().__init__(ClipRule(config.eps_clip, config.eps_clip_high, dual_clip=config.eps_clip_c))


class GppoLoss(ClippedLoss):
    """Clipped tokens keep a gradient of weight 1 -+ eps (Klear-Reasoner, arXiv 2508.07629 Eq. 11-12)."""

    def __init__(self, config: GppoLossConfig) -> None:
        rule = ClipRule(config.eps_clip, config.eps_clip_high, keep_low=1.0, keep_high=1.0, dual_clip=config.eps_clip_c)
        super().__init__(rule)


class CeGppoLoss(ClippedLoss):
    """GPPO with its clipped tokens weighed by two betas, in value and gradient (arXiv 2509.20712)."""

    def __init__(self, config: CeGppoLossConfig) -> None:
        low, high = config.gppo_beta_low, config.gppo_beta_high
        rule = ClipRule(
            config.eps_clip, config.eps_clip_high, value_low=low, value_high=high, keep_low=low, keep_high=high
        )
        super().__init__(rule)


class CispoLoss(ClippedLoss):
    """REINFORCE with a clipped weight: -sg(clip(r)) A log pi (arXiv 2506.13585 Eq. 4)."""

    def __init__(self, config: CispoLossConfig) -> None:
        super().__init__(ClipRule(config.eps_clip, config.eps_clip_high, two_sided=True))


class GspoLoss(ClippedLoss):
    """One ratio a sequence: exp of the mean log-ratio of its trained tokens (arXiv 2507.18071 Eq. 5-7).

    d/dl_t of w sum_t' s = w |y| (s / |y|) = w s: scales are equal inside a sequence, so each token's weight is s.
    """

    joins_tokens = True

    def __init__(self, config: GspoLossConfig) -> None:
        super().__init__(ClipRule(config.eps_clip, config.eps_clip_high))

    def log_ratio(self, current: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[T] the sequence's mean log-ratio at each of its positions."""
        return sequence_mean(super().log_ratio(current, micro_batch), micro_batch)
