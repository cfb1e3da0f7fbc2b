"""What the planner counts against ranks that hold it."""

from __future__ import annotations

import pytest

from dist.jobs_plan import Counted, four_layers
from dist.pool import Pool
from dist.world import Layout
from megatron_klear.launch.activations import AttentionPath, final_norm_bytes, rotary_bytes, saved_activation_bytes
from megatron_klear.launch.layout import layout_of
from megatron_klear.launch.memory import optimizer_bytes
from megatron_klear.launch.parameters import RankParameters, count_parameters, rank_parameters

LENGTHS = [20, 30, 38]
LAYOUTS = [
    (Layout(), False, "float32", True),
    (Layout(tp=2), False, "float32", True),
    # More ranks than KV heads.
    (Layout(tp=4), False, "float32", True),
    (Layout(pp=2), False, "bfloat16", True),
    (Layout(pp=2), True, "float32", False),
    (Layout(tp=2, pp=2), True, "bfloat16", True),
    (Layout(tp=2, sp=True), False, "bfloat16", False),
    (Layout(dp=2), False, "bfloat16", True),
    (Layout(pp=2, vpp=2), True, "float32", True),
    (Layout(pp=2, ends=(1, 3)), False, "float32", True),
]


def counted(pool: Pool, layout: Layout, tied: bool, dtype: str, sharded: bool) -> list[Counted]:
    return pool.run(layout.world_size, "dist.jobs_plan:count", layout, tied, dtype, sharded, LENGTHS)


def planned(layout: Layout, tied: bool, stage: int) -> RankParameters:
    shape = four_layers(tied)
    laid_out = layout_of(layout.config(sharded_optimizer=True), shape, layout.world_size)
    return rank_parameters(shape, count_parameters(shape), laid_out, stage)


@pytest.mark.parametrize(("layout", "tied", "dtype", "sharded"), LAYOUTS, ids=str)
def test_every_rank_holds_what_is_planned(pool: Pool, layout: Layout, tied: bool, dtype: str, sharded: bool) -> None:
    ranks = counted(pool, layout, tied, dtype, sharded)
    for rank in ranks:
        assert rank.parameters == planned(layout, tied, rank.stage).total
    laid_out = layout_of(layout.config(sharded_optimizer=True), four_layers(tied), layout.world_size)
    for stage in range(layout.pp):
        # The optimizer cuts one long row of all weights, padding included, so that ranks differ a little.
        held = [rank.optimizer_bytes for rank in ranks if rank.stage == stage]
        each = optimizer_bytes(planned(layout, tied, stage), laid_out, dtype, sharded=sharded)
        assert sum(held) / len(held) == pytest.approx(each, rel=1e-3)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_saves_what_is_planned(pool: Pool, layout: Layout, dtype: str) -> None:
    shape, parallel, tokens = four_layers(False), layout.config(sharded_optimizer=True), sum(LENGTHS)
    layers = saved_activation_bytes(
        shape,
        tokens,
        parallel,
        dtype,
        num_layers=shape.num_hidden_layers,
        attention=AttentionPath("blocks", ((len(LENGTHS), max(LENGTHS)),)),
    )
    expected = layers + final_norm_bytes(shape, tokens, parallel, dtype) + rotary_bytes(shape, tokens, dtype)
    for rank in counted(pool, layout, False, dtype, True):
        assert expected == pytest.approx(rank.activation_bytes, rel=0.03)
