"""Every term of a token's loss in closed form, with its gradient: ONE formula for eager, fused and checked code.

With log-prob l, entropy H, and at each token the scales of `TokenInputs`:

    L =  -policy_scale value A                       dL/dl = -policy_scale keep gradient A     (coefficients.py)
         -nll_scale l                                        -nll_scale
         +kl_scale KL(l - reference)                         +kl_scale slope                   (kl.py)
         -entropy_scale H                            dL/dH = -entropy_scale

Entropy-ratio clipping (arXiv 2512.05591) keeps a token while 1 - erc_low < H / H_old < 1 + erc_high; it takes away the
policy's gradient alone, and the value stays. CISPO's value is its weight times the log-prob itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

import torch
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule, PolicyCoefficients, policy_coefficients
from megatron_klear_kernels.linear_policy_loss.kl import KlType, kl_estimate

# Entropies of near-certain tokens are rounding noise; the ratio must not be decided by it (arXiv 2512.05591 uses 1e-8).
ENTROPY_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class Terms:
    """Which terms there are. `rule` None: no policy loss; `erc` (low, high) None: no entropy-ratio clipping."""

    rule: ClipRule | None = None
    erc: tuple[float, float] | None = None
    kl_type: KlType = "k3"


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Numbers of each token, float32 [T]; None where a term is not there. Scales hold every division already."""

    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    """None in a policy loss: they are the current ones, every ratio is 1."""
    policy_scale: Tensor | None = None
    old_entropy: Tensor | None = None
    nll_scale: Tensor | None = None
    kl_scale: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy_scale: Tensor | None = None

    def given(self) -> list[tuple[str, Tensor]]:
        """What is there, by name."""
        rows = ((f.name, attrgetter(f.name)(self)) for f in fields(self))
        return [(name, row) for name, row in rows if row is not None]

    def rows(self, index: Tensor) -> TokenInputs:
        """Those of some tokens [C]."""
        return TokenInputs(**{name: row.index_select(0, index) for name, row in self.given()})


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Parts of each token's loss and its gradients, [T] without gradient."""

    policy: Tensor
    nll: Tensor
    kl: Tensor
    """The estimate, without its scale; the loss holds kl_scale times it."""
    loss: Tensor
    """All terms, the entropy bonus too."""
    d_logprob: Tensor
    d_entropy: Tensor | None
    coefficients: PolicyCoefficients | None
    log_ratio: Tensor | None
    """What was clipped; None, as the coefficients, without a policy loss."""
    kept: Tensor | None
    """bool: entropy-ratio clipping lets the token's gradient pass."""


@torch.no_grad()
def token_terms(
    logprobs: Tensor, entropy: Tensor | None, inputs: TokenInputs, terms: Terms, log_ratio: Tensor | None = None
) -> TokenTerms:
    """Loss and gradients of tokens with log-probs and entropies [T].

    `log_ratio` [T] is what is clipped, where that is not the token's own (GSPO).
    """
    nothing = torch.zeros_like(logprobs)
    policy, nll, kl, d_logprob = nothing, nothing, nothing, nothing
    coefficients, kept, loss = None, None, nothing
    if terms.rule is not None:
        assert inputs.advantages is not None and inputs.policy_scale is not None
        if log_ratio is None:
            log_ratio = logprobs - inputs.old_logprobs if inputs.old_logprobs is not None else nothing
        coefficients = policy_coefficients(log_ratio, inputs.advantages, terms.rule)
        weights, gradient = inputs.policy_scale * inputs.advantages, coefficients.gradient
        value = coefficients.value * logprobs if terms.rule.two_sided else coefficients.value
        if terms.erc is not None:
            kept = _entropy_kept(entropy, inputs.old_entropy, terms.erc)
            gradient = gradient * kept
        policy, d_logprob = -(weights * value), -(weights * gradient)
        loss = policy
    if inputs.nll_scale is not None:
        nll = -(inputs.nll_scale * logprobs)
        loss, d_logprob = loss + nll, d_logprob - inputs.nll_scale
    if inputs.kl_scale is not None:
        assert inputs.reference_logprobs is not None
        estimate = kl_estimate(logprobs - inputs.reference_logprobs, terms.kl_type)
        kl = estimate.value
        loss, d_logprob = loss + inputs.kl_scale * kl, d_logprob + inputs.kl_scale * estimate.slope
    d_entropy = None
    if inputs.entropy_scale is not None:
        assert entropy is not None, "an entropy bonus needs the entropy of the current policy"
        loss, d_entropy = loss - inputs.entropy_scale * entropy, -inputs.entropy_scale
    return TokenTerms(policy, nll, kl, loss, d_logprob, d_entropy, coefficients, log_ratio, kept)


def _entropy_kept(entropy: Tensor | None, old_entropy: Tensor | None, erc: tuple[float, float]) -> Tensor:
    """[T] bool: 1 - erc_low < H / H_old < 1 + erc_high, strictly."""
    assert entropy is not None, "entropy-ratio clipping needs the entropy of the current policy"
    assert old_entropy is not None, "entropy-ratio clipping needs the entropy of the policy before the update"
    ratio = (entropy + ENTROPY_FLOOR) / (old_entropy + ENTROPY_FLOOR)
    low, high = erc
    return (ratio > 1 - low) & (ratio < 1 + high)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss that is separable over tokens: what the one-pass kernel asks of each chunk of rows."""

    inputs: TokenInputs
    terms: Terms

    def __call__(self, logprobs: Tensor, entropy: Tensor, index: Tensor) -> TokenTerms:
        """Terms of the tokens `index` [C] with these log-probs and entropies [C]."""
        return token_terms(logprobs, entropy, self.inputs.rows(index), self.terms)
