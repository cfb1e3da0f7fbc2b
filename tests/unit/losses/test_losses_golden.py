"""Every loss against the tables of the papers, through the whole `RlLoss`, in float64: cells, bounds, far ratios."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import loss_micro_batch
from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    GppoLossConfig,
    GrpoLossConfig,
    GspoLossConfig,
    KlConfig,
    LossConfig,
    PpoLossConfig,
)
from megatron_klear.losses.registry import build_loss
from megatron_klear.losses.terms import RlLoss
from megatron_klear.metrics import results
from megatron_klear.types import MicroBatch, TokenStats

RATIO = None
"""In a table: the ratio itself."""
Cells = tuple[float | None, float | None, float | None, float | None]
"""Weights where r is below with A < 0, below with A > 0, above with A > 0, above with A < 0."""


def loss_of(config: LossConfig) -> RlLoss:
    loss = build_loss(config, KlConfig())
    assert isinstance(loss, RlLoss)
    return loss


@dataclass(frozen=True)
class Golden:
    """A loss, its bounds, and its weights outside them; inside every weight is the ratio."""

    config: LossConfig
    low: float
    high: float
    gradient: Cells
    value: Cells
    weighs_logprob: bool = False
    """The value is the weighed log-prob (CISPO)."""

    @property
    def loss(self) -> RlLoss:
        return loss_of(self.config)

    def weights(self, log_ratio: float, advantage: float) -> tuple[float, float]:
        """(gradient weight, value weight) of a token, by the table."""
        ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
        if advantage == 0 and not self.weighs_logprob:
            return ratio, ratio
        if ratio < self.low:
            cell = 0 if advantage < 0 else 1
        elif ratio > self.high:
            cell = 2 if advantage > 0 else 3
        else:
            return ratio, ratio
        g, v = self.gradient[cell], self.value[cell]
        return ratio if g is None else g, ratio if v is None else v


PPO_20 = (0.0, RATIO, 0.0, RATIO), (0.8, RATIO, 1.2, RATIO)
HIGHER = (0.0, RATIO, 0.0, RATIO), (0.8, RATIO, 1.28, RATIO)
KEPT = (0.8, RATIO, 1.28, RATIO)
BETAS = (0.75 * 0.8, RATIO, 1.5 * 1.2, RATIO)
NO_BETAS = (0.0, RATIO, 0.0, RATIO)
BOTH_SIDES = (0.8, 0.8, 1.28, 1.28)
ABOVE = (RATIO, RATIO, 1.28, 1.28)

GOLDEN = {
    "ppo": Golden(PpoLossConfig(type="ppo"), 0.8, 1.2, *PPO_20),
    "grpo": Golden(GrpoLossConfig(type="grpo"), 0.8, 1.2, *PPO_20),
    "clip_higher": Golden(ClipHigherLossConfig(type="clip_higher"), 0.8, 1.28, *HIGHER),
    "gppo": Golden(GppoLossConfig(type="gppo"), 0.8, 1.28, KEPT, KEPT),
    "ce_gppo": Golden(CeGppoLossConfig(type="ce_gppo", gppo_beta_high=1.5), 0.8, 1.2, BETAS, BETAS),
    "ce_gppo_0": Golden(
        CeGppoLossConfig(type="ce_gppo", gppo_beta_low=0.0, gppo_beta_high=0.0), 0.8, 1.2, NO_BETAS, NO_BETAS
    ),
    "cispo": Golden(CispoLossConfig(type="cispo"), 0.8, 1.28, BOTH_SIDES, BOTH_SIDES, weighs_logprob=True),
    "cispo_above": Golden(CispoLossConfig(type="cispo", eps_clip=None), 0.0, 1.28, ABOVE, ABOVE, weighs_logprob=True),
    "gspo": Golden(GspoLossConfig(type="gspo", eps_clip=0.2, eps_clip_high=0.28), 0.8, 1.28, *HIGHER),
    "gspo_narrow": Golden(
        GspoLossConfig(type="gspo"), 0.9997, 1.0004, (0.0, RATIO, 0.0, RATIO), (0.9997, RATIO, 1.0004, RATIO)
    ),
}
every_loss = pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
OLD = -1.5


def tokens(log_ratios: list[float], advantages: list[float], dtype: torch.dtype = torch.float64) -> MicroBatch:
    """One sequence a token, of scale 1/2, so that GSPO's ratio is the token's."""
    old = torch.full((len(log_ratios),), OLD, dtype=dtype)
    return loss_micro_batch(
        token_scale=torch.full_like(old, 0.5),
        advantages=torch.tensor(advantages, dtype=dtype),
        old_logprobs=old,
        lengths=[1] * len(log_ratios),
    )


def gradient_of(loss: RlLoss, current: Tensor, batch: MicroBatch) -> tuple[float, Tensor]:
    logprobs = current.clone().requires_grad_()
    output = loss(TokenStats(logprobs), batch)
    output.loss.backward()
    assert logprobs.grad is not None
    return output.loss.item(), logprobs.grad


def check_by_the_table(golden: Golden, log_ratios: list[float], advantages: list[float], dtype: torch.dtype) -> None:
    batch = tokens(log_ratios, advantages, dtype)
    current = batch.old_logprobs + torch.tensor(log_ratios, dtype=dtype)
    rel = 1e-12 if dtype == torch.float64 else 1e-5
    value, gradient = gradient_of(golden.loss, current, batch)
    rows = [golden.weights(one, a) for one, a in zip(log_ratios, advantages, strict=True)]
    expected = [-0.5 * g * a for (g, _), a in zip(rows, advantages, strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=rel)
    logprobs = current.tolist() if golden.weighs_logprob else [1.0] * len(rows)
    parts = [-0.5 * v * a * x for (_, v), a, x in zip(rows, advantages, logprobs, strict=True)]
    assert value == pytest.approx(math.fsum(parts), rel=rel, abs=rel * max(abs(part) for part in parts))


@every_loss
@pytest.mark.parametrize(
    "ratio", (1e-3, 0.1, 0.79, 0.81, 0.99, 1.0, 1.0002, 1.01, 1.19, 1.21, 1.27, 1.29, 1.5, 5.0, 12.0)
)
def test_every_cell(golden: Golden, ratio: float) -> None:
    for advantage in (-2.0, -1e-6, 0.0, 1e-6, 3.0):
        check_by_the_table(golden, [math.log(ratio)], [advantage], torch.float64)


@every_loss
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))
@pytest.mark.parametrize("distance", (25.0, 100.0, 1000.0))
@pytest.mark.parametrize("side", (-1, 1))
def test_far_log_ratios(golden: Golden, side: int, distance: float, dtype: torch.dtype) -> None:
    for advantage in (-2.0, 0.0, 2.0):
        check_by_the_table(golden, [side * distance], [advantage], dtype)


# ratio, advantage, method: weight of the gradient, and the loss; measured on the authors' own functions.
AUTHORS = [
    (0.1, 1.0, 0.1, 0.1, 0.1, -0.1, -0.1, -0.1),
    (0.1, -1.0, 0.0, 0.8, 0.6, 0.8, 0.8, 0.6),
    (1.5, 1.0, 0.0, 1.28, 1.28, -1.28, -1.28, -1.28),
    (1.5, -1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5),
    (5.0, -1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0),
]


@pytest.mark.parametrize("row", AUTHORS, ids=lambda row: f"{row[0]},{row[1]:+}")
def test_the_table_measured_on_the_released_code(row: tuple[float, ...]) -> None:
    ratio, advantage, *rest = row
    configs: list[LossConfig] = [
        ClipHigherLossConfig(type="clip_higher"),
        GppoLossConfig(type="gppo"),
        CeGppoLossConfig(type="ce_gppo", eps_clip_high=0.28, gppo_beta_low=0.75),
    ]
    for config, weight, number in zip(configs, rest[:3], rest[3:], strict=True):
        batch = tokens([math.log(ratio)], [advantage])
        batch.token_scale = torch.ones(1).double()
        value, gradient = gradient_of(loss_of(config), batch.old_logprobs + math.log(ratio), batch)
        assert -gradient.item() / advantage == pytest.approx(weight, rel=1e-12)
        assert value == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize("name", ("ppo", "clip_higher", "gppo"))
@pytest.mark.parametrize(
    ("bound", "ratio", "advantage", "dual"),
    [(10.0, 5.0, -1.0, False), (3.0, 5.0, -1.0, True), (10.0, 12.0, -1.0, True), (3.0, 5.0, 1.0, False),
     (3.0, 2.9, -1.0, False), (3.0, 0.1, -1.0, False)],
)  # fmt: skip
def test_dual_clip_takes_away_the_gradient_beyond_its_bound(
    name: str, bound: float, ratio: float, advantage: float, dual: bool
) -> None:
    golden = GOLDEN[name]
    loss = loss_of(golden.config.model_copy(update={"eps_clip_c": bound}))
    batch = tokens([math.log(ratio)], [advantage])
    current = batch.old_logprobs + math.log(ratio)
    value, gradient = gradient_of(loss, current, batch)
    g, v = (0.0, bound) if dual else golden.weights(math.log(ratio), advantage)
    assert gradient.item() == pytest.approx(-0.5 * g * advantage, rel=1e-12, abs=1e-15)
    assert value == pytest.approx(-0.5 * v * advantage, rel=1e-12)
    metrics = results(loss(TokenStats(current), batch).metrics)
    assert metrics["train/clip_fraction_dual"] == dual


TIES: dict[str, Callable[[float], LossConfig]] = {
    "ppo": lambda w: PpoLossConfig(type="ppo", eps_clip=w),
    "clip_higher": lambda w: ClipHigherLossConfig(type="clip_higher", eps_clip=w, eps_clip_high=w),
    "gppo": lambda w: GppoLossConfig(type="gppo", eps_clip=w, eps_clip_high=w),
    "ce_gppo": lambda w: CeGppoLossConfig(type="ce_gppo", eps_clip=w, eps_clip_high=w, gppo_beta_low=0.5),
    "cispo": lambda w: CispoLossConfig(type="cispo", eps_clip=w, eps_clip_high=w),
    "gspo": lambda w: GspoLossConfig(type="gspo", eps_clip=w, eps_clip_high=w),
}


@pytest.mark.parametrize("make", TIES.values(), ids=TIES)
@pytest.mark.parametrize("log_ratio", (-0.3, -0.01, 0.01, 0.3))
def test_a_ratio_exactly_at_a_bound_is_not_clipped(make: Callable[[float], LossConfig], log_ratio: float) -> None:
    ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    width = abs(ratio - 1)
    assert ratio in (1 - width, 1 + width)
    old, advantage = torch.zeros(1).double(), math.copysign(1.0, log_ratio)
    batch = loss_micro_batch(token_scale=old + 1, advantages=old + advantage, old_logprobs=old)
    for narrower, clipped in ((0.0, 0.0), (1e-14, 1.0)):
        metrics = results(loss_of(make(width - narrower))(TokenStats(old + log_ratio), batch).metrics)
        assert metrics["train/clip_fraction_low"] + metrics["train/clip_fraction_high"] == clipped
    _, gradient = gradient_of(loss_of(make(width)), old + log_ratio, batch)
    assert gradient.item() == -ratio * advantage


def random_batch(*, seed: int = 3, spread: float = 0.4) -> tuple[Tensor, MicroBatch]:
    """Sequences of 1 to 9 tokens, some positions untrained; scale and advantage are constant inside a sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 4, 9, 2, 7, 5, 3, 8, 6, 1]
    total = sum(lengths)
    sizes = torch.tensor(lengths)

    def draw(count: int) -> Tensor:
        return torch.randn(count, dtype=torch.float64, generator=generator)

    trained = torch.rand(total, generator=generator) < 0.8
    scale = (draw(len(lengths)).abs() + 0.1).repeat_interleave(sizes) * trained / total
    advantages = draw(len(lengths)).repeat_interleave(sizes) * trained
    old = -draw(total).abs() - 1
    batch = loss_micro_batch(token_scale=scale, advantages=advantages, old_logprobs=old, lengths=lengths)
    return old + spread * draw(total), batch


