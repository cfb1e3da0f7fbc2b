"""The whole loss of an update: a policy loss and the terms that stand beside it, each a plain sum.

    L = policy  +  sum_t n_t (-l_t)  +  kl_coef sum_t w_t KL_t  -  entropy_coef sum_t w_t H_t
n_t is `nll_scale`: alpha and the aggregation's weight over samples with reward exactly 1 (Klear-Reasoner, arXiv
2508.07629 Eq. 13-14, with log pi where the paper prints pi). It stands outside entropy-ratio clipping.

The formulas and their gradients are the kernels' (token_terms.py), whoever asks: the one-pass kernel through
`token_loss`, or anyone who has log-probs with a gradient through a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.config.loss import ErcConfig, KlConfig
from megatron_klear.losses.policy import ClippedLoss
from megatron_klear.losses.sequences import trained
from megatron_klear.metrics import Metric
from megatron_klear.types import LossOutput, MicroBatch, TokenStats
from megatron_klear_kernels.linear_policy_loss.coefficients import PolicyCoefficients
from megatron_klear_kernels.linear_policy_loss.token_terms import (
    Terms,
    TokenInputs,
    TokenLoss,
    TokenTerms,
    token_terms,
)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Weights of the terms beside the policy loss. `kl` None: no penalty in the loss."""

    erc: ErcConfig | None = None
    kl: KlConfig | None = None
    entropy_coef: float = 0.0


class RlLoss:
    """A policy loss with its terms: a `PolicyLoss`, and separable over tokens unless its ratio is of a sequence."""

    def __init__(self, policy: ClippedLoss, terms: LossTerms, *, on_policy: bool = False) -> None:
        """With `on_policy` every ratio is 1, whatever the old log-probs say."""
        self.policy = policy
        self.terms = terms
        self.on_policy = on_policy
        erc, kl = terms.erc, terms.kl
        self._kernel_terms = Terms(
            policy.rule,
            erc=(erc.erc_low, erc.erc_high) if erc is not None else None,
            kl_type=kl.kl_type if kl is not None else "k3",
        )

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed loss, with metrics that count only trained tokens."""
        found = self._evaluate(stats, micro_batch)
        return LossOutput(_attached(found, stats), self._metrics(found, micro_batch))

    def token_loss(self, micro_batch: MicroBatch) -> TokenLoss | None:
        """The loss of the micro-batch's tokens one by one; None where tokens of a sequence hang together."""
        if self.policy.joins_tokens:
            return None
        return TokenLoss(self._inputs(micro_batch), self._kernel_terms)

    def metrics(self, stats: TokenStats, micro_batch: MicroBatch) -> dict[str, Metric]:
        """What a call reports."""
        return self._metrics(self._evaluate(stats, micro_batch), micro_batch)

    def _inputs(self, micro_batch: MicroBatch) -> TokenInputs:
        scale, kl = micro_batch.token_scale, self.terms.kl
        return TokenInputs(
            advantages=micro_batch.advantages,
            old_logprobs=None if self.on_policy else micro_batch.old_logprobs,
            policy_scale=scale * micro_batch.policy_weights,
            old_entropy=micro_batch.old_entropy if self.terms.erc is not None else None,
            nll_scale=micro_batch.nll_scale,
            kl_scale=scale * kl.kl_coef if kl is not None else None,
            reference_logprobs=micro_batch.reference_logprobs if kl is not None else None,
            entropy_scale=scale * self.terms.entropy_coef if self.terms.entropy_coef > 0 else None,
        )

    def _evaluate(self, stats: TokenStats, micro_batch: MicroBatch) -> TokenTerms:
        current = stats.logprobs.detach()
        entropy = stats.entropy.detach() if stats.entropy is not None else None
        log_ratio = torch.zeros_like(current) if self.on_policy else self.policy.log_ratio(current, micro_batch)
        return token_terms(current, entropy, self._inputs(micro_batch), self._kernel_terms, log_ratio)

    def _metrics(self, found: TokenTerms, micro_batch: MicroBatch) -> dict[str, Metric]:
        mask = trained(micro_batch)
        assert found.coefficients is not None and found.log_ratio is not None
        metrics = _ratio_metrics(found.coefficients, mask) | {
            "train/ppo_kl": token_mean(-found.log_ratio, mask),
            "train/pg_loss": Metric(found.policy.sum(), "sum"),
            "train/nll_loss": Metric(found.nll.sum(), "sum"),
        }
        if found.kept is not None:
            metrics["train/erc_masked"] = token_mean(~found.kept, mask)
        if self.terms.kl is not None:
            metrics["train/kl"] = token_mean(found.kl, mask)
        return metrics


def _attached(found: TokenTerms, stats: TokenStats) -> Tensor:
    """The loss's value with the terms' gradients: what is added is exactly 0, its derivative is not."""
    loss = found.loss.sum() + (found.d_logprob * (stats.logprobs - stats.logprobs.detach())).sum()
    if found.d_entropy is not None:
        assert stats.entropy is not None
        loss = loss + (found.d_entropy * (stats.entropy - stats.entropy.detach())).sum()
    return loss


def _ratio_metrics(c: PolicyCoefficients, mask: Tensor) -> dict[str, Metric]:
    return {
        "train/ratio_mean": token_mean(c.ratio, mask),
        "train/ratio_max": Metric((c.ratio * mask).max(), "max"),
        "train/ratio_deviation_max": Metric(((c.ratio - 1).abs() * mask).max(), "max"),
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

    def token_loss(self, micro_batch: MicroBatch) -> TokenLoss:
        """The loss of the micro-batch's tokens one by one."""
        return TokenLoss(TokenInputs(nll_scale=micro_batch.token_scale), Terms())

    def metrics(self, stats: TokenStats, micro_batch: MicroBatch) -> dict[str, Metric]:
        """What a call reports."""
        return self(stats, micro_batch).metrics


def engine_difference(logprobs: Tensor, micro_batch: MicroBatch) -> dict[str, Metric]:
    """How far the trainer's log-probs [T] are from those of the engine that sampled."""
    difference = (logprobs - micro_batch.rollout_logprobs).abs()
    return {"train/train_rollout_logprob_abs_diff": token_mean(difference, trained(micro_batch))}


def token_mean(values: Tensor, mask: Tensor) -> Metric:
    """Mean of `values` [T] over the positions of `mask` [T] bool, as a mergeable metric."""
    kept = torch.where(mask, values.detach().to(torch.float32), 0.0)
    return Metric(kept.sum(), "token_mean", mask.sum())
