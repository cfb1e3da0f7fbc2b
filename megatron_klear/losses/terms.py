"""The whole loss of an update: a policy loss and the terms that stand beside it, each a plain sum.

    L = policy  +  sum_t n_t (-l_t)  +  kl_coef sum_t w_t KL_t  -  entropy_coef sum_t w_t H_t
n_t is `nll_scale`: alpha and the aggregation's weight over samples with reward exactly 1 (Klear-Reasoner, arXiv
2508.07629 Eq. 13-14, with log pi where the paper prints pi). It stands outside entropy-ratio clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.config.loss import ErcConfig, KlConfig
from megatron_klear.losses.kl import kl_estimate
from megatron_klear.losses.policy import ClippedLoss
from megatron_klear.losses.sequences import trained
from megatron_klear.metrics import Metric
from megatron_klear.types import LossOutput, MicroBatch, TokenStats
from megatron_klear_kernels.linear_policy_loss.coefficients import PolicyCoefficients

# Entropies of near-certain tokens are rounding noise; the ratio must not be decided by it (arXiv 2512.05591 uses 1e-8).
ENTROPY_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Weights of the terms beside the policy loss. `kl` None: no penalty in the loss."""

    erc: ErcConfig | None = None
    kl: KlConfig | None = None
    entropy_coef: float = 0.0


class RlLoss:
    """A policy loss with its terms: a `PolicyLoss`."""

    def __init__(self, policy: ClippedLoss, terms: LossTerms) -> None:
        self.policy = policy
        self.terms = terms

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed loss, with metrics that count only trained tokens."""
        current, scale, mask = stats.logprobs, micro_batch.token_scale, trained(micro_batch)
        c = self.policy.coefficients(current, micro_batch)
        metrics = _ratio_metrics(c, current, micro_batch, mask)
        gradient = c.gradient
        if self.terms.erc is not None:
            keep = erc_keep(stats, micro_batch, self.terms.erc)
            gradient = gradient * keep
            metrics["train/erc_masked"] = token_mean(~keep, mask)
        # The difference is exactly 0, its derivative exactly 1: the value is v, the gradient g, in one sum.
        weights = scale * micro_batch.policy_weights * micro_batch.advantages
        pg_loss = -(weights * (self.policy.value(c, current) + gradient * (current - current.detach()))).sum()
        nll_loss = -(micro_batch.nll_scale * current).sum()
        loss = pg_loss + nll_loss
        metrics |= {
            "train/pg_loss": Metric(pg_loss.detach(), "sum"),
            "train/nll_loss": Metric(nll_loss.detach(), "sum"),
        }
        if self.terms.kl is not None:
            kl = kl_estimate(current, micro_batch.reference_logprobs, self.terms.kl.kl_type)
            loss = loss + self.terms.kl.kl_coef * (scale * kl).sum()
            metrics["train/kl"] = token_mean(kl, mask)
        if self.terms.entropy_coef > 0:
            assert stats.entropy is not None
            loss = loss - self.terms.entropy_coef * (scale * stats.entropy).sum()
        return LossOutput(loss, metrics)


def erc_keep(stats: TokenStats, micro_batch: MicroBatch, config: ErcConfig) -> Tensor:
    """[T] bool: 1 - erc_low < H / H_old < 1 + erc_high (strict; ERC, arXiv 2512.05591)."""
    assert stats.entropy is not None, "entropy-ratio clipping needs the entropy of the current policy"
    ratio = (stats.entropy.detach() + ENTROPY_FLOOR) / (micro_batch.old_entropy + ENTROPY_FLOOR)
    return (ratio > 1 - config.erc_low) & (ratio < 1 + config.erc_high)


def _ratio_metrics(c: PolicyCoefficients, current: Tensor, micro_batch: MicroBatch, mask: Tensor) -> dict[str, Metric]:
    return {
        "train/ratio_mean": token_mean(c.ratio, mask),
        "train/ratio_max": Metric((c.ratio * mask).max(), "max"),
        "train/ratio_deviation_max": Metric(((c.ratio - 1).abs() * mask).max(), "max"),
        "train/ppo_kl": token_mean(micro_batch.old_logprobs - current.detach(), mask),
        "train/clip_fraction_low": token_mean(c.clipped_low, mask),
        "train/clip_fraction_high": token_mean(c.clipped_high, mask),
        "train/clip_fraction_dual": token_mean(c.clipped_dual, mask),
    }


class SftLoss:
    """Negative log-likelihood as a plain sum: L = -sum_t w_t l_t."""

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed NLL over the micro-batch."""
        loss = -(micro_batch.token_scale * stats.logprobs).sum()
        return LossOutput(loss, {"train/nll_loss": Metric(loss.detach(), "sum")})


def token_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of `values` [T] over the positions of `mask` [T] bool, as a mergeable metric."""
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    return Metric(kept.sum(), "token_mean", mask.sum())
