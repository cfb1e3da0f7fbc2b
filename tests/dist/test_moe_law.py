"""The layout law for experts: how they and their tokens are spread changes nothing. See test_layout_law.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from dist.jobs_moe import AFTER, BEFORE, Measured, Variant
from dist.pool import Pool
from dist.world import ONE, Arrays, Layout

EP2, TP2SP = Layout(dp=2, ep=2), Layout(tp=2, sp=True)
ALL_TO_ALL = [
    Layout(dp=2),
    EP2,
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    TP2SP,
    Layout(tp=2, sp=True, ep=2),
    Layout(tp=2, sp=True, dp=2, ep=2),
    Layout(tp=2, sp=True, dp=2, ep=4),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, pp=2, sp=True, ep=2),
    # One stage a layer: the second holds no expert.
    Layout(pp=4, dp=2, ep=2),
    Layout(cp=2, ep=2),
    Layout(pp=2, dp=2, vpp=2, ep=2),
]
LAYOUTS = [ONE, *ALL_TO_ALL]
LAYOUTS += [
    Layout(dp=2, ep=2, dispatcher="allgather"),
    Layout(tp=2, sp=True, dp=2, ep=2, dispatcher="allgather"),
    Layout(pp=2, dp=2, ep=2, dispatcher="allgather"),
]
SMALL = [EP2, TP2SP, Layout(pp=2, dp=2, ep=2), Layout(tp=2, sp=True, dp=2, ep=4, dispatcher="allgather")]
LIMITS = {"ranks": 0.0, "loss": 1e-5, "metrics": 1e-5, "gradient norm": 1e-5, "gradient": 1e-5, "moved": 1e-4}
WHOLE = 160
COEFFICIENT = 0.05

# Mutant -> where it must show, with what weight of the load-balancing loss, and in which measure.
CAUGHT = {
    "expert gradients averaged": (EP2, 0.0, "gradient"),
    "expert gradients not summed": (Layout(dp=4, ep=2), 0.0, "gradient"),
    "experts swapped": (EP2, 0.0, "loss"),
    "router not normalised": (EP2, 0.0, "loss"),
    "balance loss times local tokens": (EP2, COEFFICIENT, "gradient"),
    "routers unmarked under sequence parallelism": (TP2SP, 0.0, "gradient"),
    "experts taken for dense weights": (TP2SP, 0.0, "gradient"),
    "balance loss summed over micro-batches": (EP2, COEFFICIENT, "gradient"),
    "experts not gathered after a step": (TP2SP, 0.0, "moved"),
}

Measure = Callable[[Layout, Variant], list[Measured]]


@pytest.fixture(scope="module")
def measure(pool: Pool) -> Measure:
    return lambda layout, variant: pool.run(layout.world_size, "dist.jobs_moe:measure", layout, variant)


@pytest.fixture(scope="module")
def reference(measure: Measure) -> Measured:
    """One rank, one micro-batch, no load-balancing loss."""
    (one,) = measure(ONE, Variant(WHOLE))
    assert one.num_micro_batches == 1
    return one


def balanced(layout: Layout) -> Variant:
    """Cuts the batch into four micro-batches, over all replicas: the same four in every layout."""
    return Variant(46, COEFFICIENT)


@pytest.fixture(scope="module")
def balanced_reference(measure: Measure) -> Measured:
    """One rank, four micro-batches, with load-balancing loss."""
    (one,) = measure(ONE, balanced(ONE))
    assert one.num_micro_batches == 4
    return one


def relative(value: np.ndarray | float, wanted: np.ndarray | float) -> float:
    return float(np.linalg.norm(np.subtract(value, wanted)) / max(float(np.linalg.norm(wanted)), 1e-12))


def worst(found: Arrays, wanted: Arrays) -> tuple[float, str]:
    assert found.keys() == wanted.keys()
    return max((relative(found[name], wanted[name]), name) for name in wanted)


def deviations(ranks: list[Measured], wanted: Measured) -> Iterator[tuple[str, float, str]]:
    """(measure, relative deviation from `wanted`, where)."""
    main = ranks[0]
    assert main.metrics.keys() == wanted.metrics.keys()
    yield "ranks", max(abs(one.metrics[k] - v) for one in ranks for k, v in main.metrics.items()), ""
    yield "loss", relative(main.metrics["train/loss"], wanted.metrics["train/loss"]), ""
    yield "metrics", *max((abs(main.metrics[k] - v) / max(abs(v), 1.0), k) for k, v in wanted.metrics.items())
    yield "gradient norm", relative(main.grad_norm, wanted.grad_norm), ""
    yield "gradient", *worst(main.gradients, wanted.gradients)
    yield "moved", *worst(main.moved, wanted.moved)


def assert_lawful(label: str, ranks: list[Measured], wanted: Measured) -> None:
    found = list(deviations(ranks, wanted))
    print(f"{label:<44}" + "  ".join(f"{name} {value:.0e}" for name, value, _ in found))
    broken = [f"{name} off by {value:.2e} {where}" for name, value, where in found if not value <= LIMITS[name]]
    assert not broken, f"{label}: {broken}"


@pytest.mark.parametrize("layout", [one if one in SMALL else pytest.param(one, marks=pytest.mark.law) for one in LAYOUTS])
def test_every_layout_computes_what_one_rank_computes(layout: Layout, measure: Measure, reference: Measured) -> None:
    ranks = measure(layout, Variant())
    assert_lawful(f"{layout} x{ranks[0].num_micro_batches}", ranks, reference)


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_more_micro_batches_change_nothing(layout: Layout, measure: Measure, reference: Measured) -> None:
    ranks = measure(layout, Variant(44))
    assert ranks[0].num_micro_batches >= 2
    assert_lawful(f"{layout} x{ranks[0].num_micro_batches}", ranks, reference)


@pytest.mark.law
@pytest.mark.parametrize("layout", [Layout(dp=4), *SMALL, Layout(tp=2, pp=2, sp=True, ep=2)], ids=str)
def test_the_balance_loss_is_the_mean_over_micro_batches_in_every_layout(
    layout: Layout, measure: Measure, balanced_reference: Measured
) -> None:
    ranks = measure(layout, balanced(layout))
    assert ranks[0].num_micro_batches * layout.dp == 4
    assert_lawful(f"{layout} balanced", ranks, balanced_reference)


def test_the_balance_loss_weighs(reference: Measured, balanced_reference: Measured) -> None:
    """On the routers most: else the tests of it would compare nothing."""
    off = {name: relative(balanced_reference.gradients[name], wanted) for name, wanted in reference.gradients.items()}
    assert min(value for name, value in off.items() if name.endswith("mlp.gate.weight")) > 0.05
    assert balanced_reference.metrics["train/moe_aux_loss"] > 1.01
    assert "train/moe_aux_loss" not in reference.metrics
    # The loss that is reported is the policy's alone.
    assert relative(balanced_reference.metrics["train/loss"], reference.metrics["train/loss"]) <= 1e-5


def test_every_expert_is_trained(reference: Measured) -> None:
    assert all(np.linalg.norm(gradient) > 1e-4 for gradient in reference.gradients.values())


@pytest.mark.law
@pytest.mark.parametrize("mutant", CAUGHT)
def test_the_law_catches(mutant: str, measure: Measure, reference: Measured, balanced_reference: Measured) -> None:
    layout, coefficient, name = CAUGHT[mutant]
    variant = balanced(layout) if coefficient else Variant()
    ranks = measure(layout, replace(variant, mutant=mutant))
    wanted = balanced_reference if coefficient else reference
    found = {measured: (value, where) for measured, value, where in deviations(ranks, wanted)}
    print(f"{mutant}: {name} off by {found[name][0]:.1e} {found[name][1]}")
    assert found[name][0] > max(100 * LIMITS[name], 1e-3)


def test_every_mutant_is_tried() -> None:
    assert set(CAUGHT) == {*AFTER, *BEFORE}
