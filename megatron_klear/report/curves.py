"""Training curves as small multiples: one panel a question, one colour a run."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megatron_klear.errors import DataError
from megatron_klear.report import theme

Runs = Mapping[str, Sequence[Mapping[str, Any]]]

NUM_COLUMNS = 3
PIXELS_PER_INCH = 100
DASHES = ("-", (0, (2, 1.5)), (0, (6, 2)))


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. Several metrics share it where they answer one question; they differ by dashes, runs by colour."""

    title: str
    metrics: tuple[str, ...]
    style: Literal["line", "smooth", "points"] = "line"
    from_zero: bool = False

    @property
    def lines(self) -> list[tuple[str, Any]]:
        """Each metric with its dashes; there are never more metrics than dash styles."""
        assert len(self.metrics) <= len(DASHES)
        return list(zip(self.metrics, DASHES[: len(self.metrics)], strict=True))


PANELS = (
    Panel("Loss", ("train/loss",)),
    Panel("Mean reward", ("rollout/reward",), "smooth"),
    Panel("Held-out accuracy", ("eval/accuracy",), "points"),
    Panel("Response length, tokens", ("rollout/response_len_mean",), from_zero=True),
    Panel("Gradient norm", ("train/grad_norm",), from_zero=True),
    Panel("Clipped tokens, share", ("train/clip_fraction_high", "train/clip_fraction_low"), from_zero=True),
    Panel("|trainer - engine| log-prob", ("train/train_rollout_logprob_abs_diff",), from_zero=True),
    Panel("Entropy, nats", ("train/entropy",), from_zero=True),
    Panel("Seconds a step", ("perf/step_time",), from_zero=True),
)


@dataclass(frozen=True, slots=True)
class Series:
    """A metric of a run: steps and values, [n] each; values that are not finite are NaN (a gap in the line)."""

    steps: np.ndarray
    values: np.ndarray


def series(records: Sequence[Mapping[str, Any]], metric: str) -> Series | None:
    """The points of a metric in order of steps; None if no record has a finite one."""
    points = sorted((record["step"], float(record[metric])) for record in records if metric in record)
    values = np.array([value if math.isfinite(value) else math.nan for _, value in points])
    if not np.isfinite(values).any():
        return None
    return Series(np.array([step for step, _ in points]), values)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` points (odd), fewer at the ends; gaps are left out of the mean. [n] -> [n]."""
    half = window // 2
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    known = np.isfinite(windows)
    counts = known.sum(axis=1)
    means = np.where(known, windows, 0.0).sum(axis=1) / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan)


def plot_curves(runs: Runs, path: str | Path) -> Path:
    """Draw the panels that have data as one PNG, 1200 pixels wide. Raises `DataError` if none has."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_style()):
        _figure(runs).savefig(path, format="png", dpi=PIXELS_PER_INCH)
    return path


def curves_svg(runs: Runs) -> str:
    """The same panels as an `<svg>` element whose colours are the page's CSS variables."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**_style(), "svg.fonttype": "none", "svg.hashsalt": "curves"}):
        _figure(runs).savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    return theme.use_variables(text[text.index("<svg") :])


def _figure(runs: Runs) -> Figure:
    panels = [panel for panel in PANELS if any(series(r, m) for r in runs.values() for m in panel.metrics)]
    if not panels:
        known = ", ".join(metric for panel in PANELS for metric in panel.metrics)
        raise DataError(
            f"nothing to plot in {', '.join(runs) or 'no run'}: expected at least one finite value of {known}"
        )
    columns = min(NUM_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(12, 0.5 + 2.55 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for panel, axes in zip(panels, list(grid)[: len(panels)], strict=True):
        _draw(axes, panel, runs)
    for axes in list(grid)[len(panels) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=_colour(i), linewidth=2.2, label=name) for i, name in enumerate(runs)]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(6, len(handles)), frameon=False)
    return figure


def _draw(axes: Axes, panel: Panel, runs: Runs) -> None:
    drawn: set[str] = set()
    for number, records in enumerate(runs.values()):
        for metric, dashes in panel.lines:
            points = series(records, metric)
            if points is not None:
                _draw_series(axes, points, panel.style, colour=_colour(number), dashes=dashes)
                drawn.add(metric)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel("step", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(x=0.02, y=0.08)
    if panel.from_zero:
        axes.set_ylim(bottom=0.0)
    if len(panel.metrics) > 1:
        handles = [
            Line2D([], [], color=theme.MUTED.light, linestyle=dashes, label=metric.rsplit("_", 1)[-1])
            for metric, dashes in panel.lines
            if metric in drawn
        ]
        axes.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1.0, 0.98),
            ncols=2,
            frameon=False,
            handlelength=1.8,
            columnspacing=1.0,
        )


def _draw_series(axes: Axes, points: Series, style: str, *, colour: str, dashes: Any) -> None:
    if style == "points":
        axes.plot(points.steps, points.values, color=colour, linewidth=1.0, alpha=0.6)
        axes.plot(points.steps, points.values, color=colour, linestyle="none", marker="o", markersize=5)
        return
    window = 2 * (len(points.values) // 30) + 3
    if style == "smooth" and len(points.values) >= 10:
        axes.plot(points.steps, points.values, color=colour, linewidth=1.0, alpha=0.3)
        axes.plot(points.steps, smoothed(points.values, window), color=colour, linewidth=2.0)
        return
    # A line through one point is invisible: mark it.
    marker = "o" if len(points.values) == 1 else None
    axes.plot(points.steps, points.values, color=colour, linestyle=dashes, linewidth=1.5, marker=marker, markersize=4)


def _colour(number: int) -> str:
    return theme.SERIES[number % len(theme.SERIES)].light


def _style() -> dict[Any, Any]:
    ink, muted, grid = theme.INK.light, theme.MUTED.light, theme.GRID.light
    return {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": ink,
        "figure.facecolor": theme.SURFACE.light,
        "savefig.facecolor": theme.SURFACE.light,
        "axes.facecolor": theme.SURFACE.light,
        "axes.edgecolor": muted,
        "axes.labelcolor": muted,
        "axes.labelsize": 8.5,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlecolor": ink,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-4, 6),
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 9.5,
    }
