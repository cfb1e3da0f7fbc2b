"""SIGTERM and SIGUSR1: the run saves at its step's end and goes on later; and one run a folder."""

from __future__ import annotations

from signal import SIGTERM, SIGUSR1

import pytest

from e2e.runs import Bench
from e2e.test_runs import assert_equal
from megatron_klear.report.samples import read_samples

START = {"model.load": None, "model.random_init": True, "rollout.num_rollout": 4, "checkpoint.resume": "auto"}


@pytest.fixture(scope="module")
def unbroken(bench: Bench) -> Bench:
    """With the run `unbroken`: 4 steps on two ranks that nobody disturbs."""
    bench.succeed("rl", bench.recipe("rl", "unbroken", START), world_size=2)
    return bench


@pytest.mark.parametrize(
    ("signals", "name"),
    [
        ({0: [SIGTERM]}, "SIGTERM"),
        ({1: [SIGTERM]}, "SIGTERM"),
        ({1: [SIGUSR1]}, "SIGUSR1"),
        # As from a launcher that sends one to the group, passes on its own, and loses patience.
        ({0: [SIGTERM, SIGTERM], 1: [SIGTERM, SIGTERM, SIGTERM]}, "SIGTERM"),
    ],
    ids=["TERM to rank 0", "TERM to rank 1", "USR1 to rank 1", "many"],
)
def test_a_signal_to_one_rank_saves_and_ends_all(
    unbroken: Bench, signals: dict[int, list[int]], name: str, request: pytest.FixtureRequest
) -> None:
    output = f"stopped_{request.node.callspec.id.replace(' ', '_')}"
    recipe = unbroken.recipe("rl", output, START)
    ranks = unbroken.pool.run(2, "e2e.jobs_signals:signalled", ["rl", str(recipe)], signals, 2)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert f"stopped by {name} after step 2; go on with checkpoint.resume=true" in ranks[0].out
    assert "stopped by" not in ranks[1].out
    checkpoints = unbroken.folder / output / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [line["step"] for line in unbroken.metrics(output)] == [1, 2]
    assert not (unbroken.folder / output / "hf").exists()
    # The same words again: now they go on.
    unbroken.succeed("rl", recipe, world_size=2)
    assert unbroken.metrics(output) == unbroken.metrics("unbroken")
    assert read_samples(unbroken.folder / output) == read_samples(unbroken.folder / "unbroken")
    assert_equal(unbroken.exported(output), unbroken.exported("unbroken"))


def test_a_signal_in_the_last_step_lets_the_run_come_to_its_end(unbroken: Bench) -> None:
    recipe = unbroken.recipe("rl", "signal_at_the_end", START)
    ranks = unbroken.pool.run(2, "e2e.jobs_signals:signalled", ["rl", str(recipe)], {1: [SIGUSR1]}, 4)
    assert [rank.code for rank in ranks] == [0, 0] and "stopped by" not in ranks[0].out
    assert unbroken.metrics("signal_at_the_end") == unbroken.metrics("unbroken")
    assert_equal(unbroken.exported("signal_at_the_end"), unbroken.exported("unbroken"))


def test_a_signal_while_a_save_is_in_flight_loses_neither(unbroken: Bench) -> None:
    changes = {"checkpoint.async_save": True, "checkpoint.save_interval": 1}
    recipe = unbroken.recipe("rl", "stopped_async", START | changes)
    ranks = unbroken.pool.run(2, "e2e.jobs_signals:signalled", ["rl", str(recipe)], {0: [SIGTERM]}, 2)
    assert [rank.code for rank in ranks] == [0, 0]
    names = sorted(path.name for path in (unbroken.folder / "stopped_async" / "checkpoints").glob("iter_*"))
    assert names == ["iter_0000001", "iter_0000002"]
    unbroken.succeed("rl", recipe, world_size=2)
    assert unbroken.metrics("stopped_async") == unbroken.metrics("unbroken")
    assert_equal(unbroken.exported("stopped_async"), unbroken.exported("unbroken"))


def test_two_runs_in_one_folder(bench: Bench) -> None:
    bench.succeed("rl", bench.recipe("rl", "alone", START))
    recipe = bench.recipe("rl", "met", START)
    (met,) = bench.pool.run(1, "e2e.jobs_signals:meet", str(recipe), str(bench.folder / "met"))
    assert met.second == 2
    told = f"{bench.folder / 'met'} is in use by process {met.holder} on "
    assert told in met.said and "expected one run a folder: wait for it, stop it" in met.said
    # The first did not notice.
    assert met.first == 0
    assert bench.metrics("met") == bench.metrics("alone")
    assert_equal(bench.exported("met"), bench.exported("alone"))


def test_the_same_words_start_go_on_and_find_nothing_left_to_do(bench: Bench) -> None:
    recipe = bench.recipe("rl", "again", START | {"rollout.num_rollout": 1})
    for _ in range(2):
        bench.succeed("rl", recipe)
        assert [line["step"] for line in bench.metrics("again")] == [1]
    bench.succeed("rl", recipe, "rollout.num_rollout=2")
    assert [line["step"] for line in bench.metrics("again")] == [1, 2]
