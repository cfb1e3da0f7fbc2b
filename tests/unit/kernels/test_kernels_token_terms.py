"""Slopes of every term against central differences of its value in float64, and what each term is worth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule
from megatron_klear_kernels.linear_policy_loss.kl import KlType, kl_estimate
from megatron_klear_kernels.linear_policy_loss.token_terms import (
    Terms,
    TokenInputs,
    TokenLoss,
    TokenTerms,
    token_terms,
)

NUM_TOKENS, STEP = 64, 1e-6
DRAWN = torch.randn(8, NUM_TOKENS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
LOGPROBS, ENTROPY = -DRAWN[0].abs() - 0.1, DRAWN[1].abs() + 0.1
POLICY = TokenInputs(
    advantages=DRAWN[2].masked_fill(torch.arange(NUM_TOKENS) % 7 == 0, 0.0),
    old_logprobs=LOGPROBS + 0.7 * DRAWN[3],
    policy_scale=DRAWN[4].abs().masked_fill(torch.arange(NUM_TOKENS) % 5 == 0, 0.0),
)
LOW, HIGH = 0.2, 0.28
RULES = {
    "ppo": ClipRule(LOW, HIGH),
    "ppo_dual": ClipRule(LOW, HIGH, dual_clip=1.5),
    "gppo": ClipRule(LOW, HIGH, keep_low=1.0, keep_high=1.0),
    "gppo_dual": ClipRule(LOW, HIGH, keep_low=1.0, keep_high=1.0, dual_clip=1.5),
    "ce_gppo": ClipRule(LOW, HIGH, value_low=0.75, value_high=0.5, keep_low=0.75, keep_high=0.5),
    "cispo": ClipRule(LOW, HIGH, two_sided=True),
}


def slope_of(value: Tensor, minus: Tensor) -> Tensor:
    return (value - minus) / (2 * STEP)


def terms_at(
    inputs: TokenInputs, terms: Terms, *, logprobs: Tensor = LOGPROBS, entropy: Tensor = ENTROPY
) -> TokenTerms:
    return token_terms(logprobs, entropy, inputs, terms)


def slopes(inputs: TokenInputs, terms: Terms) -> tuple[Tensor, Tensor]:
    """Central differences of the loss in log-prob and in entropy."""
    up, down = (terms_at(inputs, terms, logprobs=LOGPROBS + step).loss for step in (STEP, -STEP))
    more, less = (terms_at(inputs, terms, entropy=ENTROPY + step).loss for step in (STEP, -STEP))
    return slope_of(up, down), slope_of(more, less)


def assert_slopes(found: TokenTerms, d_logprob: Tensor, d_entropy: Tensor | None = None) -> None:
    torch.testing.assert_close(found.d_logprob, d_logprob, rtol=1e-7, atol=1e-8)
    if d_entropy is not None:
        assert found.d_entropy is not None
        torch.testing.assert_close(found.d_entropy, d_entropy, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ("ppo", "ppo_dual"))
def test_the_slope_of_a_clipped_value(name: str) -> None:
    """PPO's gradient is that of its value, everywhere."""
    found = terms_at(POLICY, Terms(RULES[name]))
    assert found.coefficients is not None and found.coefficients.clipped_low.any()
    assert found.coefficients.clipped_dual.any() == (name == "ppo_dual")
    assert_slopes(found, slopes(POLICY, Terms(RULES[name]))[0])


@pytest.mark.parametrize("name", ("gppo", "gppo_dual", "ce_gppo"))
def test_the_slope_of_a_value_whose_clipped_weight_is_frozen(name: str) -> None:
    """Where it is clipped the value is constant and the gradient is the bound's; elsewhere it is the value's."""
    found = terms_at(POLICY, Terms(RULES[name]))
    c = found.coefficients
    assert c is not None and POLICY.advantages is not None and POLICY.policy_scale is not None
    clipped = c.clipped_low | c.clipped_high
    assert c.clipped_low.any() and c.clipped_high.any() and not clipped.all()
    weight = POLICY.policy_scale * POLICY.advantages

    def frozen(step: float) -> Tensor:
        rule = RULES[name]
        low, high = rule.value_low * (1 - LOW), rule.value_high * (1 + HIGH)
        bound = torch.where(c.clipped_low, low, high).double()
        loss = terms_at(POLICY, Terms(rule), logprobs=LOGPROBS + step).loss
        return torch.where(clipped, -weight * bound * math.exp(step), loss)

    torch.testing.assert_close(frozen(0.0), found.loss)
    assert_slopes(found, slope_of(frozen(STEP), frozen(-STEP)))


def test_the_slope_of_cispo_is_its_weight() -> None:
    """The weight is no function of the log-prob, as far as the gradient goes."""
    found = terms_at(POLICY, Terms(RULES["cispo"]))
    assert found.coefficients is not None and POLICY.advantages is not None and POLICY.policy_scale is not None
    weight = POLICY.policy_scale * POLICY.advantages * found.coefficients.value

    def frozen(step: float) -> Tensor:
        return -weight * (LOGPROBS + step)

    torch.testing.assert_close(found.loss, frozen(0.0))
    assert_slopes(found, slope_of(frozen(STEP), frozen(-STEP)))


@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
def test_the_slope_of_every_other_term(kind: KlType) -> None:
    inputs = TokenInputs(
        nll_scale=DRAWN[5].abs(),
        kl_scale=DRAWN[6].abs(),
        reference_logprobs=LOGPROBS + DRAWN[7],
        entropy_scale=DRAWN[3].abs(),
    )
    found = terms_at(inputs, Terms(kl_type=kind))
    assert_slopes(found, *slopes(inputs, Terms(kl_type=kind)))
    assert found.coefficients is None and found.log_ratio is None and found.kept is None