def finite_differences(of: Callable[[Tensor], float], current: Tensor, step: float = 1e-6) -> Tensor:
    slopes = torch.zeros_like(current)
    for i in range(current.numel()):
        nudge = torch.zeros_like(current)
        nudge[i] = step
        slopes[i] = (of(current + nudge) - of(current - nudge)) / (2 * step)
    return slopes


@pytest.mark.parametrize("name", ("ppo", "grpo", "clip_higher", "gspo"))
def test_where_the_gradient_is_the_slope_of_the_value(name: str) -> None:
    """For GSPO this holds the coupling of a whole sequence: one log-prob moves the ratio of every token."""
    golden = GOLDEN[name]
    current, batch = random_batch(spread=0.4 if name != "gspo" else 0.6)
    _, gradient = gradient_of(golden.loss, current, batch)
    slopes = finite_differences(lambda x: golden.loss(TokenStats(x), batch).loss.item(), current)
    ratio = golden.loss.policy.log_ratio(current, batch).exp()
    smooth = ((ratio - golden.low).abs() > 1e-4) & ((ratio - golden.high).abs() > 1e-4)
    assert smooth.all()
    torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-10)
    assert (gradient[batch.token_scale != 0] == 0).any() and (gradient != 0).any()


@pytest.mark.parametrize("name", ("gppo", "ce_gppo", "cispo", "cispo_above"))
def test_where_the_gradient_is_a_frozen_weight_times_the_logprob(name: str) -> None:
    golden = GOLDEN[name]
    current, batch = random_batch()
    log_ratio = (current - batch.old_logprobs).tolist()
    rows = [golden.weights(one, a) for one, a in zip(log_ratio, batch.advantages.tolist(), strict=True)]
    frozen = batch.token_scale * batch.advantages * torch.tensor([g for g, _ in rows], dtype=torch.float64)
    slopes = finite_differences(lambda x: -(frozen * x).sum().item(), current)
    value, gradient = gradient_of(golden.loss, current, batch)
    torch.testing.assert_close(gradient, slopes, rtol=1e-7, atol=1e-10)
    by_token = torch.tensor([v for _, v in rows], dtype=torch.float64) * (current if golden.weighs_logprob else 1)
    assert value == pytest.approx(-(batch.token_scale * batch.advantages * by_token).sum().item(), rel=1e-12)


