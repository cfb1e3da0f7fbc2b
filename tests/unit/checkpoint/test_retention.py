"""Which checkpoints stay."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_checkpoints import make_manifest, save
from megatron_klear.checkpoint.folder import saved_steps, step_folder, write_tracker
from megatron_klear.checkpoint.manifest import MANIFEST, write_manifest
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.errors import CheckpointError

METRIC = "eval/accuracy"

values = st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(-1e6, 1e6)
checkpoints = st.dictionaries(st.integers(0, 60), values, max_size=8)
rules = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 20),
    keep_best=st.none() | st.integers(1, 3),
    keep_best_mode=st.sampled_from(["max", "min"]),
)


def write_bare(folder: Path, found: dict[int, float | None]) -> None:
    """Manifests alone: nothing else decides."""
    for step, value in found.items():
        path = step_folder(folder, step)
        path.mkdir()
        write_manifest(path, make_manifest(path, step, {} if value is None else {METRIC: value}))


def best_of(found: dict[int, float | None], count: int, mode: Literal["max", "min"]) -> set[int]:
    """One after the other: whoever is beaten by none of the rest."""
    rest = {step: value for step, value in found.items() if value is not None}
    best: set[int] = set()
    while rest and len(best) < count:
        extreme = max(rest.values()) if mode == "max" else min(rest.values())
        step = min(step for step, value in rest.items() if value == extreme)
        best.add(step)
        del rest[step]
    return best


@settings(max_examples=60, deadline=None)
@given(found=checkpoints, rule=rules, data=st.data())
def test_what_stays_is_what_a_rule_names(found: dict[int, float | None], rule: Retention, data: st.DataObject) -> None:
    steps = sorted(found)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bare(folder, found)
        latest = data.draw(st.sampled_from(steps)) if steps else 0
        write_tracker(folder, latest)
        judged = {step: value for step, value in found.items() if step <= latest}
        if rule.keep_best is not None and judged and set(judged.values()) == {None}:
            with pytest.raises(
                CheckpointError, match=r"holds the metric 'eval/accuracy', so .*; metrics they hold: none"
            ):
                rule.apply(folder)
            assert saved_steps(folder) == steps
            return
        deleted = rule.apply(folder)
        left = saved_steps(folder)
    assert rule.keep_last is not None
    wanted = set(sorted(judged)[-rule.keep_last :]) | {step for step in steps if step > latest}
    if rule.keep_every is not None:
        wanted |= {step for step in judged if step % rule.keep_every == 0}
    if rule.keep_best is not None:
        wanted |= best_of(judged, rule.keep_best, rule.keep_best_mode)
    assert set(left) == wanted
    assert sorted([*left, *deleted]) == steps
    assert not steps or latest in left


def test_without_keep_last_all_stay(tmp_path: Path) -> None:
    write_bare(tmp_path, {5: 0.5, 10: 0.1, 15: None})
    write_tracker(tmp_path, 15)
    assert Retention().apply(tmp_path) == []
    assert Retention(keep_every=10, keep_best=1).kept(tmp_path, [5, 10, 15]) == {5, 10, 15}


def test_the_trackers_own_stays_whatever_the_rule_says(tmp_path: Path) -> None:
    write_bare(tmp_path, {5: 0.5, 10: 0.1, 15: 0.1})
    write_tracker(tmp_path, 10)
    assert Retention(keep_last=1).apply(tmp_path) == [5]
    assert saved_steps(tmp_path) == [10, 15]


def test_of_equals_the_earlier_is_better(tmp_path: Path) -> None:
    write_bare(tmp_path, {5: 0.5, 10: 0.7, 15: 0.7, 20: 0.1})
    assert Retention(keep_last=1, keep_best=1).kept(tmp_path, [5, 10, 15, 20]) == {10, 20}
    assert Retention(keep_last=1, keep_best=2, keep_best_mode="min").kept(tmp_path, [5, 10, 15, 20]) == {5, 20}
    assert Retention(keep_last=1, keep_best=9).kept(tmp_path, [5, 10, 15, 20]) == {5, 10, 15, 20}


def test_another_metric_may_decide(tmp_path: Path) -> None:
    for step, loss in ((5, 0.1), (10, 0.9), (15, math.pi)):
        save(tmp_path, step, metrics={"train/loss": loss, METRIC: loss})
    rule = Retention(keep_last=1, keep_best=1, keep_best_metric="train/loss", keep_best_mode="min")
    assert rule.apply(tmp_path) == [10]
    # A name that is spelled wrongly must not cost the best.
    with pytest.raises(
        CheckpointError, match=r"holds the metric 'los', so .*; metrics they hold: eval/accuracy, train/l"
    ):
        Retention(keep_last=1, keep_best=1, keep_best_metric="los").apply(tmp_path)
    assert saved_steps(tmp_path) == [5, 15]


def test_an_unreadable_manifest_stops_it_before_anything_is_deleted(tmp_path: Path) -> None:
    write_bare(tmp_path, {5: 0.5, 10: 0.1, 15: None})
    write_tracker(tmp_path, 15)
    (step_folder(tmp_path, 10) / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"iter_0000010/manifest.json cannot be read"):
        Retention(keep_last=1, keep_best=1).apply(tmp_path)
    assert saved_steps(tmp_path) == [5, 10, 15]
    assert Retention(keep_last=1).apply(tmp_path) == [5, 10]
