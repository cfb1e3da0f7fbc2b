"""Updates that must change nothing, updates that must be skipped, and the first update of a step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dist.jobs_policy import Skipped
from dist.pool import Pool
from dist.world import ONE, Arrays, Layout

FULL = Layout(tp=2, pp=2, sp=True)


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("layout", [ONE, FULL, Layout(dp=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learning_rate_0_leaves_every_bit(pool: Pool, layout: Layout, dtype: str) -> None:
    before, after = pool.run(layout.world_size, "dist.jobs_policy:still", layout, dtype)[0]
    assert before
    assert_same(after, before)


@pytest.mark.parametrize("layout", [ONE, FULL, Layout(dp=2)], ids=str)
def test_weight_decay_shrinks_matrices_and_leaves_norm_weights(pool: Pool, layout: Layout) -> None:
    before, after = pool.run(layout.world_size, "dist.jobs_policy:decay_alone", layout, 0.1, 0.5)[0]
    for name, tensor in before.items():
        shrunk = tensor if tensor.ndim == 1 else tensor * (1 - 0.1 * 0.5)
        np.testing.assert_allclose(after[name], shrunk, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", [ONE, FULL, Layout(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_of_the_first_update_is_exactly_1(pool: Pool, layout: Layout, dtype: str) -> None:
    for first, second in pool.run(layout.world_size, "dist.jobs_policy:first_update", layout, dtype):
        assert first["train/ratio_deviation_max"] == 0.0
        assert first["train/ratio_mean"] == first["train/ratio_max"] == 1.0
        assert first["train/ppo_kl"] == 0.0
        assert second["train/ratio_deviation_max"] > 0.0


@pytest.mark.parametrize("layout", [ONE, FULL, Layout(dp=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_update_needs_no_old_log_probs(pool: Pool, layout: Layout, dtype: str) -> None:
    job = "dist.jobs_policy:first_gradients"
    with_pass, without = (pool.run(layout.world_size, job, layout, dtype, on)[0] for on in (False, True))
    assert any(gradient.any() for gradient in with_pass.values())
    assert_same(without, with_pass)


def poisoned(pool: Pool, layout: Layout, poison: str, folder: Path) -> list[Skipped]:
    return pool.run(layout.world_size, "dist.jobs_policy:poisoned", layout, poison, str(folder))


@pytest.mark.parametrize(
    ("layout", "poison"),
    [(ONE, "weight"), (FULL, "weight"), (ONE, "advantage"), (Layout(dp=2), "advantage"), (Layout(dp=2), "infinity")],
    ids=str,
)
def test_a_non_finite_update_is_skipped_and_forgotten(pool: Pool, layout: Layout, poison: str, tmp_path: Path) -> None:
    ranks = poisoned(pool, layout, poison, tmp_path)
    for one in ranks:
        assert one.report.skipped
        assert not (math.isfinite(one.report.grad_norm) and math.isfinite(one.report.metrics["train/loss"]))
        assert one.version == 0
    main = ranks[0]
    assert_same(main.after, main.before)
    # Nothing of it is left in the optimizer either.
    assert_same(main.healed, pool.run(layout.world_size, "dist.jobs_policy:one_good_update", layout)[0])


def test_the_guard_names_the_bad_weight_keeps_the_batch_and_gives_up(pool: Pool, tmp_path: Path) -> None:
    (one,) = poisoned(pool, ONE, "weight", tmp_path)
    path = tmp_path / "step_1_rank_0.pt"
    assert one.warning == (
        "step 1: loss nan, gradient norm nan; update skipped."
        f" First bad tensor: weight decoder.layers.0.mlp.linear_fc2.weight. Batch saved to {path}"
    )
    assert one.error.startswith("step 2: loss nan, gradient norm nan; update skipped.")
    assert one.error.endswith("That were 2 in a row, more than health.max_nonfinite_steps = 1")
    assert one.dumps == ["step_1_rank_0.pt", "step_2_rank_0.pt"]
    (dumped,) = pool.run(1, "dist.jobs_policy:load_dump", str(path))
    (length,) = dumped[0]["token_ids"]
    assert dumped[0]["advantages"] == dumped[0]["old_logprobs"] == (length,)
    assert max(micro_batch["max_seqlen"] for micro_batch in dumped) == 42


def test_ranks_that_hold_no_bad_weight_say_so_or_name_a_gradient(pool: Pool, tmp_path: Path) -> None:
    ranks = poisoned(pool, FULL, "weight", tmp_path)
    assert "weight decoder.layers.0.mlp.linear_fc2.weight" in ranks[0].warning
    assert all("weight decoder" not in one.warning for one in ranks[2:])
    assert all(one.error.endswith("health.max_nonfinite_steps = 1") for one in ranks)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, dp=2), Layout(tp=2, dp=2)], ids=str)
def test_a_replica_without_a_sample_takes_part_and_adds_nothing(pool: Pool, layout: Layout) -> None:
    ((_, wanted, right),) = pool.run(1, "dist.jobs_policy:one_sample", ONE)
    ranks = pool.run(layout.world_size, "dist.jobs_policy:one_sample", layout)
    assert {trained for trained, _, _ in ranks} == {0, 1}
    for _, report, _ in ranks:
        assert report.metrics == pytest.approx(wanted.metrics, rel=1e-5)
        assert report.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    for name, gradient in ranks[0][2].items():
        assert np.linalg.norm(gradient - right[name]) <= 1e-5 * np.linalg.norm(right[name]), name
