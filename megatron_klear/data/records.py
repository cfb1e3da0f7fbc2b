"""Rows of a data file, as plain dictionaries. The only importer of `datasets`."""

from __future__ import annotations

import glob
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from megatron_klear.errors import DataError

Row = dict[str, Any]

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d+|):(?P<stop>-?\d+|)\]")


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    rows: slice


def read_rows(path: str) -> list[Row]:
    """Every row of a .jsonl or .parquet file; `file@[0:100]` takes a slice of the rows, as Python would.

    Blank lines are skipped and count as no row. Raises `DataError` for a file that is missing, empty, of another kind,
    or damaged (with the line number), and for a slice that leaves nothing.
    """
    source = _parse(path)
    if not source.path.is_file():
        raise DataError(
            f"data file {source.path} does not exist (seen from {Path.cwd()}); correct the path in the recipe"
        )
    if source.path.suffix == ".jsonl":
        rows = _read_jsonl(source.path)
    elif source.path.suffix == ".parquet":
        rows = _read_parquet(source.path)
    else:
        raise DataError(
            f"data file {source.path} ends in {source.path.suffix!r}; expected .jsonl (one JSON object a line) or"
            " .parquet: convert or rename it"
        )
    if not rows:
        raise DataError(f"data file {source.path} has no rows; expected at least one")
    chosen = rows[source.rows]
    if not chosen:
        raise DataError(f"{path} selects none of the {len(rows)} rows; give a slice that overlaps [0:{len(rows)}]")
    return chosen


def _parse(path: str) -> _Source:
    if "@[" not in path:
        return _Source(Path(path), slice(None))
    match = _SLICE.fullmatch(path)
    if match is None:
        raise DataError(f"cannot read the slice of {path!r}; expected file@[start:stop], like data.jsonl@[0:100]")
    start, stop = (int(text) if text else None for text in match.group("start", "stop"))
    return _Source(Path(match["path"]), slice(start, stop))


def _read_jsonl(path: Path) -> list[Row]:
    # Not by `datasets`: it would give all rows the union of their keys (an absent label comes back as None, metadata
    # of one row gains the fields of another), and it names no line where the JSON is broken.
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(line, where=f"{path}, line {number}"))
    return rows


def _parse_line(line: bytes, *, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        problem = f"not valid JSON ({error.msg} at column {error.colno})"
        raise DataError(f"{where}: {problem}; expected one JSON object a line") from error
    except UnicodeDecodeError as error:
        problem = f"not valid UTF-8 ({error.reason} at byte {error.start})"
        raise DataError(f"{where}: {problem}; save the file as UTF-8") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a JSON {type(row).__name__}; expected one JSON object a line")
    return row


def _read_parquet(path: Path) -> list[Row]:
    # Streamed, with a cache folder of our own: else the home directory gets a copy of every file ever read. Escaped,
    # because `datasets` takes a path with brackets for a pattern.
    with tempfile.TemporaryDirectory() as cache:
        try:
            table = datasets.IterableDataset.from_parquet(glob.escape(str(path)), cache_dir=cache)
            return [dict(row) for row in table]
        except (DatasetGenerationError, ValueError, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet ({error}); write the file anew") from error
