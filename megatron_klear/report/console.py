"""A run on the terminal: one aligned line a step, and plain text tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_klear.types import SyncReport

SHORT_NAMES = {
    "rollout/response_len_mean": "len",
    "train/train_rollout_logprob_abs_diff": "lp_diff",
    "train/clip_fraction_low": "clip_low",
    "train/clip_fraction_high": "clip_high",
    "perf/tokens_per_s": "tok/s",
}


def step_line(step: int, total: int, metrics: Mapping[str, float], *, keys: Sequence[str]) -> str:
    """One line of a step: `step 12/40  reward   0.412  len    38.1    1.92 s`.

    `keys` are metric names in the order to show; one without a value shows `-`, so that the lines stay aligned.
    """
    return "  ".join([f"step {step:>{len(str(total))}}/{total}", *(_field(key, metrics.get(key)) for key in keys)])


def push_line(report: SyncReport) -> str:
    """One line of a push of weights to servers, with those that were taken out and why."""
    rate = report.num_bytes / max(report.seconds, 1e-9)
    line = (
        f"weights {report.version}: {report.num_bytes / 1e6:.1f} MB in {report.seconds:.2f} s ({rate / 1e6:.1f} MB/s)"
    )
    return "\n".join([line, *(f"  {name} is taken out: {reason}" for name, reason in report.failed.items())])


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Plain text table; columns in order of first appearance, numbers to the right. No rows give an empty text."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if not columns:
        return ""
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    numeric = [all(_is_number(row.get(column, 0)) for row in rows) for column in columns]

    def render(line: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([render(columns), "  ".join("-" * width for width in widths), *map(render, cells)])


def format_number(value: float) -> str:
    """Four significant digits, at most nine characters: 0.4123, 38.10, 1234, 1.234e-06, nan."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    decimals = max(0, min(4, 3 - math.floor(math.log10(abs(value)))))
    return f"{value:.{decimals}f}"


def _field(key: str, value: float | None) -> str:
    label = SHORT_NAMES.get(key, key.rsplit("/", 1)[-1])
    if key.startswith("perf/") and label.endswith("_time"):
        seconds = f"{'-' if value is None else f'{value:.2f}':>6} s"
        return seconds if key == "perf/step_time" else f"{label.removesuffix('_time')} {seconds}"
    return f"{label} {'-' if value is None else format_number(value):>7}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return format_number(value)
    return " ".join(str(value).split())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
