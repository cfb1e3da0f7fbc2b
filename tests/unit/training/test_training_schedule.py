"""The learning rate at the points that decide it."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.training.schedule import learning_rate

Style = Literal["constant", "linear", "cosine"]
STYLES: tuple[Style, ...] = ("constant", "linear", "cosine")


def rates(style: Style, *, warmup: int, decay: int, num: int) -> list[float]:
    config = OptimizerConfig(lr=8.0, min_lr=2.0, lr_decay_style=style, lr_warmup_iters=warmup)
    return [learning_rate(update, config, decay) for update in range(num)]


@pytest.mark.parametrize("style", STYLES)
def test_warm_up_rises_in_equal_steps_to_the_full_rate(style: Style) -> None:
    """The first update already learns: a rate of exactly 0 would waste it."""
    assert rates(style, warmup=4, decay=12, num=4) == pytest.approx([2.0, 4.0, 6.0, 8.0])


@pytest.mark.parametrize("style", STYLES)
def test_the_decay_starts_from_the_full_rate(style: Style) -> None:
    assert rates(style, warmup=4, decay=12, num=5)[4] == pytest.approx(8.0)
    assert rates(style, warmup=0, decay=8, num=1) == pytest.approx([8.0])


def test_constant_stays() -> None:
    assert rates("constant", warmup=2, decay=4, num=50)[2:] == [8.0] * 48


@pytest.mark.parametrize(
    ("style", "quarter", "half"), [("linear", 6.5, 5.0), ("cosine", 2.0 + 6.0 * (1 + 0.5**0.5) / 2, 5.0)]
)
def test_decay_between_and_at_its_ends(style: Style, quarter: float, half: float) -> None:
    """Warm-up of 4, then 8 updates down: min_lr at update 12, and it stays there."""
    found = rates(style, warmup=4, decay=12, num=40)
    assert found[6] == pytest.approx(quarter)
    assert found[8] == pytest.approx(half)
    assert found[11] > 2.0
    assert found[12:] == pytest.approx([2.0] * 28)
    assert all(after <= before for before, after in itertools.pairwise(found[4:]))


@pytest.mark.parametrize("style", ("linear", "cosine"))
def test_a_decay_that_ends_with_the_warm_up_is_finite(style: Style) -> None:
    found = rates(style, warmup=4, decay=4, num=7)
    assert found == pytest.approx([2.0, 4.0, 6.0, 8.0, 8.0, 2.0, 2.0])


def test_a_rate_of_zero_stays_zero() -> None:
    config = OptimizerConfig(lr=0.0, lr_warmup_iters=2)
    assert [learning_rate(update, config, 10) for update in range(12)] == [0.0] * 12