def test_gspo_has_one_ratio_a_sequence_of_its_trained_tokens() -> None:
    current, batch = random_batch()
    value, gradient = gradient_of(GOLDEN["gspo"].loss, current, batch)
    borders, expected, total = batch.cu_seqlens.tolist(), [], 0.0
    difference = (current - batch.old_logprobs).tolist()
    for begin, end in itertools.pairwise(borders):
        places = [t for t in range(begin, end) if batch.token_scale[t] != 0]
        mean = math.fsum(difference[t] for t in places) / max(len(places), 1)
        for t in range(begin, end):
            if t not in places:
                expected.append(0.0)
                continue
            w, a = batch.token_scale[t].item(), batch.advantages[t].item()
            g, v = GOLDEN["gspo"].weights(mean, a)
            total += -w * v * a
            expected.append(-w * g * a)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert value == pytest.approx(total, rel=1e-12)


def test_the_forward_value_of_gppo_is_clip_highers_however_far() -> None:
    for spread in (0.4, 5.0, 300.0):
        current, batch = random_batch(spread=spread)
        values = [GOLDEN[name].loss(TokenStats(current), batch).loss for name in ("clip_higher", "gppo")]
        assert torch.equal(values[0], values[1])


@every_loss
@pytest.mark.parametrize("spread", (0.4, 300.0))
def test_nothing_trained_or_no_advantage_gives_no_loss_and_no_gradient(golden: Golden, spread: float) -> None:
    for field in ("token_scale", "advantages"):
        current, batch = random_batch(spread=spread)
        if field == "token_scale":
            batch.token_scale = torch.zeros_like(current)
        else:
            batch.advantages = torch.zeros_like(current)
        value, gradient = gradient_of(golden.loss, current, batch)
        assert value == 0.0 and torch.equal(gradient, torch.zeros_like(current))


