"""Clip coefficients against the golden table of Klear-Reasoner Eq. 5 and 12, and where exp() leaves float range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule, PolicyCoefficients, policy_coefficients

LOW, HIGH = 0.2, 0.28
GPPO = ClipRule(LOW, HIGH, keep_low=1.0, keep_high=1.0)
CISPO = ClipRule(LOW, HIGH, two_sided=True)
DTYPES = (torch.float32, torch.float64)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "float64"))
both_losses = pytest.mark.parametrize("keep", (0.0, 1.0), ids=("ppo", "gppo"))


def one_token(
    log_ratio: float,
    advantage: float,
    *,
    keep: float,
    dtype: torch.dtype = torch.float64,
    widths: tuple[float, float] = (LOW, HIGH),
) -> PolicyCoefficients:
    return policy_coefficients(
        torch.tensor([log_ratio], dtype=dtype),
        torch.tensor([advantage], dtype=dtype),
        ClipRule(*widths, keep_low=keep, keep_high=keep),
    )


# ratio, advantage, value (loss = -value * advantage), gradient weight under PPO, under GPPO.
GOLDEN = [
    (0.1, 1.0, 0.1, 0.1, 0.1),
    (0.1, -1.0, 0.8, 0.0, 0.8),
    (1.5, 1.0, 1.28, 0.0, 1.28),
    (1.5, -1.0, 1.5, 1.5, 1.5),
    (5.0, -1.0, 5.0, 5.0, 5.0),  # no dual clip: the paper's Eq. 12 has none
    (12.0, -1.0, 12.0, 12.0, 12.0),
    (1.0, 1.0, 1.0, 1.0, 1.0),
    (1.0, -1.0, 1.0, 1.0, 1.0),
    (1.27, 1.0, 1.27, 1.27, 1.27),
    (0.81, -1.0, 0.81, 0.81, 0.81),
]


@both_dtypes
@pytest.mark.parametrize(("ratio", "advantage", "value", "ppo", "gppo"), GOLDEN)
def test_golden_table(
    ratio: float, advantage: float, value: float, ppo: float, gppo: float, dtype: torch.dtype
) -> None:
    for keep, gradient in ((0.0, ppo), (1.0, gppo)):
        c = one_token(math.log(ratio), advantage, keep=keep, dtype=dtype)
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        assert c.ratio.item() == pytest.approx(ratio, rel=tolerance)
        assert c.value.item() == pytest.approx(value, rel=tolerance)
        assert c.gradient.item() == pytest.approx(gradient, rel=tolerance)


def test_each_clip_flag_is_set_in_its_own_cell_only() -> None:
    log_ratio = torch.tensor([0.1, 0.1, 1.5, 1.5, 1.0, 1.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    c = policy_coefficients(log_ratio, advantages, GPPO)
    assert c.clipped_low.tolist() == [False, True, False, False, False, False]
    assert c.clipped_high.tolist() == [False, False, True, False, False, False]
    assert not c.clipped_dual.any()


def test_each_side_keeps_its_own_share_of_the_gradient_and_the_value_keeps_all() -> None:
    log_ratio, advantages = torch.tensor([0.1, 1.5]).double().log(), torch.tensor([-1.0, 1.0]).double()
    c = policy_coefficients(log_ratio, advantages, ClipRule(LOW, HIGH, keep_low=0.75, keep_high=0.5))
    assert c.gradient.tolist() == pytest.approx([0.75 * 0.8, 0.5 * 1.28])
    assert c.value.tolist() == pytest.approx([0.8, 1.28])


@both_losses
@both_dtypes
@pytest.mark.parametrize("log_ratio", (-0.3, -0.01, 0.01, 0.3))
def test_a_ratio_exactly_on_the_edge_is_not_clipped_and_one_just_behind_it_is(
    log_ratio: float, keep: float, dtype: torch.dtype
) -> None:
    ratio = torch.tensor(log_ratio, dtype=dtype).exp().item()
    width = abs(ratio - 1)  # exact for a ratio between 1/2 and 2, and so is 1 +- width
    assert ratio in (1 - width, 1 + width)
    advantage = math.copysign(1.0, log_ratio)
    on_edge = one_token(log_ratio, advantage, keep=keep, dtype=dtype, widths=(width, width))
    assert not on_edge.clipped_low.item() and not on_edge.clipped_high.item()
    assert on_edge.gradient.item() == ratio
    step = 4 * torch.finfo(dtype).eps
    behind = one_token(log_ratio, advantage, keep=keep, dtype=dtype, widths=(width - step, width - step))
    assert (behind.clipped_low if log_ratio < 0 else behind.clipped_high).item()


@both_losses
def test_a_width_of_zero_does_not_clip_the_ratio_one(keep: float) -> None:
    for advantage in (1.0, -1.0):
        c = one_token(0.0, advantage, keep=keep, widths=(0.0, 0.0))
        assert (c.gradient.item(), c.clipped_low.item(), c.clipped_high.item()) == (1.0, False, False)


@both_dtypes
@pytest.mark.parametrize("distance", (25.0, 100.0, 1000.0, math.inf))
def test_far_log_ratios_give_the_closed_form(distance: float, dtype: torch.dtype) -> None:
    def gradient(log_ratio: float, advantage: float, keep: float) -> float:
        return one_token(log_ratio, advantage, keep=keep, dtype=dtype).gradient.item()

    exactly_low = torch.tensor(0.8, dtype=dtype).item()
    exactly_high = torch.tensor(1.28, dtype=dtype).item()
    assert gradient(-distance, -1.0, keep=1.0) == exactly_low
    assert gradient(+distance, +1.0, keep=1.0) == exactly_high
    assert gradient(-distance, -1.0, keep=0.0) == 0.0
    assert gradient(+distance, +1.0, keep=0.0) == 0.0
    # The cells without a clip follow the ratio, of which only what exp() sees is bounded.
    for keep in (0.0, 1.0):
        assert gradient(+distance, -1.0, keep=keep) == pytest.approx(math.exp(20.0), rel=1e-5)
        assert gradient(-distance, +1.0, keep=keep) == pytest.approx(math.exp(-20.0), rel=1e-5)


@both_losses
@pytest.mark.parametrize("log_ratio", (-1000.0, -1.0, 0.0, 1.0, 1000.0))
def test_a_zero_advantage_is_never_clipped_and_never_nan(log_ratio: float, keep: float) -> None:
    c = one_token(log_ratio, 0.0, keep=keep)
    assert not c.clipped_low.item() and not c.clipped_high.item()
    assert c.value.item() * 0.0 == 0.0 and c.gradient.item() * 0.0 == 0.0


@settings(deadline=None)
@given(
    log_ratio=st.floats(allow_nan=False, width=32),
    advantage=st.floats(-1e4, 1e4, width=32),
    keep=st.sampled_from((0.0, 0.5, 1.0)),
    dtype=st.sampled_from(DTYPES),
)
def test_always_finite_and_equal_to_the_clipped_minimum(
    log_ratio: float, advantage: float, keep: float, dtype: torch.dtype
) -> None:
    c = one_token(log_ratio, advantage, keep=keep, dtype=dtype)
    for number in (c.ratio, c.value, c.gradient):
        assert number.dtype == dtype and number.isfinite().all()
    ratio = c.ratio.item()
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    surrogate = min(ratio * advantage, clipped * advantage)
    assert c.value.item() * advantage == pytest.approx(surrogate, rel=1e-6)
    # What a clipped token keeps is bounded by the clip edges; everything else follows the ratio.
    if c.clipped_low.item() or c.clipped_high.item():
        assert c.gradient.item() == pytest.approx(keep * clipped, rel=1e-6)
    else:
        assert c.gradient.item() == ratio


def test_nan_is_not_hidden() -> None:
    c = one_token(math.nan, 1.0, keep=1.0)
    assert c.value.isnan().all() and c.gradient.isnan().all()


def test_coefficients_carry_no_gradient() -> None:
    log_ratio = torch.zeros(3, requires_grad=True)
    c = policy_coefficients(log_ratio, torch.ones(3), GPPO)
    assert not c.ratio.requires_grad and not c.value.requires_grad and not c.gradient.requires_grad


def test_cispo_bounds_the_weight_whatever_the_sign_of_the_advantage() -> None:
    log_ratio = torch.tensor([0.1, 0.1, 0.1, 1.5, 1.5, 1.5, 1.1]).double().log()
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0, -1.0]).double()
    c = policy_coefficients(log_ratio, advantages, CISPO)
    assert c.gradient.tolist() == c.value.tolist() == pytest.approx([0.8] * 3 + [1.28] * 3 + [1.1])
    assert c.clipped_low.tolist() == [True] * 3 + [False] * 4
    assert c.clipped_high.tolist() == [False] * 3 + [True] * 3 + [False]
    assert not c.clipped_dual.any()


@pytest.mark.parametrize("two_sided", (True, False))
def test_without_a_lower_bound_small_ratios_are_themselves(two_sided: bool) -> None:
    rule = ClipRule(None, HIGH, two_sided=two_sided)
    log_ratio, advantages = torch.tensor([-1000.0, -25.0, -1.0]).double(), -torch.ones(3).double()
    c = policy_coefficients(log_ratio, advantages, rule)
    assert c.gradient.tolist() == pytest.approx([math.exp(-20.0), math.exp(-20.0), math.exp(-1.0)])
    assert not c.clipped_low.any()


def test_betas_weigh_value_and_gradient_of_their_own_side() -> None:
    rule = ClipRule(LOW, LOW, value_low=0.75, value_high=1.5, keep_low=0.75, keep_high=1.5)
    log_ratio = torch.tensor([0.1, 1.5, 0.1, 1.5]).double().log()
    c = policy_coefficients(log_ratio, torch.tensor([-1.0, 1.0, 1.0, -1.0]).double(), rule)
    assert c.value.tolist() == c.gradient.tolist() == pytest.approx([0.6, 1.8, 0.1, 1.5])


# The defaults of Klear's released code (3) and its scripts (10); ratio, advantage, value, gradient.
DUAL = [
    (3.0, 2.9, -1.0, 2.9, 2.9),
    (3.0, 5.0, -1.0, 3.0, 0.0),
    (10.0, 5.0, -1.0, 5.0, 5.0),
    (10.0, 12.0, -1.0, 10.0, 0.0),
    (3.0, 12.0, 1.0, 1.28, 1.28),
    (3.0, 12.0, 0.0, 12.0, 12.0),
    (3.0, 0.1, -1.0, 0.8, 0.8),
]


@pytest.mark.parametrize(("bound", "ratio", "advantage", "value", "gradient"), DUAL)
def test_dual_clip(bound: float, ratio: float, advantage: float, value: float, gradient: float) -> None:
    """An early release bounded at 1 by mistake, so that no token with A < 0 and r > 1 kept a gradient."""
    rule = ClipRule(LOW, HIGH, keep_low=1.0, keep_high=1.0, dual_clip=bound)
    c = policy_coefficients(torch.tensor([ratio]).double().log(), torch.tensor([advantage]).double(), rule)
    assert (c.value.item(), c.gradient.item()) == pytest.approx((value, gradient))
    assert c.clipped_dual.item() == (ratio > bound and advantage < 0)
    assert not (c.clipped_dual & (c.clipped_low | c.clipped_high)).any()


def test_a_ratio_exactly_at_the_dual_bound_keeps_its_gradient() -> None:
    ratio = torch.tensor([1.5]).double().exp()
    rule = ClipRule(LOW, HIGH, dual_clip=ratio.item())
    c = policy_coefficients(torch.tensor([1.5]).double(), -torch.ones(1).double(), rule)
    assert c.gradient.item() == ratio.item() and not c.clipped_dual.any()
