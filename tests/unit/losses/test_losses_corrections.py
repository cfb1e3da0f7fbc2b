"""Each correction against its formula, one token or one sequence after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import loss_micro_batch
from megatron_klear.config.loss import CorrectionConfig
from megatron_klear.losses.corrections import correction_weights
from megatron_klear.metrics import results
from megatron_klear.types import MicroBatch

LENGTHS = [4, 3, 5, 2, 3]
TYPES = ("none", "tis", "icepop", "mis", "sequence_mask")
LOW, HIGH = 0.8, 1.25


def batch_of(log_ratios: Tensor, *, seed: int = 0) -> MicroBatch:
    """Trainer and engine differ by `log_ratios` [17]; the last sequence is padding, others have a hole."""
    zeros = torch.zeros(17).double()
    scale = zeros + 0.1
    scale[[0, 5, 8, 14, 15, 16]] = 0.0
    old = -torch.rand(17, generator=torch.Generator().manual_seed(seed)).double() - 1
    batch = loss_micro_batch(token_scale=scale, advantages=zeros, old_logprobs=old, lengths=LENGTHS)
    batch.rollout_logprobs = old - log_ratios
    return batch


def random_ratios(seed: int = 1) -> Tensor:
    return 0.4 * torch.randn(17, generator=torch.Generator().manual_seed(seed)).double()


def expected_weight(kind: str, ratio: float) -> tuple[float, bool]:
    """(weight, counts as masked) by the formulas; `ratio` is the sequence's mean for sequence_mask."""
    outside = not LOW <= ratio <= HIGH
    return {
        "none": (1.0, False),
        "tis": (min(ratio, HIGH), ratio > HIGH),
        "mis": (0.0 if ratio > HIGH else ratio, ratio > HIGH),
        "icepop": (0.0 if outside else ratio, outside),
        "sequence_mask": (float(not outside), outside),
    }[kind]


def expected_ratios(kind: str, log_ratios: list[float], scale: list[float]) -> list[float]:
    if kind != "sequence_mask":
        return [math.exp(one) for one in log_ratios]
    ratios, begin = [], 0
    for length in LENGTHS:
        places = [t for t in range(begin, begin + length) if scale[t]]
        mean = math.fsum(log_ratios[t] for t in places) / max(len(places), 1)
        ratios += [math.exp(mean)] * length
        begin += length
    return ratios


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", TYPES)
def test_weights_and_metrics(kind: str, seed: int) -> None:
    log_ratios = random_ratios(seed)
    batch = batch_of(log_ratios)
    config = CorrectionConfig.model_validate({"type": kind, "low": LOW, "high": HIGH})
    weights, metrics = correction_weights(batch, config)
    scale = batch.token_scale.tolist()
    ratios = expected_ratios(kind, (batch.old_logprobs - batch.rollout_logprobs).tolist(), scale)
    rows = [expected_weight(kind, ratio) for ratio in ratios]
    on = [t for t in range(17) if scale[t]]
    assert weights.tolist() == pytest.approx([rows[t][0] if scale[t] else 1.0 for t in range(17)], rel=1e-12)
    numbers = results(metrics)
    assert numbers == {
        "train/correction_ratio_mean": pytest.approx(sum(ratios[t] for t in on) / len(on), rel=1e-5),
        "train/correction_weight_mean": pytest.approx(sum(rows[t][0] for t in on) / len(on), rel=1e-5),
        "train/correction_masked": pytest.approx(sum(rows[t][1] for t in on) / len(on), rel=1e-5),
    }


def test_the_random_ratios_reach_every_side() -> None:
    ratios = torch.cat([random_ratios(seed) for seed in range(4)]).exp()
    assert min((ratios < LOW).sum(), (ratios > HIGH).sum(), ((ratios > LOW) & (ratios < HIGH)).sum()) > 10


