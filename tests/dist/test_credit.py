"""Advantages that need a critic's values or a reference's log-probs, on every way to cut a step."""

from __future__ import annotations

import numpy as np
import pytest

from dist.jobs_credit import CRITIC, KL, Credited
from dist.jobs_law import law_samples
from dist.pool import Pool
from dist.world import ONE, Layout

LAYOUTS = [ONE, Layout(dp=2), Layout(pp=2), Layout(cp=2), Layout(pp=2, cp=2, dp=2)]
WHOLE, SMALL = 400, 48


def credited(pool: Pool, layout: Layout, job: str, *args: object) -> Credited:
    """What all ranks know together."""
    ranks: list[Credited] = pool.run(layout.world_size, f"dist.jobs_credit:{job}", layout, *args)
    return Credited(
        {name: row for one in ranks for name, row in one.advantages.items()},
        {name: row for one in ranks for name, row in one.returns.items()},
        ranks[0].shaped,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("with_kl", [False, True], ids=["rewards", "rewards less KL"])
def test_gae_is_the_same_on_every_layout(pool: Pool, layout: Layout, with_kl: bool) -> None:
    wanted = credited(pool, ONE, "gae", WHOLE, with_kl)
    found = credited(pool, layout, "gae", SMALL, with_kl)
    assert found.advantages.keys() == wanted.advantages.keys() == {f"s{i}" for i in range(14)}
    for name in wanted.advantages:
        np.testing.assert_allclose(found.advantages[name], wanted.advantages[name], rtol=1e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found.returns[name], wanted.returns[name], rtol=1e-6, atol=1e-6, err_msg=name)
    # Of mean 0 and variance 1 over the trained tokens of both updates.
    masks = {s.sample_id: np.array([*s.loss_mask[1:], 0], dtype=bool) for s in law_samples()}
    flat = np.concatenate([row[masks[name]] for name, row in found.advantages.items()])
    assert flat.mean() == pytest.approx(0, abs=1e-6) and flat.std() == pytest.approx(1, abs=1e-5)
    assert not any(row[~masks[name]].any() for name, row in found.advantages.items())


def test_gae_starts_from_the_reward_at_the_end(pool: Pool) -> None:
    """The return of the last token is the sample's reward; before it, the recursion."""
    found = credited(pool, Layout(dp=2), "gae", SMALL, False)
    for sample in law_samples():
        returns = found.returns[sample.sample_id]
        if sum(sample.loss_mask) == 0:
            assert not returns.any()
            continue
        assert returns[-2] == pytest.approx(sample.reward, rel=1e-6) and returns[-1] == 0
        assert not returns[:2].any() and returns[2:-1].all()
    charged = credited(pool, ONE, "gae", WHOLE, True)
    assert any(abs(charged.returns[name][-2] - row[-2]) > 0.01 for name, row in found.returns.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("overlong", [0.0, 0.5], ids=["", "overlong"])
def test_rewards_less_kl_are_the_same_on_every_layout(pool: Pool, layout: Layout, overlong: float) -> None:
    wanted = credited(pool, ONE, "penalised", WHOLE, overlong)
    found = credited(pool, layout, "penalised", SMALL, overlong)
    assert found.shaped.keys() == wanted.shaped.keys()
    for name, row in wanted.advantages.items():
        np.testing.assert_allclose(found.advantages[name], row, rtol=1e-6, atol=1e-6, err_msg=name)
        assert found.shaped[name] == pytest.approx(wanted.shaped[name], rel=1e-6)


def test_the_kl_penalty_is_taken_from_the_reward_that_is_left(pool: Pool) -> None:
    """Not from the whole reward: a sample that was too long pays for both."""
    plain, short = credited(pool, ONE, "penalised", WHOLE, 0.0), credited(pool, ONE, "penalised", WHOLE, 0.5)
    samples = law_samples()
    for i, sample in enumerate(samples):
        name = sample.sample_id
        before, after = plain.shaped[name], short.shaped[name]
        assert before is not None and after is not None and sample.reward is not None
        assert after == pytest.approx(before - (0.5 if i % 2 == 0 else 0.0), rel=1e-6)
        # Trained tokens cost; k3 is never negative.
        assert before < sample.reward if sum(sample.loss_mask) else before == sample.reward
    # Two different rewards give +-1, whichever they are.
    for a, b in zip(samples[::2], samples[1::2], strict=True):
        one, other = plain.shaped[a.sample_id], plain.shaped[b.sample_id]
        assert one is not None and other is not None
        if sum(a.loss_mask):
            assert plain.advantages[a.sample_id].sum() * (one - other) > 0
    assert KL.kl_coef > 0 and CRITIC.gamma < 1
