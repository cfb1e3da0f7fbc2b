"""Computing activations again in the backward changes no gradient, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest

from dist.pool import Pool
from dist.world import ONE, Arrays, Layout

# The first is what the others are compared with.
SETTINGS = (
    "",
    "full",
    "full uniform 2",
    "full block 1",
    "selective core_attn",
    "selective mlp",
    "selective layernorm",
    "selective core_attn mlp layernorm",
)
LAYOUTS = (
    ONE,
    Layout(tp=2, sp=True),
    pytest.param(Layout(tp=4), marks=pytest.mark.law),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(cp=2),
    Layout(pp=2, ends=(5, 3)),
)


def assert_equal(found: Arrays, wanted: Arrays, what: str) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=f"{what}: {name}")


# The longest sequence has 42 tokens.
DENSE, ONE_BY_ONE = 128, 8


def check(
    pool: Pool, layout: Layout, *, dtype: str = "float32", max_dense_length: int = DENSE, moe: bool = False
) -> None:
    settings = tuple(s for s in SETTINGS if s != "full uniform 2" or layout.ends is None)
    (gradients, logprobs), *others = pool.run(
        layout.world_size, "dist.jobs_memory:recomputed", layout, settings, dtype, max_dense_length, moe
    )[0]
    assert any(np.abs(gradient).max() > 0 for gradient in gradients.values())
    for setting, (again, logprobs_again) in zip(settings[1:], others, strict=True):
        assert_equal(again, gradients, setting)
        assert_equal(logprobs_again, logprobs, setting)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_recompute_gives_the_same_bits(pool: Pool, layout: Layout) -> None:
    check(pool, layout)


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(cp=2)], ids=str)
def test_recompute_gives_the_same_bits_where_sequences_are_attended_one_by_one(pool: Pool, layout: Layout) -> None:
    check(pool, layout, max_dense_length=ONE_BY_ONE)


def test_recompute_gives_the_same_bits_in_bfloat16(pool: Pool) -> None:
    check(pool, Layout(tp=2, sp=True), dtype="bfloat16")


@pytest.mark.parametrize("layout", [ONE, Layout(dp=2, ep=2), Layout(tp=2, sp=True, ep=2)], ids=str)
def test_recompute_gives_the_same_bits_with_experts(pool: Pool, layout: Layout) -> None:
    check(pool, layout, moe=True)
