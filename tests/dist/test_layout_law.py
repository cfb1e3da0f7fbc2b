"""The layout law: how the work is cut changes nothing. Each row of the table is one layout against one rank.

Print the table with `pytest -s tests/dist/test_layout_law.py`. To add a layout, add it to LAYOUTS; to add a mutant,
write it in jobs_law.MUTANTS and say in CAUGHT on which layout it must show, and in which measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dist.jobs_law import MUTANTS, Measured, Variant
from dist.pool import Pool
from dist.world import ONE, Arrays, Layout

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sp=True),
    Layout(tp=2, dp=2),
    Layout(pp=2, dp=2),
]
BUDGETS = (200, 80, 44)  # on one rank: 1, 2 and 4 micro-batches
VARIANTS = [Variant(tied, budget) for tied in (False, True) for budget in BUDGETS]

LIMITS = {"loss": 1e-5, "metrics": 1e-5, "log-probs": 1e-5, "gradient norm": 1e-5, "gradient": 1e-5, "moved": 1e-4}

# Mutant -> where it must show, and which measure must pass its limit.
CAUGHT = {
    "loss times the data-parallel size": (Layout(dp=2), "gradient"),
    "loss divided by the number of micro-batches": (ONE, "gradient"),
    "norm weights unmarked under sequence parallelism": (Layout(tp=2, sp=True), "gradient"),
    "shards unmarked as tensor-parallel": (Layout(tp=2), "gradient norm"),
    "SFT tokens counted locally": (Layout(dp=2), "gradient"),
}


@pytest.fixture(scope="module")
def measure(pool: Pool) -> Callable[..., list[list[Measured]]]:
    def run(layout: Layout, variants: list[Variant]) -> list[list[Measured]]:
        """By variant, then by rank."""
        ranks = pool.run(layout.world_size, "dist.jobs_law:measure", layout, variants)
        return [list(one) for one in zip(*ranks, strict=True)]

    return run


@pytest.fixture(scope="module")
def references(measure: Callable[..., list[list[Measured]]]) -> dict[bool, Measured]:
    """One rank, one micro-batch; by tied."""
    return {
        tied: ranks[0]
        for tied, ranks in zip(
            (False, True), measure(ONE, [Variant(tied, BUDGETS[0]) for tied in (False, True)]), strict=True
        )
    }


def relative(value: np.ndarray | float, wanted: np.ndarray | float) -> float:
    return float(np.linalg.norm(np.subtract(value, wanted)) / max(float(np.linalg.norm(wanted)), 1e-12))


def worst(found: Arrays, wanted: Arrays) -> tuple[float, str]:
    assert found.keys() == wanted.keys()
    return max((relative(found[name], wanted[name]), name) for name in wanted)


def deviations(ranks: list[Measured], wanted: Measured) -> Iterator[tuple[str, float, str]]:
    """(measure, relative deviation from `wanted`, where) of one variant, over all its ranks."""
    main = ranks[0]
    for rank, one in enumerate(ranks):
        assert one.metrics == main.metrics, f"rank {rank} has other metrics than rank 0"
        assert one.grad_norm == main.grad_norm, f"rank {rank} has another gradient norm than rank 0"
    yield "loss", relative(main.metrics["train/loss"], wanted.metrics["train/loss"]), ""
    assert main.metrics.keys() == wanted.metrics.keys()
    # Some metrics are near zero by nature, so they are compared on the scale of a log-prob.
    yield (
        "metrics",
        *max((abs(main.metrics[k] - v) / max(abs(v), 1.0), k) for k, v in wanted.metrics.items()),
    )
    yield "log-probs", *worst({k: v for one in ranks for k, v in one.logprobs.items()}, wanted.logprobs)
    yield "gradient norm", relative(main.grad_norm, wanted.grad_norm), ""
    yield "gradient", *worst(main.gradients, wanted.gradients)
    if main.moved:
        yield "moved", *worst(main.moved, wanted.moved)


WATCHED = ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "model.norm", "embed_tokens", "lm_head")


def table_row(label: str, ranks: list[Measured], wanted: Measured) -> str:
    """Worst deviation of each measure, then of the gradients that are easiest to get wrong."""
    cells = [f"{label:<26}"]
    cells += [f"{name} {value:.0e}" for name, value, _ in deviations(ranks, wanted)]
    grads, right = ranks[0].gradients, wanted.gradients
    for part in WATCHED:
        values = [relative(grads[name], right[name]) for name in right if part in name]
        cells += [f"{part} {max(values):.0e}"] if values else []
    return "  ".join(cells)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_computes_what_one_rank_computes(
    layout: Layout, measure: Callable[..., list[list[Measured]]], references: dict[bool, Measured]
) -> None:
    broken = []
    for variant, ranks in zip(VARIANTS, measure(layout, VARIANTS), strict=True):
        wanted = references[variant.tied]
        label = f"{layout} {'tied' if variant.tied else 'untied'} x{ranks[0].num_micro_batches}"
        print(table_row(label, ranks, wanted))
        broken += [
            f"{label}: {name} off by {value:.2e} (limit {LIMITS[name]:.0e}) {where}"
            for name, value, where in deviations(ranks, wanted)
            if not value <= LIMITS[name]
        ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2)], ids=str)
def test_both_copies_of_a_tied_embedding_get_the_same_gradient(
    layout: Layout, measure: Callable[..., list[list[Measured]]]
) -> None:
    (ranks,) = measure(layout, [Variant(True, BUDGETS[1])])
    copies = [one.tied_copy for one in ranks]
    first, last = copies[: len(copies) // 2], copies[len(copies) // 2 :]
    for a, b in zip(first, last, strict=True):
        assert a is not None and b is not None
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mutant", CAUGHT)
def test_the_law_catches(
    mutant: str, measure: Callable[..., list[list[Measured]]], references: dict[bool, Measured]
) -> None:
    layout, name = CAUGHT[mutant]
    (ranks,) = measure(layout, [Variant(False, BUDGETS[1], mutant)])
    found = {measure_name: (value, where) for measure_name, value, where in deviations(ranks, references[False])}
    print(f"{mutant}: {name} off by {found[name][0]:.1e} {found[name][1]}")
    assert found[name][0] > 100 * LIMITS[name]


def test_every_mutant_is_tried() -> None:
    assert set(CAUGHT) == set(MUTANTS) - {""}
