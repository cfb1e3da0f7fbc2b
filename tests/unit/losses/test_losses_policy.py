"""Policy losses in float64 against their closed form, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import loss_micro_batch
from megatron_klear.config.loss import ClipHigherLossConfig, GppoLossConfig
from megatron_klear.losses.policy import ClipHigherLoss, GppoLoss
from megatron_klear.losses.terms import LossTerms, RlLoss, SftLoss, token_mean
from megatron_klear.metrics import merge, results
from megatron_klear.types import LossOutput, MicroBatch, TokenStats

LOW, HIGH = 0.2, 0.28
PPO = RlLoss(ClipHigherLoss(ClipHigherLossConfig(type="clip_higher")), LossTerms())
GPPO = RlLoss(GppoLoss(GppoLossConfig(type="gppo")), LossTerms())
both_losses = pytest.mark.parametrize("loss", (PPO, GPPO), ids=("ppo", "gppo"))


def random_case(num_tokens: int = 200) -> tuple[Tensor, MicroBatch]:
    """Current log-probs and a batch whose tokens fall in all cells; every fifth has no scale."""
    generator = torch.Generator().manual_seed(3)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, dtype=torch.float64, generator=generator)

    old = -draw(1.0).abs() - 1.0
    current = old + draw(0.4)
    scale, nll = draw(1.0).abs() / num_tokens, draw(0.1).abs() / num_tokens
    scale[::5] = 0.0
    nll[::2] = 0.0
    batch = loss_micro_batch(token_scale=scale, advantages=draw(1.5), old_logprobs=old, nll_scale=nll)
    return current, batch


def evaluate(loss: RlLoss | SftLoss, current: Tensor, batch: MicroBatch) -> tuple[LossOutput, Tensor]:
    """The output and the gradient with respect to the log-probs."""
    logprobs = current.clone().requires_grad_()
    output = loss(TokenStats(logprobs), batch)
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


def closed_form(current: Tensor, batch: MicroBatch, keep: float) -> tuple[float, list[float]]:
    """Value and gradient by the cells of the paper, one token after the other."""
    value, gradient = 0.0, []
    rows = zip(
        current.tolist(),
        batch.old_logprobs.tolist(),
        batch.advantages.tolist(),
        batch.token_scale.tolist(),
        batch.nll_scale.tolist(),
        strict=True,
    )
    for logprob, old, advantage, scale, nll in rows:
        ratio = math.exp(logprob - old)
        v = g = ratio
        if advantage > 0 and ratio > 1 + HIGH:
            v, g = 1 + HIGH, keep * (1 + HIGH)
        elif advantage < 0 and ratio < 1 - LOW:
            v, g = 1 - LOW, keep * (1 - LOW)
        value += -scale * v * advantage - nll * logprob
        gradient.append(-scale * g * advantage - nll)
    return value, gradient


def test_the_random_case_has_tokens_in_every_cell() -> None:
    current, batch = random_case()
    ratio, positive = (current - batch.old_logprobs).exp(), batch.advantages > 0
    zones = (ratio < 1 - LOW, ratio > 1 + HIGH, (ratio >= 1 - LOW) & (ratio <= 1 + HIGH))
    for zone in zones:
        for sign in (positive, ~positive):
            assert (zone & sign & (batch.token_scale > 0)).sum() >= 5


@both_losses
def test_value_and_gradient_are_the_closed_form(loss: RlLoss) -> None:
    current, batch = random_case()
    output, gradient = evaluate(loss, current, batch)
    value, expected = closed_form(current, batch, loss.policy.rule.keep_low)
    assert output.loss.item() == pytest.approx(value, rel=1e-13)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-300)


def test_ppo_gradient_by_finite_differences() -> None:
    current, batch = random_case()
    _, gradient = evaluate(PPO, current, batch)
    ratio = (current - batch.old_logprobs).exp()
    step = 1e-6
    smooth = ((ratio - (1 - LOW)).abs() > 1e-3) & ((ratio - (1 + HIGH)).abs() > 1e-3)
    assert smooth.sum() > 150
    for i in smooth.nonzero()[:, 0].tolist():
        nudge = torch.zeros_like(current)
        nudge[i] = step
        above, below = (PPO(TokenStats(current + sign * nudge), batch).loss.item() for sign in (1, -1))
        assert (above - below) / (2 * step) == pytest.approx(gradient[i].item(), rel=1e-6, abs=1e-9)


def test_gppo_is_the_stop_gradient_form_of_the_paper() -> None:
    """Eq. 11 as it is printed: where nothing over- or underflows, autograd must find the same value and gradient."""
    current, batch = random_case()
    output, gradient = evaluate(GPPO, current, batch)
    logprobs = current.clone().requires_grad_()
    ratio = (logprobs - batch.old_logprobs).exp()
    low, high = (edge / ratio.detach() * ratio for edge in (1 - LOW, 1 + HIGH))
    clipped = torch.where(ratio > high, high, torch.where(ratio < low, low, ratio))
    objective = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    paper = -(batch.token_scale * objective).sum() - (batch.nll_scale * logprobs).sum()
    paper.backward()
    assert output.loss.item() == pytest.approx(paper.item(), rel=1e-13)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-13, atol=1e-16)


def test_gppo_has_the_value_of_clip_higher_and_differs_in_the_gradient_of_clipped_tokens_only() -> None:
    current, batch = random_case()
    ppo, ppo_gradient = evaluate(PPO, current, batch)
    gppo, gppo_gradient = evaluate(GPPO, current, batch)
    assert torch.equal(ppo.loss, gppo.loss)
    ratio = (current - batch.old_logprobs).exp()
    clipped = ((ratio < 1 - LOW) & (batch.advantages < 0)) | ((ratio > 1 + HIGH) & (batch.advantages > 0))
    changed = ppo_gradient != gppo_gradient
    assert torch.equal(changed, clipped & (batch.token_scale > 0))


@both_losses
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))
def test_far_log_ratios_stay_finite_and_gppo_keeps_its_weight(loss: RlLoss, dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([-1000.0, 1000.0, -1000.0, 1000.0, -90.0, 90.0], dtype=dtype)
    advantages = torch.tensor([-2.0, 2.0, 2.0, -2.0, -2.0, 2.0], dtype=dtype)
    old = torch.full_like(log_ratio, -3.0)
    batch = loss_micro_batch(token_scale=torch.ones_like(old) / 4, advantages=advantages, old_logprobs=old)
    output, gradient = evaluate(loss, old + log_ratio, batch)
    assert output.loss.isfinite() and gradient.isfinite().all()
    half = torch.tensor([0.8, -1.28], dtype=dtype) * loss.policy.rule.keep_low / 2
    torch.testing.assert_close(gradient[:2], half)
    torch.testing.assert_close(gradient[4:], half)


@both_losses
def test_the_sft_term_stands_outside_the_clip(loss: RlLoss) -> None:
    """A clipped token in a right answer: PPO takes its policy gradient, never its likelihood gradient."""
    one = torch.ones(1, dtype=torch.float64)
    batch = loss_micro_batch(token_scale=one, advantages=one, old_logprobs=-3 * one, nll_scale=0.1 * one)
    output, gradient = evaluate(loss, -one, batch)
    assert output.loss.item() == pytest.approx(-1.28 + 0.1)
    assert gradient.item() == pytest.approx(-1.28 * loss.policy.rule.keep_low - 0.1)
    assert results(output.metrics)["train/pg_loss"] == pytest.approx(-1.28)
    assert results(output.metrics)["train/nll_loss"] == pytest.approx(0.1)


@both_losses
def test_no_scale_anywhere_means_no_loss_and_no_gradient(loss: RlLoss) -> None:
    current, batch = random_case()
    batch.token_scale, batch.nll_scale = torch.zeros_like(current), torch.zeros_like(current)
    output, gradient = evaluate(loss, current, batch)
    assert output.loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(current))


def padded(current: Tensor, batch: MicroBatch, num_extra: int) -> tuple[Tensor, MicroBatch]:
    """The same tokens and behind them positions without a scale, whose other rows hold misleading numbers."""
    zeros, noise = torch.zeros(num_extra).double(), torch.linspace(-9.0, -1.0, num_extra).double()
    longer = loss_micro_batch(
        token_scale=torch.cat((batch.token_scale, zeros)),
        advantages=torch.cat((batch.advantages, noise + 5)),
        old_logprobs=torch.cat((batch.old_logprobs, noise - 8)),
        nll_scale=torch.cat((batch.nll_scale, zeros)),
    )
    return torch.cat((current, noise)), longer


@both_losses
def test_positions_without_a_scale_change_neither_loss_nor_metrics(loss: RlLoss) -> None:
    current, batch = random_case()
    output, gradient = evaluate(loss, current, batch)
    longer, gradient_longer = evaluate(loss, *padded(current, batch, 77))
    assert longer.loss.item() == pytest.approx(output.loss.item(), rel=1e-14)
    assert torch.equal(gradient_longer[: current.numel()], gradient)
    assert torch.equal(gradient_longer[current.numel() :], torch.zeros(77).double())
    assert results(longer.metrics) == pytest.approx(results(output.metrics), rel=1e-6)


@both_losses
def test_a_loss_is_a_sum_over_micro_batches(loss: RlLoss) -> None:
    current, batch = random_case()
    parts = []
    for part in (slice(0, 70), slice(70, None)):
        piece = loss_micro_batch(
            token_scale=batch.token_scale[part],
            advantages=batch.advantages[part],
            old_logprobs=batch.old_logprobs[part],
            nll_scale=batch.nll_scale[part],
        )
        parts.append(loss(TokenStats(current[part]), piece))
    whole = loss(TokenStats(current), batch)
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-13)
    assert results(merge(part.metrics for part in parts)) == pytest.approx(results(whole.metrics), rel=1e-6)


def test_metrics_are_means_and_maxima_over_scaled_tokens() -> None:
    log_ratio = torch.tensor([0.5, 2.0, 1.0, 1.5, 8.0]).double().log()
    old = torch.full((5,), -2.0).double()
    scale = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).double()
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0]).double()
    batch = loss_micro_batch(token_scale=scale, advantages=advantages, old_logprobs=old)
    metrics = results(GPPO(TokenStats(old + log_ratio), batch).metrics)
    assert metrics["train/ratio_mean"] == pytest.approx((0.5 + 2.0 + 1.0 + 1.5) / 4)
    assert metrics["train/ratio_max"] == pytest.approx(2.0)
    assert metrics["train/ratio_deviation_max"] == pytest.approx(1.0)
    assert metrics["train/ppo_kl"] == pytest.approx(-math.log(0.5 * 2.0 * 1.0 * 1.5) / 4)
    assert metrics["train/clip_fraction_low"] == pytest.approx(0.25)
    assert metrics["train/clip_fraction_high"] == pytest.approx(0.25)
    assert metrics["train/clip_fraction_dual"] == 0.0


def test_metrics_carry_no_gradient() -> None:
    current, batch = random_case()
    metrics = GPPO(TokenStats(current.requires_grad_()), batch).metrics
    tensors = [m.value for m in metrics.values() if isinstance(m.value, Tensor)]
    assert tensors and not any(t.requires_grad for t in tensors)


def test_sft_loss_is_the_scaled_negative_log_likelihood() -> None:
    current, batch = random_case()
    output, gradient = evaluate(SftLoss(), current, batch)
    expected = -math.fsum(w * v for w, v in zip(batch.token_scale.tolist(), current.tolist(), strict=True))
    assert output.loss.item() == pytest.approx(expected, rel=1e-13)
    assert torch.equal(gradient, -batch.token_scale)
    assert results(output.metrics) == {"train/nll_loss": output.loss.item()}


def test_token_mean_counts_masked_positions_only() -> None:
    metric = token_mean(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, True, False]))
    assert metric.result() == 1.5
    assert math.isnan(token_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)).result())
