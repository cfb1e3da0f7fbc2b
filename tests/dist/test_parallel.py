"""What moves between ranks arrives where it should."""

from __future__ import annotations

import math

import pytest
import torch

from dist.pool import Pool, RankFailure
from dist.world import Layout

FULL = Layout(tp=2, dp=2)
PIPELINE = Layout(tp=2, pp=2)


def test_topology_counts_tensor_ranks_first_then_replicas_then_stages(pool: Pool) -> None:
    seen = [
        (t.rank, t.tensor_rank, t.data_rank, t.pipeline_rank)
        for t in pool.run(4, "dist.jobs_parallel:topology", Layout(tp=2, dp=2))
    ]
    assert seen == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 1, 0), (3, 1, 1, 0)]
    seen = [
        (t.rank, t.data_rank, t.pipeline_rank, t.is_first_stage, t.is_last_stage)
        for t in pool.run(4, "dist.jobs_parallel:topology", Layout(pp=2, dp=2))
    ]
    assert seen == [
        (0, 0, 0, True, False),
        (1, 1, 0, True, False),
        (2, 0, 1, False, True),
        (3, 1, 1, False, True),
    ]


@pytest.mark.parametrize("rows", [[[1, 2, 3, 4, 5], [7]], [[7], [1, 2, 3]], [[], [4, 5]]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_scatter_gives_each_replica_its_own_row(pool: Pool, rows: list[list[int]], dtype: torch.dtype) -> None:
    for layout in (FULL, Layout(pp=2, dp=2)):
        for replica, row, got in pool.run(4, "dist.jobs_parallel:scatter", layout, rows, dtype):
            assert (row, got) == ([float(number) for number in rows[replica]], str(dtype))


def test_scatter_keeps_large_integers(pool: Pool) -> None:
    rows = [[2**53 + 1], [1, -(2**62)]]
    ranks = pool.run(2, "dist.jobs_parallel:scatter", Layout(dp=2), rows, torch.int64)
    assert [row for _, row, _ in ranks] == rows


@pytest.mark.parametrize("sources", [[0, 1], [2, 3], [3, 1], [3, 0], [2]], ids=str)
def test_gather_brings_the_shards_of_its_sources_to_rank_0_in_their_order(pool: Pool, sources: list[int]) -> None:
    ranks = pool.run(4, "dist.jobs_parallel:gather", PIPELINE, sources)
    assert ranks == [[[float(source)] * 2 for source in sources], None, None, None]


def test_columns_come_in_rank_order(pool: Pool) -> None:
    assert pool.run(2, "dist.jobs_parallel:columns", Layout(tp=2)) == [[[0.0, 1.0], [0.0, 1.0]]] * 2


def test_a_number_is_rank_0s_on_every_rank_and_exact(pool: Pool) -> None:
    assert pool.run(4, "dist.jobs_parallel:number", PIPELINE) == [0.1] * 4


def test_a_sum_is_over_every_rank_and_known_on_all(pool: Pool) -> None:
    assert pool.run(4, "dist.jobs_parallel:summed", PIPELINE) == [(10.0, 3.0)] * 4


def test_every_stage_gets_the_tensor_of_the_last_of_its_own_pipeline(pool: Pool) -> None:
    # Replica 0 ends on rank 2, replica 1 on rank 3.
    wanted = [[[0.0 + last, 2.0 + last, 4.0 + last], [1.0 + last, 3.0 + last, 5.0 + last]] for last in (2, 3, 2, 3)]
    assert pool.run(4, "dist.jobs_parallel:last_stage", Layout(pp=2, dp=2)) == wanted


@pytest.mark.parametrize("layout", [FULL, Layout(pp=2, dp=2)], ids=str)
def test_metrics_are_reduced_over_replicas_and_known_everywhere(pool: Pool, layout: Layout) -> None:
    for found in pool.run(4, "dist.jobs_parallel:metrics", layout):
        assert math.isnan(found.pop("nothing"))
        # (1 x 0 + 2 x 10) / 3 tokens: a mean of means would say 5.
        assert found == {"mean": pytest.approx(20 / 3), "sum": 2.0, "max": -1.0}


def test_ranks_that_do_not_fit_the_layout_are_refused(pool: Pool) -> None:
    for text in pool.run(3, "dist.jobs_parallel:wrong_world", Layout(tp=2)):
        assert text == (
            "3 ranks were started, but tensor_model_parallel_size 2 x pipeline_model_parallel_size 1 x"
            " context_parallel_size 1 = 2 does not divide that; start a multiple of 2 ranks or change parallel.*"
        )


def test_a_rank_that_raises_is_named_and_its_peers_do_not_hang(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*expected one of rank 1"):
        pool.run(2, "dist.jobs_pool:fail_on_rank_1")
    with pytest.raises(RankFailure, match=r"rank 0: killed .*over 1 s"):
        pool.run(1, "dist.jobs_pool:sleep", timeout=1)
    assert pool.run(2, "dist.jobs_pool:add", 40) == [40, 41]
