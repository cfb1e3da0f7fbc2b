"""Recorded rollouts: what a line of samples.jsonl holds, and reading it back. Loads at once: no third-party package."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_klear.errors import DataError
from megatron_klear.report.jsonl import read_jsonl
from megatron_klear.types import Piece, StopReason

SAMPLES_FILE = "samples.jsonl"
CELLS = ("in_range", "clipped_low", "clipped_high")
# Numbers of the engine come with the response; those of an update only once the sample was trained on.
UPDATE_ROWS = ("current_logprobs", "ratios", "cells", "advantages")
_NUMBER_ROWS = ("rollout_logprobs", "current_logprobs", "ratios", "advantages")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One rollout as the report shows it. The six rows hold one entry a response token.

    `tokens` are decoded one by one; `ratios` are exp(current - old log-prob), `cells` what the clip did (`CELLS`).
    `UPDATE_ROWS` are all empty where no update has seen the sample yet. `pieces` say which engine drew the tokens
    from which weights. `reward` is None where the reward machinery failed. Raises `DataError` for uneven rows, an
    unknown cell, or pieces that are not of as many tokens.
    """

    sample_id: str
    prompt: str
    response: str
    answer: str
    reward: float | None
    reason: str
    stop_reason: StopReason | None
    tokens: tuple[str, ...]
    rollout_logprobs: tuple[float, ...]
    current_logprobs: tuple[float, ...]
    ratios: tuple[float, ...]
    cells: tuple[str, ...]
    advantages: tuple[float, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        update = (self.current_logprobs, self.ratios, self.cells, self.advantages)
        names, rows = ("tokens", "rollout_logprobs"), (self.tokens, self.rollout_logprobs)
        if any(update):
            names, rows = names + UPDATE_ROWS, rows + update
        num_drawn = sum(piece.num_tokens for piece in self.pieces)
        if {num_drawn, *map(len, rows)} != {len(self.tokens)}:
            lengths = ", ".join(f"{len(row)} {name}" for name, row in zip(names, rows, strict=True))
            raise DataError(
                f"sample {self.sample_id}: {lengths}, pieces of {num_drawn} tokens;"
                " expected one entry a response token in each"
            )
        if unknown := sorted(set(self.cells) - set(CELLS)):
            raise DataError(f"sample {self.sample_id}: unknown cell {unknown[0]!r}; expected one of {', '.join(CELLS)}")

    @property
    def is_truncated(self) -> bool:
        """Cut off by the limit of tokens."""
        return self.stop_reason == "length"

    @property
    def mean_advantage(self) -> float:
        """Mean over the tokens; with a critic they differ. NaN without an update."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else float("nan")

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that drew a token, oldest first."""
        return tuple(sorted({piece.weight_version for piece in self.pieces}))

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that drew a token, in order of appearance."""
        return tuple(dict.fromkeys(piece.engine for piece in self.pieces))


StepSample = tuple[int, SampleRecord]


def sample_row(sample: SampleRecord) -> dict[str, Any]:
    """The sample as JSON. Per-token numbers keep six digits: they are for reading, and there are many."""
    row = dataclasses.asdict(sample)
    for key in _NUMBER_ROWS:
        row[key] = [float(f"{value:.6g}") for value in row[key]]
    row["pieces"] = [[piece.num_tokens, piece.weight_version, piece.engine] for piece in sample.pieces]
    return row


def read_samples(run_dir: str | Path, *, last: int | None = None) -> list[StepSample]:
    """(step, sample) of the `last` recorded rollouts, oldest first; all of them if None; [] if the run made none.

    A torn last line is left out with a warning; raises `DataError` for a file that is broken elsewhere, or that an
    older version of the project wrote.
    """
    path = Path(run_dir) / SAMPLES_FILE
    return read_sample_file(path, last=last) if path.is_file() else []


def read_sample_file(path: Path, *, last: int | None = None) -> list[StepSample]:
    """`read_samples` of a file of any name."""
    lines = read_jsonl(path)
    if lines.num_torn:
        logger.warning("%s: the last line is cut off (a killed run); %d line left out", path, lines.num_torn)
    return [(record["step"], _to_sample(record, path)) for record in deque(lines.records, maxlen=last)]


def _to_sample(row: Mapping[str, Any], path: Path) -> SampleRecord:
    if "weight_version" in row and "pieces" not in row:
        raise DataError(
            f"{path}: the line of step {row['step']} was written by an older version of megatron-klear (it has one"
            " weight_version and one advantage a sample; expected pieces and advantages a token): rename or delete the"
            " file to go on without these rollouts (metrics and curves are not affected), or record them anew with a"
            " new run"
        )
    fields = {key: value for key, value in row.items() if key != "step"}
    try:
        for key in _NUMBER_ROWS:
            fields[key] = tuple(float(value) for value in fields[key])
        for key in ("tokens", "cells"):
            fields[key] = tuple(fields[key])
        fields["pieces"] = tuple(Piece(*piece) for piece in fields["pieces"])
        fields["reward"] = None if fields["reward"] is None else float(fields["reward"])
        return SampleRecord(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: a line of step {row['step']} is not a rollout as RunRecorder writes it ({error!r});"
            " was it written by another version?"
        ) from error
