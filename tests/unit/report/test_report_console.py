from __future__ import annotations

import math

import pytest

from megatron_klear.report.console import format_number, format_table, step_line

KEYS = ["rollout/reward", "train/loss", "rollout/response_len_mean", "perf/rollout_time", "perf/step_time"]


def test_step_line_shows_the_keys_in_order() -> None:
    metrics = {
        "perf/step_time": 1.921,
        "rollout/reward": 0.41237,
        "train/loss": -0.0123,
        "rollout/response_len_mean": 38.1,
        "perf/rollout_time": 1.5,
        "train/lr": 1e-6,
    }
    line = step_line(12, 40, metrics, keys=KEYS)
    assert line == "step 12/40  reward  0.4124  loss -0.0123  len   38.10  rollout   1.50 s    1.92 s"


def test_step_lines_stay_aligned_when_a_value_is_missing() -> None:
    full = step_line(100, 120, dict.fromkeys(KEYS, 1.5), keys=KEYS)
    empty = step_line(7, 120, {}, keys=KEYS)
    assert len(full) == len(empty)
    assert empty.startswith("step   7/120  reward       -  loss")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (0.41237, "0.4124"),
        (38.123, "38.12"),
        (1234.5678, "1235"),
        (0.0123, "0.0123"),
        (1e-6, "1.000e-06"),
        (-2.5e7, "-2.500e+07"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_table_aligns_numbers_right_and_text_left() -> None:
    table = format_table([{"run": "sft", "accuracy": 0.5}, {"run": "sft then rl", "accuracy": 12, "note": "a\nb"}])
    assert table.splitlines() == [
        "run          accuracy  note",
        "-----------  --------  ----",
        "sft            0.5000",
        "sft then rl        12  a b",
    ]


def test_empty_table_is_empty() -> None:
    assert format_table([]) == ""
