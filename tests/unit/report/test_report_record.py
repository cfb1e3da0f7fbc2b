from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_klear.errors import ConfigError, DataError, TrainingError
from megatron_klear.report.jsonl import read_jsonl
from megatron_klear.report.record import RunRecorder, read_metrics
from megatron_klear.report.samples import SampleRecord, read_samples
from megatron_klear.types import Piece

SAMPLE = SampleRecord(
    sample_id="7/0",
    prompt="1 + 1 = ?",
    response="it is 2",
    answer="2",
    reward=1.0,
    reason="equal",
    stop_reason="stop",
    tokens=("it", " is", " 2"),
    rollout_logprobs=(-0.1, -0.25, -1.5),
    current_logprobs=(-0.125, -0.5, -1.0),
    ratios=(0.5, 1.0, 1.75),
    cells=("clipped_low", "in_range", "clipped_high"),
    advantages=(0.5, 0.5, -0.25),
    pieces=(Piece(2, 3), Piece(1, 5, "b")),
)


def recorder(folder: Path, *, tensorboard: bool = False, resume_step: int | None = None) -> RunRecorder:
    return RunRecorder(folder, name="test", tensorboard=tensorboard, resume_step=resume_step)


def test_metrics_come_back_as_they_were_logged(tmp_path: Path) -> None:
    with recorder(tmp_path / "new" / "run") as run:
        run.log(1, {"train/loss": 0.1 + 0.2})
        run.log(1, {"eval/accuracy": 1})
    first, second = read_metrics(tmp_path / "new" / "run")
    assert first["step"] == 1 and first["train/loss"] == 0.1 + 0.2
    assert first["time"] > 1.6e9
    assert second["eval/accuracy"] == 1.0


def test_a_line_is_on_disk_before_the_next_is_written(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.log(1, {"train/loss": 1.0})
        assert len(read_metrics(tmp_path)) == 1


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.log(2, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (raw["a"], raw["b"], raw["c"]) == ("nan", "inf", "-inf")
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["a"]) and line["b"] == math.inf and line["c"] == -math.inf


def test_samples_come_back_as_they_were_logged(tmp_path: Path) -> None:
    failed = replace(SAMPLE, sample_id="7/1", reward=None, ratios=(math.inf, math.nan, 0.0))
    with recorder(tmp_path) as run:
        run.log_samples(4, [SAMPLE])
        run.log_samples(5, [failed])
    (step, sample), (_, other) = read_samples(tmp_path)
    assert (step, sample) == (4, SAMPLE)
    assert other.reward is None and other.ratios[0] == math.inf and math.isnan(other.ratios[1])


def test_half_a_character_can_be_recorded(tmp_path: Path) -> None:
    cut = replace(SAMPLE, response="\ud83d", tokens=("\ud83d", "\u2028", "\n"))
    with recorder(tmp_path) as run:
        run.log_samples(1, [cut])
    assert read_samples(tmp_path) == [(1, cut)]


def test_only_the_last_samples_are_read(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.log_samples(1, [replace(SAMPLE, sample_id=str(i)) for i in range(5)])
    assert [sample.sample_id for _, sample in read_samples(tmp_path, last=2)] == ["3", "4"]


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []


@pytest.mark.parametrize("torn", [b'{"step": 3, "tr', b"\x00\x00\x00", b'{"step": 3, "a": "\xe2\x82'])
def test_a_torn_last_line_is_left_out_and_counted(
    tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert "1 line left out" in caplog.text
    assert read_jsonl(path).num_torn == 1


def test_a_torn_sample_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recorder(tmp_path) as run:
        run.log_samples(1, [SAMPLE, SAMPLE])
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert read_samples(tmp_path) == [(1, SAMPLE)]
    assert "1 line left out" in caplog.text


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not valid JSON .* delete that line"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("line", ["[1, 2]", '{"loss": 1.0}', '{"step": "one"}'])
def test_a_line_without_a_step_is_an_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match='line 1: expected a JSON object with an integer "step", got'):
        read_metrics(tmp_path)


def test_missing_metrics_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist; expected a file of JSON lines"):
        read_metrics(tmp_path)


def test_a_line_that_is_no_rollout_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 6, "sample_id": "x"}\n')
    with pytest.raises(DataError, match=r"a line of step 6 is not a rollout as RunRecorder writes it"):
        read_samples(tmp_path)


def test_a_file_of_an_older_version_says_what_to_do(tmp_path: Path) -> None:
    old = {"sample_id": "x", "advantage": 1.0, "truncated": False, "weight_version": 4}
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 6, **old}) + "\n")
    with pytest.raises(
        DataError, match=r"samples\.jsonl: the line of step 6 .*older version.* rename or delete the file"
    ):
        read_samples(tmp_path)


def test_resume_cuts_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        for step in range(5):
            run.log(step, {"train/loss": float(step)})
            run.log_samples(step, [SAMPLE])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 2, "torn')
    with recorder(tmp_path, resume_step=2) as run:
        run.log(3, {"train/loss": 33.0})
        run.log_samples(3, [SAMPLE])
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 33.0]
    assert [step for step, _ in read_samples(tmp_path)] == [0, 1, 2, 3]
    assert list(tmp_path.glob("*.tmp")) == []