def test_k3_plus_has_the_value_of_k3_and_the_slope_of_k2() -> None:
    difference = DRAWN[0]
    plus, k2, k3 = kl_estimate(difference, "k3+"), kl_estimate(difference, "k2"), kl_estimate(difference, "k3")
    assert torch.equal(plus.value, k3.value) and torch.equal(plus.slope, k2.slope)


@pytest.mark.parametrize("kind", ("k1", "k2", "k3", "k3+"))
@pytest.mark.parametrize("difference", (-1000.0, 1000.0))
def test_a_far_reference_leaves_numbers(difference: float, kind: KlType) -> None:
    """Only what exp() sees is bounded: the slope keeps its sign."""
    found = kl_estimate(torch.tensor([difference]), kind)
    assert found.value.isfinite().all() and found.slope.isfinite().all()
    assert kind == "k1" or found.slope.sign().item() == math.copysign(1.0, difference)


def test_the_loss_is_the_sum_of_its_terms() -> None:
    inputs = replace(
        POLICY,
        nll_scale=DRAWN[5].abs(),
        kl_scale=DRAWN[6].abs(),
        reference_logprobs=LOGPROBS + DRAWN[7],
        entropy_scale=DRAWN[3].abs(),
    )
    found = terms_at(inputs, Terms(RULES["gppo"]))
    assert inputs.kl_scale is not None and inputs.entropy_scale is not None and inputs.nll_scale is not None
    torch.testing.assert_close(
        found.loss, found.policy + found.nll + inputs.kl_scale * found.kl - inputs.entropy_scale * ENTROPY
    )
    alone = terms_at(POLICY, Terms(RULES["gppo"]))
    assert torch.equal(alone.policy, found.policy) and torch.equal(alone.loss, alone.policy)
    assert torch.equal(found.nll, -inputs.nll_scale * LOGPROBS)
    assert alone.d_entropy is None and not alone.kl.any()


def test_entropy_ratio_clipping_takes_the_policy_s_gradient_alone() -> None:
    """Strictly inside the bounds a token is kept; its value and the other terms stay in any case."""
    ratios = torch.tensor([0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.0]).double().repeat(8)
    inputs = replace(POLICY, old_entropy=ENTROPY / ratios, nll_scale=DRAWN[5].abs())
    found = terms_at(inputs, Terms(RULES["gppo"], erc=(0.12, 0.12)))
    plain = terms_at(replace(POLICY, nll_scale=inputs.nll_scale), Terms(RULES["gppo"]))
    assert found.kept is not None and inputs.nll_scale is not None
    assert found.kept.tolist() == [False, True, True, True, True, True, False, True] * 8
    assert torch.equal(found.loss, plain.loss)
    assert torch.equal(found.d_logprob, torch.where(found.kept, plain.d_logprob, -inputs.nll_scale))


def test_entropies_at_the_bounds_are_not_kept_and_two_near_nothing_are_equal() -> None:
    entropy, old = torch.tensor([0.5, 1.5, 0.0, 1e-12]), torch.tensor([1.0, 1.0, 0.0, 3e-12])
    inputs = TokenInputs(torch.ones(4), torch.zeros(4), torch.ones(4), old)
    found = token_terms(torch.zeros(4), entropy, inputs, Terms(RULES["gppo"], erc=(0.5, 0.5)))
    assert found.kept is not None and found.kept.tolist() == [False, False, True, True]


def test_another_ratio_can_be_clipped() -> None:
    """GSPO's is of the sequence."""
    log_ratio = torch.full((NUM_TOKENS,), 1.0, dtype=torch.float64)
    found = token_terms(LOGPROBS, None, POLICY, Terms(RULES["ppo"]), log_ratio)
    assert found.log_ratio is log_ratio and found.coefficients is not None
    torch.testing.assert_close(found.coefficients.ratio, torch.full_like(log_ratio, math.e))


def test_a_part_of_the_tokens() -> None:
    """What the kernel asks of each chunk."""
    inputs = replace(POLICY, nll_scale=DRAWN[5].abs())
    loss, index = TokenLoss(inputs, Terms(RULES["gppo"])), torch.tensor([5, 60, 2])
    whole, part = loss(LOGPROBS, ENTROPY, torch.arange(NUM_TOKENS)), loss(LOGPROBS[index], ENTROPY[index], index)
    assert torch.equal(part.loss, whole.loss[index]) and torch.equal(part.d_logprob, whole.d_logprob[index])
    assert [name for name, _ in inputs.given()] == ["advantages", "old_logprobs", "policy_scale", "nll_scale"]


def test_nothing_asked_is_nothing() -> None:
    found = terms_at(TokenInputs(), Terms())
    assert not found.loss.any() and not found.d_logprob.any() and found.d_entropy is None


def test_terms_carry_no_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    found = token_terms(logprobs, ENTROPY, replace(POLICY, nll_scale=DRAWN[5]), Terms(RULES["gppo"]))
    assert not found.loss.requires_grad and not found.d_logprob.requires_grad


@pytest.mark.parametrize(
    ("entropy", "inputs", "terms", "message"),
    [
        (
            None,
            TokenInputs(entropy_scale=torch.ones(2)),
            Terms(),
            "an entropy bonus needs the entropy of the current",
        ),
        (None, POLICY, Terms(RULES["ppo"], erc=(0.1, 0.1)), "clipping needs the entropy of the current policy"),
        (ENTROPY, POLICY, Terms(RULES["ppo"], erc=(0.1, 0.1)), "needs the entropy of the policy before the update"),
    ],
)
def test_missing_entropies_are_named(entropy: Tensor | None, inputs: TokenInputs, terms: Terms, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        token_terms(LOGPROBS, entropy, inputs, terms)
