"""An optimizer whose state waits on the host learns the same, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from dist.pool import Pool
from dist.world import ONE, Arrays, Layout


def assert_equal(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("layout", [ONE, Layout(dp=2), Layout(tp=2, pp=2, sp=True)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_updates_are_the_same_as_without(pool: Pool, layout: Layout, dtype: str, sharded: bool) -> None:
    ranks = pool.run(layout.world_size, "dist.jobs_memory:offloaded", layout, dtype, sharded, 1e-2)
    plain, offloaded, _ = ranks[0]
    for found, wanted in zip(offloaded, plain, strict=True):
        assert_equal(found, wanted)
    assert any((plain[2][name] != plain[0][name]).any() for name in plain[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_main_weights_and_moments_move_and_the_model_stays(pool: Pool, dtype: str) -> None:
    ((_, _, moved),) = pool.run(1, "dist.jobs_memory:offloaded", ONE, dtype, True, 1e-2)
    # 19 tensors (q, k, v are one, gate and up too), without moments before the first update. In float32 the model's
    # weights are the main weights.
    mains, state = (0 if dtype == "float32" else 19), 3 * 19
    assert moved == [mains, 3 * mains + state, 5 * mains + 3 * state]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learning_rate_0_leaves_every_bit(pool: Pool, dtype: str) -> None:
    ((_, weights, _),) = pool.run(1, "dist.jobs_memory:offloaded", ONE, dtype, True, 0.0)
    for found in weights[1:]:
        assert_equal(found, weights[0])


def test_without_a_gpu_it_is_said_that_nothing_changes(pool: Pool) -> None:
    told = pool.run(2, "dist.jobs_memory:warned", Layout(dp=2))
    assert told == [["optimizer_cpu_offload changes nothing here: without a GPU all is in host memory"], []]