def test_a_sequence_is_masked_whole_or_not_at_all() -> None:
    """The tokens of the first are far off one by one, and right on average; of the second, the reverse."""
    log_ratios = torch.zeros(17).double()
    log_ratios[1:4] = torch.tensor([2.0, -2.0, 0.1]).double()
    log_ratios[4:7] = 0.5
    config = CorrectionConfig(type="sequence_mask", low=LOW, high=HIGH)
    weights, metrics = correction_weights(batch_of(log_ratios), config)
    assert weights[:7].tolist() == [1.0] * 4 + [0.0, 1.0, 0.0]  # position 5 is not trained
    assert weights[7:].tolist() == [1.0] * 10
    assert results(metrics)["train/correction_masked"] == pytest.approx(2 / 11)


@pytest.mark.parametrize("kind", ("icepop", "sequence_mask", "mis", "tis"))
def test_a_ratio_exactly_at_a_bound_is_inside(kind: str) -> None:
    log_ratio = torch.tensor(0.25, dtype=torch.float64)
    one = torch.ones(2).double()
    batch = loss_micro_batch(token_scale=one, advantages=one, old_logprobs=0 * one, lengths=[1, 1])
    batch.rollout_logprobs = torch.stack((log_ratio, -log_ratio))
    low, high = (-log_ratio).exp().item(), log_ratio.exp().item()
    for width, masked in ((1.0, 0.0), (1 - 1e-12, 1.0)):
        config = CorrectionConfig.model_validate({"type": kind, "low": low / width, "high": high * width})
        _, metrics = correction_weights(batch, config)
        share = results(metrics)["train/correction_masked"]
        assert share == (masked if kind in ("icepop", "sequence_mask") else masked / 2)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("poison", (-math.inf, math.nan, math.inf))
def test_what_the_engine_says_of_untrained_positions_poisons_nothing(kind: str, poison: float) -> None:
    batch = batch_of(random_ratios())
    config = CorrectionConfig.model_validate({"type": kind, "low": LOW, "high": HIGH})
    weights, metrics = correction_weights(batch, config)
    batch.rollout_logprobs = torch.where(batch.token_scale == 0, poison, batch.rollout_logprobs)
    again, metrics_again = correction_weights(batch, config)
    assert torch.equal(weights, again)
    assert results(metrics) == results(metrics_again)


@pytest.mark.parametrize(
    ("kind", "far_below", "far_above"),
    [("tis", math.exp(-20), HIGH), ("mis", math.exp(-20), 0.0), ("icepop", 0.0, 0.0), ("sequence_mask", 0.0, 0.0)],
)
@pytest.mark.parametrize("distance", (25.0, 1000.0, math.inf))
def test_far_ratios_stay_finite(kind: str, far_below: float, far_above: float, distance: float) -> None:
    one = torch.ones(2).double()
    batch = loss_micro_batch(token_scale=one, advantages=one, old_logprobs=-one, lengths=[1, 1])
    batch.rollout_logprobs = torch.tensor([distance, -distance]).double()
    config = CorrectionConfig.model_validate({"type": kind, "low": LOW, "high": HIGH})
    weights, metrics = correction_weights(batch, config)
    assert weights.tolist() == pytest.approx([far_below, far_above])
    assert all(math.isfinite(number) for number in results(metrics).values())


@pytest.mark.parametrize("kind", TYPES)
def test_a_micro_batch_of_padding_has_weights_of_one(kind: str) -> None:
    batch = batch_of(random_ratios())
    batch.token_scale = torch.zeros(17).double()
    weights, metrics = correction_weights(batch, CorrectionConfig.model_validate({"type": kind}))
    assert torch.equal(weights, torch.ones(17).double())
    assert all(float(metric.count) == 0 for metric in metrics.values())


def test_weights_carry_no_gradient() -> None:
    batch = batch_of(random_ratios())
    batch.old_logprobs = batch.old_logprobs.requires_grad_()
    weights, _ = correction_weights(batch, CorrectionConfig(type="tis"))
    assert not weights.requires_grad
