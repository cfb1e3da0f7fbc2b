"""Policy losses as plain sums. GPPO and its neighbours share one class and differ in what a clipped token keeps.

With token_scale w_t (mask, aggregation and global count in one number, fixed in `pack`), value v_t and gradient weight
g_t of `policy_coefficients`, advantage A_t and log-prob l_t:
    L = sum_t w_t (-v_t A_t)  +  sum_t n_t (-l_t)        dL/dl_t = -w_t g_t A_t - n_t
n_t is `nll_scale`: alpha / (global count of tokens in samples with reward exactly 1) on those tokens
(Klear-Reasoner, arXiv 2508.07629 Eq. 13-14, with log pi where the paper prints pi).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear.config.recipe import ClipHigherLossConfig, GppoLossConfig, LossConfig, PpoLossConfig
from megatron_klear.metrics import Metric
from megatron_klear.types import LossOutput, MicroBatch, TokenStats
from megatron_klear_kernels.linear_policy_loss.coefficients import policy_coefficients


class ClippedPolicyLoss:
    """Clipped surrogate whose clipped tokens keep `keep` of their bounded gradient: 0 is PPO, 1 is GPPO."""

    def __init__(self, *, eps_low: float, eps_high: float, keep: float) -> None:
        self.eps_low = eps_low
        self.eps_high = eps_high
        self.keep = keep

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed policy loss plus joint SFT term, with metrics that count only tokens with a scale."""
        current, old = stats.logprobs, micro_batch.old_logprobs
        scale, advantages = micro_batch.token_scale, micro_batch.advantages
        log_ratio = current.detach() - old
        c = policy_coefficients(
            log_ratio,
            advantages,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            keep_low=self.keep,
            keep_high=self.keep,
        )
        # The difference is exactly 0, its derivative exactly 1: the value is v, the gradient g, in one sum.
        pg_loss = -(scale * advantages * (c.value + c.gradient * (current - current.detach()))).sum()
        nll_loss = -(micro_batch.nll_scale * current).sum()
        mask = scale != 0
        metrics = {
            "train/pg_loss": Metric(pg_loss.detach(), "sum"),
            "train/nll_loss": Metric(nll_loss.detach(), "sum"),
            "train/ratio_mean": token_mean(c.ratio, mask),
            "train/ratio_max": Metric((c.ratio * mask).max(), "max"),
            "train/ratio_deviation_max": Metric(((c.ratio - 1).abs() * mask).max(), "max"),
            "train/ppo_kl": token_mean(-log_ratio, mask),
            "train/clip_fraction_low": token_mean(c.clipped_low, mask),
            "train/clip_fraction_high": token_mean(c.clipped_high, mask),
        }
        return LossOutput(pg_loss + nll_loss, metrics)


class SftLoss:
    """Negative log-likelihood as a plain sum: L = -sum_t w_t l_t."""

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed NLL over the micro-batch."""
        loss = -(micro_batch.token_scale * stats.logprobs).sum()
        return LossOutput(loss, {"train/nll_loss": Metric(loss.detach(), "sum")})


def build_policy_loss(config: LossConfig) -> ClippedPolicyLoss:
    """The loss a recipe names."""
    match config:
        case PpoLossConfig():
            return ClippedPolicyLoss(eps_low=config.eps_clip, eps_high=config.eps_clip, keep=0.0)
        case ClipHigherLossConfig():
            return ClippedPolicyLoss(eps_low=config.eps_clip, eps_high=config.eps_clip_high, keep=0.0)
        case GppoLossConfig():
            return ClippedPolicyLoss(eps_low=config.eps_clip, eps_high=config.eps_clip_high, keep=1.0)


def token_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of `values` [T] over the positions of `mask` [T] bool, as a mergeable metric."""
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    return Metric(kept.sum(), "token_mean", mask.sum())
