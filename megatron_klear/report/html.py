"""The report of one or several runs: one HTML file that needs nothing else, and `megatron-klear report`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_klear.errors import ConfigError, DataError
from megatron_klear.report.console import format_number, format_table
from megatron_klear.report.curves import curves_svg, plot_curves, series
from megatron_klear.report.measures import Scales
from megatron_klear.report.record import METRICS_FILE, read_metrics
from megatron_klear.report.samples import StepSample, read_samples
from megatron_klear.report.theme import style_sheet
from megatron_klear.report.viewer import choose_samples, render_samples, render_switch, switch_rules

MAX_SAMPLES = 40
NUM_RECENT_SAMPLES = 1000
PHASES = {
    "perf/rollout_time": "sample responses",
    "perf/train_time": "train",
    "perf/update_weights_time": "hand weights to the engine",
}


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run folder holds. `recipe` is the text of recipe.yaml, empty if there is none."""

    name: str
    folder: Path
    metrics: list[dict[str, Any]]
    samples: list[StepSample]
    recipe: str


def build_report(
    run_dirs: Mapping[str, Path], out_dir: Path, *, title: str, accuracy_table: Sequence[Mapping[str, str]] = ()
) -> Path:
    """Write curves.png and report.html into `out_dir` and return the latter's path.

    `run_dirs` maps the name shown to a run's output_dir; without `accuracy_table` the summary comes from eval/accuracy.
    Raises `DataError` for a folder that is no run, `ConfigError` if `out_dir` cannot be written.
    """
    runs = [_load(name, Path(folder)) for name, folder in run_dirs.items()]
    by_name = {run.name: run.metrics for run in runs}
    page = _page(runs, title=title, table=list(accuracy_table) or accuracy_rows(by_name), curves=curves_svg(by_name))
    out_dir = Path(out_dir)
    path = out_dir / "report.html"
    try:
        plot_curves(by_name, out_dir / "curves.png")
        # A response may end in half a character (a lone surrogate), which UTF-8 cannot hold.
        path.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise ConfigError(
            f"cannot write the report into {out_dir}: {error.strerror or error}; give a writable folder with --out"
        ) from error
    return path


