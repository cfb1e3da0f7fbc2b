from __future__ import annotations

from pathlib import Path

from e2e.soak import soak


def test_servers_that_are_killed_cost_no_sample(tmp_path: Path) -> None:
    report = soak(steps=5, kills=3, seed=1, folder=tmp_path)
    assert (report.killed, report.restarted, report.lost, report.doubled, report.faults) == (3, 3, 0, 0, []), report
    assert report.requests == 5 * 6 * 4 and report.tokens == report.requests * 40
