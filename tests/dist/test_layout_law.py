"""The layout law: how the work is cut changes nothing. Each row of the table is one layout against one rank.

Print the table with `pytest -s tests/dist/test_layout_law.py`. To add a parallel dimension, give `Layout` a field and
name it in `all_layouts`; to add a loss, write it in jobs_law.CASES; to add a mutant, write it in
law_mutants.MUTANTS and say in CAUGHT on which layout it must show, and in which measure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from dist.jobs_law import CASES, CRITIC, Measured, Variant
from dist.law_mutants import MUTANTS
from dist.pool import Pool
from dist.world import ONE, Arrays, Layout

SIZES = (1, 2, 4, 8)
WHOLE, HALVES, SEVENTHS = 400, 160, 48  # tokens a micro-batch: 1, 2 and 7 micro-batches on one replica
FULL = Layout(tp=2, pp=2, dp=2)
TP2, TP2SP, PP2, DP2 = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)


def all_layouts() -> list[Layout]:
    """Every (tp, pp, dp) of powers of two on at most 8 ranks, with and without sequence parallelism."""
    every = [Layout(tp, pp, dp) for tp, pp, dp in itertools.product(SIZES, repeat=3)]
    fitting = [layout for layout in every if layout.world_size <= 8]
    return fitting + [replace(layout, sp=True) for layout in fitting if layout.tp > 1]


# Every loss, both heads and every split, where each kind of communication occurs.
ROWS: dict[str, tuple[list[Layout], list[Variant]]] = {
    "splits": (
        [ONE, TP2SP, PP2, DP2, FULL],
        [Variant(tied=tied, max_tokens=tokens) for tied in (False, True) for tokens in (WHOLE, SEVENTHS)],
    ),
    "losses": ([TP2SP, PP2, DP2, FULL], [Variant(case) for case in CASES if case != Variant().case]),
    "critic": ([TP2, TP2SP, PP2, DP2, Layout(tp=2, pp=2), FULL], [Variant(CRITIC, tied=True)]),
}
TESTS = [pytest.param(layout, [Variant(tied=True, moves=True)], id=f"layouts-{layout}") for layout in all_layouts()]
TESTS += [
    pytest.param(layout, variants, id=f"{name}-{layout}")
    for name, (layouts, variants) in ROWS.items()
    for layout in layouts
]

LIMITS = {
    "ranks": 0.0,
    "loss": 1e-5,
    "metrics": 1e-5,
    "rows": 1e-5,
    "gradient norm": 1e-5,
    "gradient": 1e-5,
    "moved": 1e-4,
}

# Mutant -> where it must show, on what, and which measure must pass its limit.
CAUGHT = {
    "loss times the data-parallel size": (DP2, Variant(), "gradient"),
    "loss divided by the number of micro-batches": (ONE, Variant(), "gradient"),
    "gradients not summed over replicas": (DP2, Variant(), "gradient"),
    "metrics not summed over replicas": (DP2, Variant(), "ranks"),
    "norm weights unmarked under sequence parallelism": (TP2SP, Variant(), "gradient"),
    "shards unmarked as tensor-parallel": (TP2, Variant(), "gradient norm"),
    "head not summed over tensor ranks": (TP2, Variant(), "gradient"),
    "tied copies not summed over stages": (PP2, Variant(tied=True), "gradient"),
    "values summed over tensor ranks": (TP2SP, Variant(CRITIC, tied=True), "gradient"),
    "SFT tokens counted locally": (DP2, Variant(), "gradient"),
    "sequences counted locally": (DP2, Variant("all seq-mean-token-sum"), "gradient"),
}

Measure = Callable[[Layout, list[Variant]], list[list[Measured]]]
References = dict[tuple[str, bool], Measured]


@pytest.fixture(scope="module")
def measure(pool: Pool) -> Measure:
    def run(layout: Layout, variants: list[Variant]) -> list[list[Measured]]:
        """By variant, then by rank."""
        ranks = pool.run(layout.world_size, "dist.jobs_law:measure", layout, variants)
        return [list(one) for one in zip(*ranks, strict=True)]

    return run


@pytest.fixture(scope="module")
def references(measure: Measure) -> References:
    """One rank, one micro-batch, for all that is learnt."""
    variants = [Variant(case, max_tokens=WHOLE) for case in CASES]
    variants += [Variant(tied=True, max_tokens=WHOLE, moves=True), Variant(CRITIC, tied=True, max_tokens=WHOLE)]
    return {variant.learnt: ranks[0] for variant, ranks in zip(variants, measure(ONE, variants), strict=True)}


def relative(value: np.ndarray | float, wanted: np.ndarray | float) -> float:
    return float(np.linalg.norm(np.subtract(value, wanted)) / max(float(np.linalg.norm(wanted)), 1e-12))


def worst(found: Arrays, wanted: Arrays) -> tuple[float, str]:
    assert found.keys() == wanted.keys()
    return max((relative(found[name], wanted[name]), name) for name in wanted)


def deviations(ranks: list[Measured], wanted: Measured) -> Iterator[tuple[str, float, str]]:
    """(measure, relative deviation from `wanted`, where) of one variant, over all its ranks."""
    main = ranks[0]
    yield "ranks", *max((_difference(one, main), f"rank {rank} against rank 0") for rank, one in enumerate(ranks))
    loss = "train/loss" if "train/loss" in wanted.metrics else "critic/loss"
    yield "loss", relative(main.metrics[loss], wanted.metrics[loss]), ""
    assert main.metrics.keys() == wanted.metrics.keys()
    # Some metrics are near zero by nature, so they are compared on the scale of a log-prob.
    yield (
        "metrics",
        *max((abs(main.metrics[k] - v) / max(abs(v), 1.0), k) for k, v in wanted.metrics.items()),
    )
    yield "rows", *worst({k: v for one in ranks for k, v in one.rows.items()}, wanted.rows)
    yield "gradient norm", relative(main.grad_norm, wanted.grad_norm), ""
    yield "gradient", *worst(main.gradients, wanted.gradients)
    if main.moved:
        yield "moved", *worst(main.moved, wanted.moved)


def _difference(one: Measured, other: Measured) -> float:
    """What every rank is told must be the same to the bit."""
    assert one.metrics.keys() == other.metrics.keys()
    return max(abs(one.grad_norm - other.grad_norm), *(abs(one.metrics[k] - v) for k, v in other.metrics.items()))


WATCHED = {
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "model.norm": "norm",
    "embed_tokens": "embed",
    "lm_head": "lm_head",
    "value_head": "value_head",
}


def table_row(label: str, ranks: list[Measured], wanted: Measured) -> str:
    """Worst deviation of each measure, then of the gradients that are easiest to get wrong."""
    cells = [f"{label:<58}"]
    cells += [f"{name} {value:.0e}" for name, value, _ in deviations(ranks, wanted)]
    cells += ["|"]
    grads, right = ranks[0].gradients, wanted.gradients
    for part, short in WATCHED.items():
        values = [relative(grads[name], right[name]) for name in right if part in name]
        cells += [f"{short} {max(values):.0e}"] if values else []
    return "  ".join(cells)


def test_there_are_20_layouts_and_10_more_with_sequence_parallelism() -> None:
    assert len(all_layouts()) == 30 and sum(layout.sp for layout in all_layouts()) == 10


@pytest.mark.parametrize(("layout", "variants"), TESTS)
def test_every_layout_computes_what_one_rank_computes(
    layout: Layout, variants: list[Variant], measure: Measure, references: References
) -> None:
    broken = []
    for variant, ranks in zip(variants, measure(layout, variants), strict=True):
        wanted = references[variant.learnt]
        kind = "" if variant.case == CRITIC else ", tied" if variant.tied else ", untied"
        label = f"{layout} x{ranks[0].num_micro_batches}  {variant.case}{kind}"
        print(table_row(label, ranks, wanted))
        broken += [
            f"{label}: {name} off by {value:.2e} (limit {LIMITS[name]:.0e}) {where}"
            for name, value, where in deviations(ranks, wanted)
            if not value <= LIMITS[name]
        ]
    assert not broken, "\n" + "\n".join(broken)


def test_one_replica_sees_1_2_and_7_micro_batches(measure: Measure) -> None:
    measured = measure(ONE, [Variant(max_tokens=tokens) for tokens in (WHOLE, HALVES, SEVENTHS)])
    assert [ranks[0].num_micro_batches for ranks in measured] == [1, 2, 7]


def test_every_cell_of_the_losses_occurs(references: References) -> None:
    """Else the table would compare zeros."""
    everything = references[Variant().learnt].metrics
    for name in ("ratio_deviation_max", "clip_fraction_low", "clip_fraction_high", "erc_masked", "kl", "nll_loss"):
        assert everything[f"train/{name}"] > 0.01, name
    assert everything["train/erc_masked"] < 0.9
    assert references["clip_higher dual", False].metrics["train/clip_fraction_dual"] > 0.01
    gspo = references["gspo", False].metrics
    assert gspo["train/clip_fraction_low"] > 0.01 and gspo["train/clip_fraction_high"] > 0.01
    assert 0.01 < references[CRITIC, True].metrics["critic/clip_fraction"] < 0.9
    losses = [one.metrics["train/pg_loss"] for (case, tied), one in references.items() if case != CRITIC and not tied]
    # PPO and GPPO have one value; all others differ.
    assert len(set(losses)) >= len(losses) - 4


@pytest.mark.parametrize("layout", [PP2, Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2)], ids=str)
def test_both_copies_of_a_tied_embedding_get_the_same_gradient(layout: Layout, measure: Measure) -> None:
    (ranks,) = measure(layout, [Variant(tied=True)])
    copies = [one.tied_copy for one in ranks]
    first, last = copies[: len(copies) // 2], copies[len(copies) // 2 :]
    for a, b in zip(first, last, strict=True):
        assert a is not None and b is not None
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mutant", CAUGHT)
def test_the_law_catches(mutant: str, measure: Measure, references: References) -> None:
    layout, variant, name = CAUGHT[mutant]
    broken = Variant(variant.case, variant.tied, mutant=mutant)
    (ranks,) = measure(layout, [broken])
    found = {measured: (value, where) for measured, value, where in deviations(ranks, references[broken.learnt])}
    print(f"{mutant}: {name} off by {found[name][0]:.1e} {found[name][1]}")
    assert found[name][0] > max(100 * LIMITS[name], 1e-3)


def test_every_mutant_is_tried() -> None:
    assert set(CAUGHT) == set(MUTANTS) - {""}
