"""What a token can be coloured by, on the page and on the terminal: its numbers, their levels of colour, the legend."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from megatron_klear.report.console import format_number
from megatron_klear.report.samples import CELLS, SampleRecord
from megatron_klear.report.theme import PALETTES

# Fixed scales, so that the colours of two samples, steps and runs can be compared.
PROBABILITIES = (0.9, 0.5, 0.1, 0.01, 0.001)
RATIOS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
CELL_NAMES = {"in_range": "in range", "clipped_low": "clipped low", "clipped_high": "clipped high"}
NO_ENGINE = "(no name)"

Levels = list[int | None]


@dataclass(frozen=True, slots=True)
class Scales:
    """What the levels of several samples have in common: the engines' names, and how large advantages get."""

    engines: tuple[str, ...]
    largest_advantage: float

    @classmethod
    def of(cls, samples: Iterable[SampleRecord]) -> Self:
        """Scales for samples that are shown together."""
        engines: set[str] = set()
        largest = 0.0
        for sample in samples:
            engines.update(sample.engines)
            largest = max([largest, *(abs(value) for value in sample.advantages if math.isfinite(value))])
        return cls(tuple(sorted(engines)), largest)


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing to colour by.

    `values`: one a response token, or none at all where the sample lacks the measure. `levels`: their places in
    `PALETTES[palette]`, None for a value that is no number. `legend`: what the levels mean, from 0 on; more entries
    than the palette has colours go round it again. `letter` begins the CSS classes.
    """

    name: str
    title: str
    letter: str
    palette: str
    values: Callable[[SampleRecord], Sequence[int | float | str]]
    levels: Callable[[SampleRecord, Scales], Levels]
    legend: Callable[[Scales], tuple[str, ...]]

    def text(self, value: float | str) -> str:
        """A value as it is shown."""
        if isinstance(value, str):
            return CELL_NAMES.get(value, value) if self.name == "cell" else value or NO_ENGINE
        if isinstance(value, int) or not math.isfinite(value):
            return str(value)
        # Four decimals, so that a column of them is easy to compare.
        return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e4 else f"{value:.1e}"


def version_range(sample: SampleRecord) -> str:
    """Oldest and newest weights: `4-6`, `4` if they are the same, `none` without a token."""
    ends = sample.versions[:1] + sample.versions[1:][-1:]
    return "-".join(map(str, ends)) or "none"


def _versions(sample: SampleRecord) -> list[int]:
    return [piece.weight_version for piece in sample.pieces for _ in range(piece.num_tokens)]


def _version_levels(sample: SampleRecord, _: Scales) -> Levels:
    darkest = len(PALETTES["heat"]) - 1
    level = {version: min(age, darkest) for age, version in enumerate(reversed(sample.versions))}
    return [level[version] for version in _versions(sample)]


def _version_legend(_: Scales) -> tuple[str, ...]:
    later = tuple(f"{word} newest" for word in ("second", "third", "fourth", "fifth"))
    return ("newest of the sample's versions", *later, "older")


def _engines(sample: SampleRecord) -> list[str]:
    return [piece.engine for piece in sample.pieces for _ in range(piece.num_tokens)]


def _engine_levels(sample: SampleRecord, scales: Scales) -> Levels:
    level = {name: number % len(PALETTES["names"]) for number, name in enumerate(scales.engines)}
    return [level[name] for name in _engines(sample)]


def _logprob_levels(logprobs: Sequence[float]) -> Levels:
    edges = [-math.log(probability) for probability in PROBABILITIES]
    return [None if math.isnan(value) else bisect_left(edges, -value) for value in logprobs]


def _logprob_legend(_: Scales) -> tuple[str, ...]:
    return (*(f"p >= {probability}" for probability in PROBABILITIES), f"p < {PROBABILITIES[-1]}")


def _ratio_levels(sample: SampleRecord, _: Scales) -> Levels:
    return [None if math.isnan(value) else bisect_right(RATIOS, value) for value in sample.ratios]


def _ratio_legend(_: Scales) -> tuple[str, ...]:
    between = [f"{low} to {high}" for low, high in pairwise(RATIOS)]
    return (f"below {RATIOS[0]}", *between, f"{RATIOS[-1]} and more")


def _cell_levels(sample: SampleRecord, _: Scales) -> Levels:
    return [CELLS.index(cell) for cell in sample.cells]


def _advantage_levels(sample: SampleRecord, scales: Scales) -> Levels:
    return [_advantage_level(value, scales.largest_advantage) for value in sample.advantages]


def _advantage_level(value: float, largest: float) -> int | None:
    """Thirds of the largest advantage on either side of the middle, which is exactly 0."""
    if math.isnan(value):
        return None
    if value == 0:
        return 3
    share = min(1.0, abs(value) / largest) if largest else 1.0
    # A value on an edge must not be pushed over it by rounding.
    thirds = max(1, math.ceil(3 * share - 1e-9))
    return 3 + thirds if value > 0 else 3 - thirds


def _advantage_legend(scales: Scales) -> tuple[str, ...]:
    one, two, three = (format_number(scales.largest_advantage * thirds / 3) for thirds in (1, 2, 3))
    low = (f"-{three} to -{two}", f"-{two} to -{one}", f"-{one} to 0")
    return (*low, "0", f"0 to {one}", f"{one} to {two}", f"{two} to {three}")


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("version", "weight version", "v", "heat", _versions, _version_levels, _version_legend),
        Measure(
            "engine",
            "engine",
            "e",
            "names",
            _engines,
            _engine_levels,
            lambda scales: tuple(name or NO_ENGINE for name in scales.engines),
        ),
        Measure(
            "logprob",
            "rollout log-prob",
            "l",
            "heat",
            lambda sample: sample.rollout_logprobs,
            lambda sample, _: _logprob_levels(sample.rollout_logprobs),
            _logprob_legend,
        ),
        Measure(
            "current",
            "current log-prob",
            "u",
            "heat",
            lambda sample: sample.current_logprobs,
            lambda sample, _: _logprob_levels(sample.current_logprobs),
            _logprob_legend,
        ),
        Measure("ratio", "ratio", "r", "diverging", lambda sample: sample.ratios, _ratio_levels, _ratio_legend),
        Measure(
            "cell",
            "clip cell",
            "c",
            "clip",
            lambda sample: sample.cells,
            _cell_levels,
            lambda _: tuple(CELL_NAMES[cell] for cell in CELLS),
        ),
        Measure(
            "advantage",
            "advantage",
            "a",
            "diverging",
            lambda sample: sample.advantages,
            _advantage_levels,
            _advantage_legend,
        ),
    )
}
