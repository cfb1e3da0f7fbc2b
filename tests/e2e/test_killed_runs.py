"""A run killed again and again ends as the run that nobody killed; `kill_campaign.py` does it at length."""

from __future__ import annotations

import shutil

import pytest

from dist.pool import Pool
from e2e.jobs_killed import MUTANTS
from e2e.kill_campaign import Options, Report


def campaign(pool: Pool, options: Options) -> Report:
    (report,) = pool.run(1, "e2e.kill_campaign:job", options, timeout=options.max_seconds + 60)
    shutil.rmtree(report.folder, ignore_errors=True)
    return report


@pytest.mark.parametrize(
    "options",
    [
        Options(
            kills=4,
            steps=8,
            seed=3,
            phases=("save", "write", "rename", "tracker", "prune", "metrics"),
            random_times=0.25,
            words=("parallel.use_distributed_optimizer=false",),
        ),
        pytest.param(
            Options(kills=4, steps=8, seed=4, phases=("write", "rename", "tracker"), async_save=True),
            marks=pytest.mark.law,
        ),
    ],
    ids=["waiting", "in the background"],
)
def test_a_killed_run_ends_as_the_unbroken_one(pool: Pool, options: Options) -> None:
    report = campaign(pool, options)
    assert report.mismatches == [], str(report)
    assert report.kills == options.kills
    assert len(report.hits) > 2, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_campaign_finds_mistakes(pool: Pool, mutant: str) -> None:
    phases = ("save", "write", "metrics", "update")
    assert campaign(pool, Options(kills=12, steps=14, seed=5, phases=phases, mutant=mutant)).mismatches