def accuracy_rows(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """First, last and best eval/accuracy of each run that evaluated, for a summary that nobody handed in."""
    rows: list[dict[str, str]] = []
    for name, records in runs.items():
        points = series(records, "eval/accuracy")
        if points is None:
            continue
        known = [(int(s), float(v)) for s, v in zip(points.steps, points.values, strict=True) if v == v]
        marks = {"first": known[0], "last": known[-1], "best": max(known, key=lambda point: point[1])}
        rows.append({"run": name, **{key: f"{100 * v:.1f}% (step {s})" for key, (s, v) in marks.items()}})
    return rows


def main(argv: Sequence[str]) -> int:
    """`megatron-klear report RUN_DIR [RUN_DIR ...] [--out DIR] [--title T]`."""
    parser = argparse.ArgumentParser(
        prog="megatron-klear report", description="Curves, timings and rollouts of runs as one HTML file."
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", type=Path, help="output_dir of a run")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write; the first RUN_DIR if not given")
    parser.add_argument("--title", metavar="T", help="heading of the page; the names of the runs if not given")
    args = parser.parse_args(argv)
    runs = _named(args.run_dirs)
    path = build_report(runs, args.out or args.run_dirs[0], title=args.title or ", ".join(runs))
    if table := format_table(accuracy_rows({name: read_metrics(folder) for name, folder in runs.items()})):
        print(table)
    print(f"report: {path}")
    return 0


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """A short name a run: the folder's own, or the whole path where two folders are called alike."""
    count = Counter(folder.resolve().name for folder in folders)
    names = [str(f) if count[f.resolve().name] > 1 else f.resolve().name for f in folders]
    if len(set(names)) < len(names):
        raise DataError(f"the same run folder is given twice: {', '.join(map(str, folders))}; name each one once")
    return dict(zip(names, folders, strict=True))


def _load(name: str, folder: Path) -> _Run:
    if not (folder / METRICS_FILE).is_file():
        found = "which does not exist" if not folder.exists() else f"which holds no {METRICS_FILE}"
        raise DataError(
            f"run {name}: expected the output_dir of a run (recipe.yaml, {METRICS_FILE}, samples.jsonl),"
            f" got {folder}, {found}; a run writes its first line after its first step"
        )
    metrics = read_metrics(folder)
    if not metrics:
        raise DataError(f"run {name}: {folder / METRICS_FILE} holds no line yet; expected a run of at least one step")
    recipe = folder / "recipe.yaml"
    return _Run(
        name=name,
        folder=folder,
        metrics=metrics,
        samples=read_samples(folder, last=NUM_RECENT_SAMPLES),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
    )


def _page(runs: Sequence[_Run], *, title: str, table: Sequence[Mapping[str, str]], curves: str) -> str:
    summary = f'<h2>Accuracy</h2><div class="card">{_table(table)}</div>' if table else ""
    timings = "".join(_timings(run) for run in runs)
    rollouts = _rollouts([run for run in runs if run.samples])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style_sheet()}{switch_rules()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="muted">written by megatron-klear report, {time.strftime("%Y-%m-%d %H:%M:%S %Z")}</p>
{summary}
<h2>Runs</h2>
<div class="card">{_table([_facts(run) for run in runs])}</div>
{"".join(_recipe(run) for run in runs)}
<h2>Curves</h2>
<div class="card curves">{curves}</div>
<p class="muted">Mean reward: faint is each step, bold its mean over neighbouring steps.</p>
{f"<h2>Where the time goes</h2>{timings}" if timings else ""}
{rollouts}
</main>
</body>
</html>
"""


def _facts(run: _Run) -> dict[str, str]:
    """One line about a run."""
    times = [float(record["time"]) for record in run.metrics if "time" in record]
    steps = [record["step"] for record in run.metrics]
    facts = {
        "run": run.name,
        "last step": str(max(steps)),
        "wall time": _duration(max(times) - min(times)) if times else "",
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(min(times))) if times else "",
    }
    for label, metric in (("first reward", "rollout/reward"), ("first loss", "train/loss")):
        points = series(run.metrics, metric)
        if points is not None:
            facts[label] = format_number(float(points.values[0]))
            facts[label.replace("first", "last")] = format_number(float(points.values[-1]))
    if dropped := _dropped(run.metrics):
        facts["samples left out"] = dropped
    return facts


def _dropped(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Samples left out over the whole run, by reason."""
    prefix = "rollout/dropped/"
    total: Counter[str] = Counter()
    for record in metrics:
        total.update({key.removeprefix(prefix): int(v) for key, v in record.items() if key.startswith(prefix)})
    return ", ".join(f"{reason} {count}" for reason, count in total.most_common() if count)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _recipe(run: _Run) -> str:
    name = escape(run.name)
    if not run.recipe:
        return f'<p class="muted">{name}: no recipe.yaml in {escape(str(run.folder))}</p>'
    return f"<details><summary>Recipe of {name}</summary><pre>{escape(run.recipe)}</pre></details>"


def _timings(run: _Run) -> str:
    """Mean and largest seconds of each phase, and its share of the step."""
    steps = _known(run, "perf/step_time")
    if not steps:
        return ""
    mean_step = statistics.fmean(steps)
    rows = []
    rest = mean_step
    for metric, label in PHASES.items():
        if known := _known(run, metric):
            # A phase that not every step has weighs as much as it adds to the mean step.
            mean = sum(known) / len(steps)
            rest -= mean
            rows.append((label, mean, f"{max(known):.2f}"))
    if rows and rest > 0:
        rows.append(("everything else", rest, ""))
    rows.append(("whole step", mean_step, f"{max(steps):.2f}"))
    lines = "".join(_timing_row(label, mean, largest, mean / max(mean_step, 1e-9)) for label, mean, largest in rows)
    speed = _known(run, "perf/tokens_per_s")
    note = f"<p>{format_number(statistics.median(speed))} tokens/s (median)</p>" if speed else ""
    head = '<tr><th>phase</th><th class="number">mean s</th><th class="number">largest s</th><th>share</th></tr>'
    return f'<h3>{escape(run.name)}</h3><div class="card"><table>{head}{lines}</table>{note}</div>'


def _known(run: _Run, metric: str) -> list[float]:
    """The finite values of a metric."""
    points = series(run.metrics, metric)
    return [] if points is None else [float(value) for value in points.values if value == value]


def _timing_row(label: str, mean: float, largest: str, share: float) -> str:
    bar = f'<span class="share" style="width:{min(share, 1.0) * 160:.0f}px"></span>{100 * share:.0f}%'
    return (
        f'<tr><td>{escape(label)}</td><td class="number">{mean:.2f}</td><td class="number">{largest}</td>'
        f"<td>{bar}</td></tr>"
    )


def _rollouts(runs: Sequence[_Run]) -> str:
    """The samples of every run below one switch, on common scales. The order of the siblings is the switch's."""
    if not runs:
        return ""
    most = max(2, MAX_SAMPLES // len(runs))
    chosen = [(run, choose_samples(run.samples, most=most)) for run in runs]
    scales = Scales.of(sample for _, samples in chosen for _, sample in samples)
    blocks = [
        f'<h3>{escape(run.name)}</h3><p class="muted">{len(samples)} of the {len(run.samples)} newest recorded samples,'
        f" last steps first</p>{render_samples(samples, scales)}"
        for run, samples in chosen
    ]
    return f'<h2>Rollouts</h2>{render_switch(scales)}<div class="rollouts">{"".join(blocks)}</div>'


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    cells = ("".join(f"<td>{escape(str(row.get(column, '')))}</td>" for column in columns) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><tr>{head}</tr>{body}</table>"