@every_loss
def test_untrained_positions_touch_neither_loss_nor_metrics(golden: Golden) -> None:
    current, batch = random_batch()
    value, gradient = gradient_of(golden.loss, current, batch)
    metrics = results(golden.loss(TokenStats(current), batch).metrics)
    untrained = batch.token_scale == 0
    noisy = torch.where(untrained, current - 7, current)
    batch.old_logprobs = torch.where(untrained, batch.old_logprobs + 5, batch.old_logprobs)
    batch.advantages = torch.where(untrained, -3.0, batch.advantages)
    again, gradient_again = gradient_of(golden.loss, noisy, batch)
    assert again == value and torch.equal(gradient, gradient_again)
    assert results(golden.loss(TokenStats(noisy), batch).metrics) == metrics
    assert torch.equal(gradient[untrained], torch.zeros(int(untrained.sum())).double())


@every_loss
def test_correction_weights_multiply_value_and_gradient_of_each_token(golden: Golden) -> None:
    log_ratios, advantages = [-2.0, -2.0, 0.1, 2.0, 2.0], [-1.0, 2.0, 1.0, 1.0, -1.0]
    batch = tokens(log_ratios, advantages)
    current = batch.old_logprobs + torch.tensor(log_ratios).double()
    weights = torch.tensor([0.0, 0.5, 2.0, 1.5, 0.25]).double()
    _, plain = gradient_of(golden.loss, current, batch)
    singles = []
    for i in range(5):
        one = tokens(log_ratios[i : i + 1], advantages[i : i + 1])
        singles.append(golden.loss(TokenStats(current[i : i + 1]), one).loss.item())
    batch.policy_weights = weights
    value, gradient = gradient_of(golden.loss, current, batch)
    torch.testing.assert_close(gradient, weights * plain, rtol=1e-13, atol=0)
    assert value == pytest.approx(math.fsum(w * v for w, v in zip(weights.tolist(), singles, strict=True)))
