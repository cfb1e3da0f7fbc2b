"""What stands beside the policy loss: entropy-ratio clipping, KL, entropy bonus, joint SFT, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import loss_micro_batch
from megatron_klear.config.loss import ClipHigherLossConfig, ErcConfig, GppoLossConfig, GspoLossConfig, KlConfig
from megatron_klear.losses.kl import KlType, kl_estimate
from megatron_klear.losses.policy import ClipHigherLoss, ClippedLoss, GppoLoss, GspoLoss
from megatron_klear.losses.sequences import sequence_mean, trained
from megatron_klear.losses.terms import LossTerms, RlLoss, engine_difference
from megatron_klear.metrics import results
from megatron_klear.types import LossOutput, MicroBatch, TokenStats

GPPO = GppoLoss(GppoLossConfig(type="gppo"))
CLIP_HIGHER = ClipHigherLoss(ClipHigherLossConfig(type="clip_higher"))
both_policies = pytest.mark.parametrize("policy", (GPPO, CLIP_HIGHER), ids=("gppo", "clip_higher"))
KL_TYPES: tuple[KlType, ...] = ("k1", "k2", "k3", "k3+")
NUM_TOKENS = 60


def case() -> tuple[TokenStats, MicroBatch]:
    """Tokens in every cell, every fifth untrained, every third with joint SFT; entropies around the old ones."""
    generator = torch.Generator().manual_seed(8)

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(NUM_TOKENS, dtype=torch.float64, generator=generator)

    old = -draw().abs() - 1
    scale = draw().abs() / NUM_TOKENS
    scale[::5] = 0
    nll = torch.where((torch.arange(NUM_TOKENS) % 3 == 0) & (scale != 0), 0.01, 0.0).double()
    batch = loss_micro_batch(token_scale=scale, advantages=draw(), old_logprobs=old, nll_scale=nll)
    batch.old_entropy = draw().abs() + 0.1
    batch.reference_logprobs = old + draw(0.5)
    batch.policy_weights = draw().abs()
    return TokenStats(old + draw(0.4), batch.old_entropy * draw(0.1).exp()), batch


def gradients(loss: RlLoss, stats: TokenStats, batch: MicroBatch) -> tuple[LossOutput, Tensor, Tensor]:
    """Output, and the gradients of log-probs and entropies."""
    assert stats.entropy is not None
    logprobs, entropy = stats.logprobs.clone().requires_grad_(), stats.entropy.clone().requires_grad_()
    output = loss(TokenStats(logprobs, entropy), batch)
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad, torch.zeros_like(entropy) if entropy.grad is None else entropy.grad


@both_policies
def test_masked_tokens_keep_value_and_denominator_and_lose_the_policy_gradient_alone(policy: ClippedLoss) -> None:
    stats, batch = case()
    erc = ErcConfig(erc_low=0.07, erc_high=0.04)
    plain, gradient, _ = gradients(RlLoss(policy, LossTerms()), stats, batch)
    masked, gradient_masked, gradient_entropy = gradients(RlLoss(policy, LossTerms(erc=erc)), stats, batch)
    assert stats.entropy is not None
    rho = [(h + 1e-8) / (h0 + 1e-8) for h, h0 in zip(stats.entropy.tolist(), batch.old_entropy.tolist(), strict=True)]
    keep = torch.tensor([0.93 < one < 1.04 for one in rho])
    on = trained(batch)
    assert 5 < (keep & on).sum() < on.sum() - 5
    assert torch.equal(masked.loss, plain.loss)
    torch.testing.assert_close(
        gradient_masked, (gradient + batch.nll_scale) * keep - batch.nll_scale, rtol=0, atol=1e-15
    )
    assert torch.equal(gradient_entropy, torch.zeros(NUM_TOKENS).double())
    expected = ((~keep) & on).sum() / on.sum()
    assert results(masked.metrics)["train/erc_masked"] == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("entropy", "old", "kept"),
    [
        (1 - 1e-8, 1 - 1e-8, True),
        (0.5 - 1e-8, 1 - 1e-8, False),  # the ratio is exactly 1 - erc_low
        (0.5 - 1e-8 + 1e-12, 1 - 1e-8, True),
        (1.5 - 1e-8, 1 - 1e-8, False),  # exactly 1 + erc_high
        (1.5 - 1e-8 - 1e-12, 1 - 1e-8, True),
        (0.0, 0.0, True),
        (0.0, 1.0, False),
        (1.0, 0.0, False),
        (4e-9, 0.0, True),  # rounding noise of a certain token: (0.4e-8 + 1e-8) / 1e-8
        (6e-9, 0.0, False),
    ],
)
def test_bounds_of_the_entropy_ratio_are_strict(entropy: float, old: float, kept: bool) -> None:
    one = torch.ones(1).double()
    batch = loss_micro_batch(token_scale=one, advantages=one, old_logprobs=-one)
    batch.old_entropy = old * one
    loss = RlLoss(GPPO, LossTerms(erc=ErcConfig(erc_low=0.5, erc_high=0.5)))
    _, gradient, _ = gradients(loss, TokenStats(-one, entropy * one), batch)
    assert gradient.item() == (-1.0 if kept else 0.0)


def test_in_the_first_update_of_a_step_nothing_is_masked() -> None:
    stats, batch = case()
    stats = replace(stats, entropy=batch.old_entropy)
    output, _, _ = gradients(RlLoss(GPPO, LossTerms(erc=ErcConfig())), stats, batch)
    assert results(output.metrics)["train/erc_masked"] == 0.0


@pytest.mark.parametrize("terms", (LossTerms(erc=ErcConfig()), LossTerms(entropy_coef=0.1)))
def test_terms_of_the_entropy_need_one(terms: LossTerms) -> None:
    stats, batch = case()
    with pytest.raises(AssertionError):
        RlLoss(GPPO, terms)(TokenStats(stats.logprobs), batch)


# value and gradient with d = log pi - log reference.
KL: dict[KlType, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "k3+": (lambda d: math.exp(-d) - 1 + d, lambda d: d),
}


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_estimators(kind: KlType) -> None:
    difference = torch.tensor([-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 9.0], dtype=torch.float64)
    reference = torch.full_like(difference, -1.25)
    current = (reference + difference).requires_grad_()
    estimate = kl_estimate(current, reference, kind)
    estimate.sum().backward()
    assert current.grad is not None
    value, slope = KL[kind]
    assert estimate.tolist() == pytest.approx([value(d) for d in difference.tolist()], rel=1e-10, abs=1e-15)
    assert current.grad.tolist() == pytest.approx([slope(d) for d in difference.tolist()], rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
def test_gradients_of_kl_by_finite_differences(kind: KlType) -> None:
    difference = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64)
    current = difference.clone().requires_grad_()
    zeros = torch.zeros_like(difference)
    kl_estimate(current, zeros, kind).sum().backward()
    assert current.grad is not None
    above, below = (kl_estimate(difference + step, zeros, kind) for step in (1e-6, -1e-6))
    torch.testing.assert_close(current.grad, (above - below) / 2e-6, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))
@pytest.mark.parametrize("distance", (25.0, 100.0, 1000.0))
@pytest.mark.parametrize("kind", KL_TYPES)
def test_far_from_the_reference_a_penalty_is_finite_and_still_points_back(
    kind: KlType, distance: float, dtype: torch.dtype
) -> None:
    """A clamp inside autograd once left a slope of +1 below the bound: it pushed the policy further away."""
    current = torch.tensor([-distance, distance], dtype=dtype, requires_grad=True)
    estimate = kl_estimate(current, torch.zeros(2, dtype=dtype), kind)
    estimate.sum().backward()
    assert current.grad is not None and estimate.isfinite().all() and current.grad.isfinite().all()
    expected = {"k1": [1.0, 1.0], "k2": [-distance, distance], "k3": [1 - math.exp(20.0), 1.0]}
    assert current.grad.tolist() == pytest.approx(expected.get(kind, expected["k2"]), rel=1e-6)


@both_policies
@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_in_the_loss(policy: ClippedLoss, kind: KlType) -> None:
    stats, batch = case()
    kl = KlConfig(kl_coef=0.3, kl_type=kind)
    plain, gradient, _ = gradients(RlLoss(policy, LossTerms()), stats, batch)
    # Entropy-ratio clipping and correction weights are the policy loss's alone.
    penalised, gradient_penalised, _ = gradients(RlLoss(policy, LossTerms(kl=kl)), stats, batch)
    difference = (stats.logprobs - batch.reference_logprobs).tolist()
    value, slope = KL[kind]
    scale = batch.token_scale.tolist()
    extra = 0.3 * math.fsum(w * value(d) for w, d in zip(scale, difference, strict=True))
    assert penalised.loss.item() == pytest.approx(plain.loss.item() + extra, rel=1e-12)
    slopes = [0.3 * w * slope(d) for w, d in zip(scale, difference, strict=True)]
    assert (gradient_penalised - gradient).tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-14)
    mean = math.fsum(value(d) for w, d in zip(scale, difference, strict=True) if w) / sum(w != 0 for w in scale)
    assert results(penalised.metrics)["train/kl"] == pytest.approx(mean, rel=1e-5)
    assert "train/kl" not in plain.metrics


def test_entropy_bonus() -> None:
    stats, batch = case()
    assert stats.entropy is not None
    plain, gradient, none = gradients(RlLoss(GPPO, LossTerms()), stats, batch)
    bonus, gradient_bonus, gradient_entropy = gradients(RlLoss(GPPO, LossTerms(entropy_coef=0.2)), stats, batch)
    expected = plain.loss.item() - 0.2 * (batch.token_scale * stats.entropy).sum().item()
    assert bonus.loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(gradient_bonus, gradient) and torch.equal(none, torch.zeros_like(none))
    torch.testing.assert_close(gradient_entropy, -0.2 * batch.token_scale, rtol=1e-13, atol=0)


def test_all_terms_together_are_their_sum_and_entropy_clipping_masks_the_policy_loss_alone() -> None:
    stats, batch = case()
    assert stats.entropy is not None
    erc, kl = ErcConfig(erc_low=0.9, erc_high=1e-9), KlConfig(kl_coef=0.3, kl_type="k2")
    stats = replace(stats, entropy=batch.old_entropy * 2)  # everything is masked
    output, gradient, gradient_entropy = gradients(RlLoss(GPPO, LossTerms(erc, kl, 0.2)), stats, batch)
    difference = stats.logprobs - batch.reference_logprobs
    torch.testing.assert_close(gradient, 0.3 * batch.token_scale * difference - batch.nll_scale, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient_entropy, -0.2 * batch.token_scale, rtol=1e-13, atol=0)
    numbers = results(output.metrics)
    entropy_term = 0.2 * (batch.token_scale * batch.old_entropy * 2).sum().item()
    kl_term = 0.3 * (batch.token_scale * difference.square() / 2).sum().item()
    total = numbers["train/pg_loss"] + numbers["train/nll_loss"] + kl_term - entropy_term
    assert output.loss.item() == pytest.approx(total, rel=1e-12)
    assert numbers["train/nll_loss"] == pytest.approx(-(batch.nll_scale * stats.logprobs).sum().item(), rel=1e-12)


def test_joint_sft_by_finite_differences_where_the_policy_loss_is_silent() -> None:
    stats, batch = case()
    batch.advantages = torch.zeros(NUM_TOKENS).double()
    loss = RlLoss(GPPO, LossTerms())
    _, gradient, _ = gradients(loss, stats, batch)
    for i in (0, 3, 7, 21, 33):
        nudge = torch.zeros_like(stats.logprobs)
        nudge[i] = 1e-5
        above, below = (loss(TokenStats(stats.logprobs + sign * nudge), batch).loss.item() for sign in (1, -1))
        assert (above - below) / 2e-5 == pytest.approx(gradient[i].item(), rel=1e-6, abs=1e-11)
        assert gradient[i] == -batch.nll_scale[i]


def test_a_sequence_mean_is_over_trained_positions_and_survives_what_lies_beside_them() -> None:
    scale = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 3.0]).double()
    batch = loss_micro_batch(token_scale=scale, advantages=scale, old_logprobs=scale, lengths=[3, 2, 1])
    values = torch.tensor([2.0, -math.inf, 5.0, math.nan, math.inf, -1.0]).double()
    assert sequence_mean(values, batch).tolist() == [3.5, 3.5, 3.5, 0.0, 0.0, -1.0]


def on_policy_case() -> tuple[TokenStats, MicroBatch]:
    """Old log-probs that are the current ones."""
    stats, batch = case()
    batch.old_logprobs = stats.logprobs.clone()
    return stats, batch


@pytest.mark.parametrize("policy", (GPPO, CLIP_HIGHER, GspoLoss(GspoLossConfig(type="gspo"))), ids=type)
def test_on_policy_is_a_ratio_of_1_whatever_the_old_log_probs_say(policy: ClippedLoss) -> None:
    stats, batch = on_policy_case()
    terms = LossTerms(kl=KlConfig(kl_coef=0.3), entropy_coef=0.2)
    wanted, *wanted_gradients = gradients(RlLoss(policy, terms), stats, batch)
    batch.old_logprobs = torch.full_like(batch.old_logprobs, -7.0)
    found, *found_gradients = gradients(RlLoss(policy, terms, on_policy=True), stats, batch)
    assert torch.equal(found.loss, wanted.loss)
    assert all(torch.equal(*pair) for pair in zip(found_gradients, wanted_gradients, strict=True))
    assert results(found.metrics) == results(wanted.metrics)
    assert results(found.metrics)["train/ratio_mean"] == results(found.metrics)["train/ratio_max"] == 1.0
    # Without the promise they are asked.
    assert not torch.equal(gradients(RlLoss(policy, terms), stats, batch)[1], wanted_gradients[0])


def test_the_one_pass_loss_of_on_policy_tokens_asks_no_old_log_probs() -> None:
    stats, batch = on_policy_case()
    wanted = RlLoss(GPPO, LossTerms())(stats, batch).loss
    batch.old_logprobs = torch.full_like(batch.old_logprobs, torch.nan)
    token_loss = RlLoss(GPPO, LossTerms(), on_policy=True).token_loss(batch)
    assert token_loss is not None and stats.entropy is not None
    index = torch.arange(NUM_TOKENS)
    torch.testing.assert_close(token_loss(stats.logprobs, stats.entropy, index).loss.sum(), wanted, rtol=1e-12, atol=0)


def test_the_engine_s_difference_is_over_trained_tokens() -> None:
    stats, batch = case()
    on = trained(batch)
    batch.rollout_logprobs = torch.where(on, stats.logprobs - 0.25, 1e6)
    found = results(engine_difference(stats.logprobs, batch))
    assert found == {"train/train_rollout_logprob_abs_diff": pytest.approx(0.25)}