def test_resume_keeps_a_whole_last_line_without_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    with recorder(tmp_path, resume_step=1) as run:
        run.log(2, {})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_resume_before_the_first_line_is_fine(tmp_path: Path) -> None:
    with recorder(tmp_path, resume_step=0) as run:
        run.log(1, {})
    assert len(read_metrics(tmp_path)) == 1


def test_two_runs_are_not_mixed(tmp_path: Path) -> None:
    with recorder(tmp_path) as run:
        run.log(1, {})
    with pytest.raises(
        ConfigError, match=r"already holds metrics\.jsonl of another run.*checkpoint\.overwrite"
    ) as caught:
        recorder(tmp_path)
    assert caught.value.faults[0].key == "run.output_dir"
    assert len(read_metrics(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir .*file/run cannot be written .*expected a folder"):
        recorder(tmp_path / "file" / "run")


def test_a_full_disk_stops_the_run_and_names_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full to stand for a full disk")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with recorder(tmp_path) as run, pytest.raises(TrainingError, match=r"metrics\.jsonl: No space left .* make room"):
        run.log(1, {"train/loss": 1.0})


def test_tensorboard_sees_the_scalars(tmp_path: Path) -> None:
    with recorder(tmp_path, tensorboard=True) as run:
        run.log(1, {"train/loss": 0.5, "rollout/reward": math.nan})
        run.log(2, {"train/loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert math.isnan(events.Scalars("rollout/reward")[0].value)


def test_tensorboard_forgets_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    with recorder(tmp_path, tensorboard=True) as run:
        for step in (1, 2, 3):
            run.log(step, {"train/loss": float(step)})
    with recorder(tmp_path, tensorboard=True, resume_step=1) as run:
        run.log(2, {"train/loss": 22.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 22.0)]


def test_no_tensorboard_folder_unless_asked_for(tmp_path: Path) -> None:
    with recorder(tmp_path):
        pass
    assert not (tmp_path / "tensorboard").exists()


def test_wandb_that_is_not_installed_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"'proj' but the package wandb .*pip install megatron-klear\[wandb\]"):
        RunRecorder(tmp_path, name="x", tensorboard=False, wandb_project="proj")


FAKE_WANDB = """
class Run:
    def __init__(self, **options):
        self.id = options["id"] or "fresh"
        self.calls = [options]
    def define_metric(self, name, step_metric):
        self.calls.append((name, step_metric))
    def log(self, metrics):
        self.calls.append(metrics)
    def finish(self):
        self.calls.append("finished")
runs = []
def init(**options):
    runs.append(Run(**options))
    return runs[-1]
"""


def test_wandb_gets_the_metrics_and_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    for resume_step in (None, 1):
        with RunRecorder(out, name="n", tensorboard=False, wandb_project="p", resume_step=resume_step) as run:
            run.log(1 if resume_step is None else 2, {"train/loss": 0.5})
    first, second = sys.modules.pop("wandb").runs
    assert first.calls[0] == {"project": "p", "name": "n", "dir": str(out), "id": None, "resume": "allow"}
    assert first.calls[1:] == [("*", "step"), {"step": 1, "train/loss": 0.5}, "finished"]
    assert second.calls[0]["id"] == "fresh"


def test_a_sample_with_uneven_rows_is_an_error() -> None:
    with pytest.raises(DataError, match=r"sample 7/0: 3 tokens, .* 2 ratios, .*expected one entry a response token"):
        replace(SAMPLE, ratios=(1.0, 1.0))


def test_pieces_of_another_number_of_tokens_are_an_error() -> None:
    with pytest.raises(DataError, match=r"sample 7/0: 3 tokens, .* 3 advantages, pieces of 4 tokens; expected one"):
        replace(SAMPLE, pieces=(Piece(4, 3),))


def test_the_rows_of_an_update_are_there_all_or_none() -> None:
    fresh = replace(SAMPLE, current_logprobs=(), ratios=(), cells=(), advantages=())
    assert math.isnan(fresh.mean_advantage)
    with pytest.raises(DataError, match="3 tokens, 3 rollout_logprobs, 0 current_logprobs, 0 ratios"):
        replace(fresh, cells=SAMPLE.cells)


def test_versions_and_engines_of_a_sample() -> None:
    pieces = (Piece(1, 7, "b"), Piece(1, 3, "a"), Piece(1, 7, "b"))
    sample = replace(SAMPLE, pieces=pieces)
    assert sample.versions == (3, 7) and sample.engines == ("b", "a")
    assert sample.mean_advantage == 0.25 and not sample.is_truncated
    assert replace(SAMPLE, stop_reason="length").is_truncated


def test_a_sample_with_an_unknown_cell_is_an_error() -> None:
    with pytest.raises(DataError, match="unknown cell 'clipped'; expected one of in_range, clipped_low"):
        replace(SAMPLE, cells=("in_range", "clipped", "in_range"))


def test_report_loads_no_torch() -> None:
    modules = "record, samples, curves, html, viewer, measures, inspect, saved_rollout, console, jsonl, theme"
    code = f"import sys; from megatron_klear.report import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
