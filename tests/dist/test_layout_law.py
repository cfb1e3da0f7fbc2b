"""The layout law: how the work is cut changes nothing. Each row of the table is one layout against one rank.

`make law` prints the whole table: every (tp, pp, cp, dp) in powers of two on at most 8 ranks, and a pairwise cover of
all that can be combined with them. `make test` runs a part of it (what is not marked `law`).
To add a parallel dimension, give `Layout` a field and name it in `FACTORS`; to add a loss, write it in jobs_law.CASES;
to add a mutant, write it in law_mutants.MUTANTS and say in CAUGHT on which layout it must show, and in which measure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dist.jobs_law import CASES, CRITIC, Measured, Variant
from dist.law_mutants import MUTANTS
from dist.pairwise import pairs, pairwise
from dist.pool import Pool, RankFailure
from dist.world import ONE, Arrays, Layout

SIZES = (1, 2, 4, 8)
WHOLE, HALVES, SEVENTHS = 400, 160, 48  # tokens a micro-batch: 1, 2 and 7 micro-batches on one replica
FULL = Layout(tp=2, pp=2, dp=2)
TP2, TP2SP, PP2, DP2 = Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)
CP2, PP2VPP2 = Layout(cp=2), Layout(pp=2, vpp=2)
# These run in `make test` too: each kind of communication, and each pair of kinds.
CORE = [
    ONE, TP2SP, PP2, CP2, DP2, PP2VPP2, Layout(pp=2, ends=(3, 5)), Layout(tp=2, pp=2, sp=True), Layout(tp=2, cp=2),
    Layout(tp=2, dp=2), Layout(pp=2, cp=2, vpp=2), Layout(pp=2, dp=2), Layout(cp=2, dp=2), FULL,
    Layout(tp=2, pp=2, cp=2, sp=True, vpp=2),
]  # fmt: skip


def all_layouts() -> list[Layout]:
    """Every (tp, pp, cp, dp) of powers of two on at most 8 ranks."""
    every = [Layout(tp, pp, dp, cp=cp) for tp, pp, cp, dp in itertools.product(SIZES, repeat=4)]
    return [layout for layout in every if layout.world_size <= 8]


# What is combined pairwise. Sizes above 2 are in `all_layouts`.
FACTORS: dict[str, list[Any]] = {
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "cp": [1, 2, 4],
    "dp": [1, 2],
    "sp": [False, True],
    "vpp": [1, 2],
    "ends": [None, (2, 2)],
    "recompute": ["", "full", "full block 1", "selective core_attn", "selective mlp layernorm"],
    "case": [*CASES, CRITIC],
    "max_tokens": [WHOLE, HALVES, SEVENTHS],
    "tied": [False, True],
    "kv_heads": [8, 2],
    "long": [False, True],
}


def _is_allowed(row: dict[str, Any]) -> bool:
    return (
        row["tp"] * row["pp"] * row["cp"] * row["dp"] <= 4
        and (row["tp"] > 1 or not row["sp"])
        and (row["pp"] > 1 or (row["vpp"] == 1 and row["ends"] is None))
        # Two stages of two layers are not eight.
        and (row["pp"] > 2 or row["ends"] is None)
        and (row["case"] != CRITIC or row["tied"])
    )


def _split(row: dict[str, Any]) -> tuple[Layout, Variant]:
    own = {name: row[name] for name in ("tp", "pp", "cp", "dp", "sp", "vpp", "ends", "recompute")}
    return Layout(**own), Variant(**{name: value for name, value in row.items() if name not in own})


COVER = pairwise(FACTORS, _is_allowed, seed=0)
ROWS = [_split(row) for row in COVER]
# Every loss, both heads and every split, where each kind of communication occurs.
SPLITS = [Variant(tied=tied, max_tokens=tokens) for tied in (False, True) for tokens in (WHOLE, SEVENTHS)]
LOSSES = [Variant(case) for case in CASES if case != Variant().case]
TESTS = [
    pytest.param(
        layout, [Variant(tied=True, moves=True)], id=f"layouts-{layout}", marks=[] if layout in CORE else pytest.mark.law
    )
    for layout in dict.fromkeys([*CORE, *all_layouts()])
]
TESTS += [
    pytest.param(layout, SPLITS, id=f"splits-{layout}", marks=pytest.mark.law)
    for layout in (TP2SP, PP2, CP2, DP2, FULL)
]
TESTS += [pytest.param(layout, LOSSES, id=f"losses-{layout}", marks=pytest.mark.law) for layout in (CP2, FULL)]
TESTS += [
    pytest.param(layout, [Variant(CRITIC, tied=True)], id=f"critic-{layout}") for layout in (TP2, TP2SP, PP2, CP2, FULL)
]
TESTS += [
    pytest.param(layout, [variant], id=f"pair{i}-{layout}", marks=pytest.mark.law)
    for i, (layout, variant) in enumerate(ROWS)
]

# Under Triton's interpreter on a CPU: small, but with every way that the ranks of a vocabulary meet.
TESTS += [
    pytest.param(
        layout,
        [Variant(path=path), Variant("gppo", path=path)],
        id=f"{path}-{layout}",
        marks=[] if (path, layout) == ("triton", TP2) else pytest.mark.law,
    )
    for path in ("triton", "triton_scaled_exp")
    for layout in (TP2, PP2)
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
    # On a loss through log-probs: the fused one notices by itself, see below.
    "loss divided by the number of micro-batches": (ONE, Variant("gspo"), "gradient"),
    "gradients not summed over replicas": (DP2, Variant(), "gradient"),
    "metrics not summed over replicas": (DP2, Variant(), "ranks"),
    "norm weights unmarked under sequence parallelism": (TP2SP, Variant(), "gradient"),
    "shards unmarked as tensor-parallel": (TP2, Variant(), "gradient norm"),
    "head not summed over tensor ranks": (TP2, Variant(), "gradient"),
    "head's own gradient taken for added": (ONE, Variant(), "gradient"),
    "tied copies not summed over stages": (PP2, Variant(tied=True), "gradient"),
    "values summed over tensor ranks": (TP2SP, Variant(CRITIC, tied=True), "gradient"),
    "SFT tokens counted locally": (DP2, Variant(), "gradient"),
    "sequences counted locally": (DP2, Variant("all seq-mean-token-sum"), "gradient"),
    "keys in the order of ranks": (CP2, Variant(), "rows"),
    "keys' gradient not summed over context ranks": (CP2, Variant(), "gradient"),
    "sequence totals of own positions": (CP2, Variant("gspo"), "gradient"),
    "weights not gathered over context ranks": (CP2, Variant(moves=True), "moved"),
    "batched messages between virtual stages": (PP2VPP2, Variant(max_tokens=SEVENTHS), "loss"),
}

Measure = Callable[[Layout, list[Variant]], list[list[Measured]]]
Learnt = tuple[str, bool, int]
References = dict[Learnt, Measured]


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
    seen = [Variant(case, max_tokens=WHOLE) for case in CASES]
    seen += [Variant(tied=True, max_tokens=WHOLE, moves=True), Variant(max_tokens=WHOLE, moves=True)]
    seen += [Variant(v.case, v.tied, WHOLE, kv_heads=v.kv_heads) for _, v in ROWS]
    seen += [Variant(CRITIC, tied=True, max_tokens=WHOLE)]
    # Of those that learn the same, the one that moves.
    variants = {variant.learnt: variant for variant in sorted(seen, key=lambda variant: variant.moves)}
    measured = measure(ONE, list(variants.values()))
    return {learnt: ranks[0] for learnt, ranks in zip(variants, measured, strict=True)}


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


def test_there_are_35_layouts_and_at_most_210_cases() -> None:
    assert len(all_layouts()) == 35
    assert sum(len(test.values[1]) for test in TESTS) <= 210  # type: ignore[arg-type]


def test_every_pair_that_can_meet_does() -> None:
    met = {pair for row in COVER for pair in pairs(row)}
    for pair in itertools.combinations(FACTORS, 2):
        found = {(a[1], b[1]) for a, b in met if (a[0], b[0]) == pair}
        missing = set(itertools.product(*(FACTORS[name] for name in pair))) - found
        for values in missing:
            # Only what the rules forbid, or what takes more than four ranks.
            assert not _could_meet(dict(zip(pair, values, strict=True))), (pair, values)


def _could_meet(fixed: dict[str, Any]) -> bool:
    smallest = {name: values[0] for name, values in FACTORS.items()} | {"case": CRITIC, "tied": True} | fixed
    ways = itertools.product(*([smallest[n]] if n in fixed else FACTORS[n] for n in ("tp", "pp", "tied", "case")))
    return any(_is_allowed(smallest | dict(zip(("tp", "pp", "tied", "case"), way, strict=True))) for way in ways)


@pytest.mark.parametrize(("layout", "variants"), TESTS)
def test_every_layout_computes_what_one_rank_computes(
    layout: Layout, variants: list[Variant], measure: Measure, references: References
) -> None:
    broken = []
    for variant, ranks in zip(variants, measure(layout, variants), strict=True):
        wanted = references[variant.learnt]
        kind = "" if variant.case == CRITIC else ", tied" if variant.tied else ", untied"
        label = f"{layout} x{ranks[0].num_micro_batches}  {variant.case}{kind}{', long' if variant.long else ''}"
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
    assert references[Variant("clip_higher dual").learnt].metrics["train/clip_fraction_dual"] > 0.01
    gspo = references[Variant("gspo").learnt].metrics
    assert gspo["train/clip_fraction_low"] > 0.01 and gspo["train/clip_fraction_high"] > 0.01
    assert 0.01 < references[Variant(CRITIC, tied=True).learnt].metrics["critic/clip_fraction"] < 0.9
    losses = [references[Variant(case).learnt].metrics["train/pg_loss"] for case in CASES]
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


@pytest.mark.law
@pytest.mark.parametrize("mutant", CAUGHT)
def test_the_law_catches(mutant: str, measure: Measure, references: References) -> None:
    layout, variant, name = CAUGHT[mutant]
    broken = replace(variant, mutant=mutant)
    (ranks,) = measure(layout, [broken])
    found = {measured: (value, where) for measured, value, where in deviations(ranks, references[broken.learnt])}
    print(f"{mutant}: {name} off by {found[name][0]:.1e} {found[name][1]}")
    assert found[name][0] > max(100 * LIMITS[name], 1e-3)


def test_a_fused_loss_notices_that_it_is_scaled(measure: Measure) -> None:
    """Its weight's gradient lies in main_grad before the scale is known."""
    with pytest.raises(RankFailure, match=r"the gradient of a fused loss is not upstream_scale = 1\.0"):
        measure(ONE, [Variant(mutant="loss divided by the number of micro-batches")])


def test_every_mutant_is_tried() -> None:
    assert set(CAUGHT) == set(MUTANTS) - {""}
