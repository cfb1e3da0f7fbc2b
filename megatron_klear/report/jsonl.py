"""Append-only JSON lines that survive a kill: one record a line, and only the last line can ever be torn."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_klear.errors import DataError, TrainingError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JsonLines:
    """What a file holds. `num_torn` is 1 if its last line was cut off by a kill or a full disk (it is left out)."""

    records: list[Record]
    num_torn: int


class JsonlWriter:
    """Appends records to a file; each `append` is on the disk when it returns. Opening raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: after a failed write nothing is left behind that close() would try, and fail, to write again.
        self._file = path.open("ab", buffering=0)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one line a record, then wait for the disk. Raises `TrainingError` if the disk refuses."""
        data = b"".join(_encode(record) for record in records)
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_error(path: Path, error: OSError) -> TrainingError:
    """The error of a run that can no longer write down what it does."""
    return TrainingError(
        f"cannot write {path}: {error.strerror or error}; expected a writable folder with free space:"
        " make room (or repair the mount), then resume the run from its last checkpoint"
    )


def read_jsonl(path: Path) -> JsonLines:
    """Read every record. Raises `DataError` for a missing file, or a broken line that is not the last one."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; expected a file of JSON lines as a run writes it to its output_dir")
    rows = [record for _, record in _rows(path)]
    records = [record for record in rows if record is not None]
    return JsonLines(records, num_torn=len(rows) - len(records))


def cut_after(path: Path, step: int) -> None:
    """Leave out the lines of later steps and a torn last line. The file is replaced in one move, never half written."""
    if not path.is_file():
        return
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        kept = (line for line, record in _rows(path) if record is not None and record["step"] <= step)
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _rows(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Raw line and its record; the record of a torn last line is None."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:  # also raised for bytes that are not UTF-8
                if next(file, None) is not None:
                    raise DataError(
                        f"{path} line {number} is not valid JSON ({error}); only the last line of a killed run may be"
                        " cut off: delete that line, or restore the file"
                    ) from error
                yield line, None
                return
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise DataError(
                    f'{path} line {number}: expected a JSON object with an integer "step", got {line[:60]!r};'
                    " is this the file of another program?"
                )
            yield line.rstrip(b"\n"), record


def _encode(record: Mapping[str, Any]) -> bytes:
    # ASCII escapes: a half character at the end of a cut-off response (a lone surrogate) has no UTF-8 form.
    return json.dumps(_finite(record), allow_nan=False).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings "nan", "inf", "-inf", which `float` reads back."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
