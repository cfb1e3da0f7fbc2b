"""GAE against a loop over each sequence, and the critic's loss, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import loss_micro_batch
from megatron_klear.losses.gae import ValueLoss, gae, terminal_rewards
from megatron_klear.metrics import results
from megatron_klear.types import MicroBatch

LENGTHS = [5, 1, 8, 3, 4]
TOTAL = sum(LENGTHS)
# Prompts, a hole in the middle of the third, a fourth sequence of padding.
UNTRAINED = (0, 4, 6, 9, 10, 13, 14, 15, 16, 17, 20)


def packed(seed: int = 0) -> MicroBatch:
    zeros = torch.zeros(TOTAL).double()
    scale = torch.rand(TOTAL, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    scale[list(UNTRAINED)] = 0.0
    batch = loss_micro_batch(token_scale=scale, advantages=zeros, old_logprobs=zeros, lengths=LENGTHS)
    batch.rewards = torch.tensor([1.0, -0.5, 0.25, 7.0, 2.0])
    return batch


def noise(seed: int) -> Tensor:
    return torch.randn(TOTAL, generator=torch.Generator().manual_seed(seed)).double()


def by_hand(
    values: Sequence[float], rewards: Sequence[float], trained: Sequence[bool], gamma: float, lam: float
) -> list[float]:
    """One packed row, sequence by sequence: the sums of Eq. 16 written out, without a recursion."""
    result = [0.0] * TOTAL
    begin = 0
    for length in LENGTHS:
        steps = [t for t in range(begin, begin + length) if trained[t]]
        following = [values[t] for t in steps[1:]] + [0.0]
        deltas = [rewards[t] + gamma * after - values[t] for t, after in zip(steps, following, strict=False)]
        for i, t in enumerate(steps):
            result[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
        begin += length
    return result


@pytest.mark.parametrize("gamma", (1.0, 0.9))
@pytest.mark.parametrize("lam", (1.0, 0.95, 0.5, 0.0))
def test_packed_sequences_with_holes(gamma: float, lam: float) -> None:
    batch, values, rewards = packed(), noise(1), noise(2)
    estimates = gae(values, rewards, batch, gamma=gamma, lam=lam)
    on = batch.token_scale != 0
    expected = by_hand(values.tolist(), rewards.tolist(), on.tolist(), gamma, lam)
    assert estimates.advantages.dtype == torch.float64
    assert estimates.advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    returns = [a + v if t else 0.0 for a, v, t in zip(expected, values.tolist(), on.tolist(), strict=True)]
    assert estimates.returns.tolist() == pytest.approx(returns, rel=1e-12, abs=1e-14)


def test_with_gamma_and_lambda_one_the_return_is_the_reward_to_come() -> None:
    batch, values = packed(), noise(1)
    estimates = gae(values, terminal_rewards(batch).double(), batch, gamma=1.0, lam=1.0)
    rewards = batch.rewards.double().repeat_interleave(torch.tensor(LENGTHS)) * (batch.token_scale != 0)
    torch.testing.assert_close(estimates.returns, rewards)


def test_the_value_after_the_last_token_is_zero() -> None:
    batch, values, rewards = packed(), noise(1), noise(2)
    estimates = gae(values, rewards, batch, gamma=0.9, lam=0.5)
    for last in (3, 5, 12, 19):
        assert estimates.advantages[last].item() == pytest.approx(rewards[last].item() - values[last].item())


def test_what_stands_at_untrained_positions_does_not_matter() -> None:
    batch, values, rewards = packed(), noise(1), noise(2)
    plain = gae(values, rewards, batch, gamma=0.9, lam=0.5)
    off = batch.token_scale == 0
    noisy = gae(torch.where(off, 99.0, values), torch.where(off, -55.0, rewards), batch, gamma=0.9, lam=0.5)
    assert torch.equal(plain.advantages, noisy.advantages) and torch.equal(plain.returns, noisy.returns)


def test_a_sequence_does_not_depend_on_its_company() -> None:
    batch, values, rewards = packed(), noise(1), noise(2)
    together = gae(values, rewards, batch, gamma=0.9, lam=0.5)
    place = slice(6, 14)
    alone = loss_micro_batch(token_scale=batch.token_scale[place], advantages=values[place], old_logprobs=values[place])
    estimates = gae(values[place], rewards[place], alone, gamma=0.9, lam=0.5)
    assert torch.equal(estimates.advantages, together.advantages[place])


def test_a_reward_comes_at_the_last_trained_position() -> None:
    rewards = terminal_rewards(packed()).tolist()
    expected = [0.0] * TOTAL
    for position, reward in ((3, 1.0), (5, -0.5), (12, 0.25), (19, 2.0)):
        expected[position] = reward
    assert rewards == expected  # the padding's 7 is nowhere


def values_case() -> tuple[Tensor, MicroBatch]:
    batch = packed()
    batch.values, batch.returns = noise(3), noise(4)
    return batch.values + 0.5 * noise(5), batch


def value_and_gradient(loss: ValueLoss, values: Tensor, batch: MicroBatch) -> tuple[float, Tensor]:
    leaf = values.clone().requires_grad_()
    output = loss(leaf, batch)
    output.loss.backward()
    assert leaf.grad is not None
    return output.loss.item(), leaf.grad


@pytest.mark.parametrize("clip", (None, 0.2, 0.01, 50.0))
def test_value_loss_and_its_slope(clip: float | None) -> None:
    values, batch = values_case()
    loss = ValueLoss(clip)
    total, num_clipped = 0.0, 0
    rows = zip(values.tolist(), batch.values.tolist(), batch.returns.tolist(), batch.token_scale.tolist(), strict=True)
    for v, old, target, w in rows:
        error = (v - target) ** 2
        if clip is not None:
            bounded = (min(max(v, old - clip), old + clip) - target) ** 2
            num_clipped += bounded > error and w > 0
            error = max(error, bounded)
        total += w * error / 2
    value, gradient = value_and_gradient(loss, values, batch)
    assert value == pytest.approx(total, rel=1e-12)
    metrics = results(loss(values, batch).metrics)
    on = batch.token_scale != 0
    assert metrics["critic/clip_fraction"] == pytest.approx(num_clipped / on.sum().item())
    assert metrics["critic/value_mean"] == pytest.approx(values[on].mean().item(), rel=1e-5)
    assert metrics["critic/return_mean"] == pytest.approx(batch.returns[on].mean().item(), rel=1e-5)
    assert (num_clipped > 0) == (clip in (0.2, 0.01))
    for i in range(TOTAL):
        nudge = torch.zeros(TOTAL).double()
        nudge[i] = 1e-6
        above, below = (loss(values + sign * nudge, batch).loss.item() for sign in (1, -1))
        assert (above - below) / 2e-6 == pytest.approx(gradient[i].item(), rel=1e-6, abs=1e-8)
    assert torch.equal(gradient[~on], torch.zeros(len(UNTRAINED)).double())


def test_a_value_that_moved_too_far_the_right_way_learns_nothing_more() -> None:
    """Old value 0, target 1, clip 0.2: at 0.5 the clipped error is larger and flat; at -0.5 it is not."""
    one = torch.ones(2).double()
    batch = loss_micro_batch(token_scale=one, advantages=one, old_logprobs=one)
    batch.values, batch.returns = 0 * one, one
    value, gradient = value_and_gradient(ValueLoss(0.2), torch.tensor([0.5, -0.5]).double(), batch)
    assert gradient.tolist() == pytest.approx([0.0, -1.5])
    assert value == pytest.approx((0.8**2 + 1.5**2) / 2)
    _, free = value_and_gradient(ValueLoss(None), torch.tensor([0.5, -0.5]).double(), batch)
    assert free.tolist() == pytest.approx([-0.5, -1.5])


def test_before_the_first_update_the_clip_is_silent() -> None:
    _, batch = values_case()
    clipped, gradient = value_and_gradient(ValueLoss(0.2), batch.values, batch)
    plain, gradient_plain = value_and_gradient(ValueLoss(None), batch.values, batch)
    assert clipped == plain
    torch.testing.assert_close(gradient, gradient_plain)
