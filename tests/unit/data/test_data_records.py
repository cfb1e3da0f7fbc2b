from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from megatron_klear.data.records import read_rows
from megatron_klear.errors import DataError

SHARED_MATH = Path(__file__).parents[4] / "shared" / "data" / "math"


def write(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_jsonl_rows_keep_exactly_their_own_fields(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a": 1, "metadata": {"x": 1}}\n\n  \n{"b": "\xc3\xa4", "metadata": {"y": [2]}}')
    assert read_rows(str(path)) == [{"a": 1, "metadata": {"x": 1}}, {"b": "ä", "metadata": {"y": [2]}}]


def test_unicode_line_separators_do_not_split_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, '{"a": "x\u2028y\u0085z"}\r\n'.encode())
    assert read_rows(str(path)) == [{"a": "x\u2028y\u0085z"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": \n', r"rows\.jsonl, line 3: not valid JSON .*at column"),
        (b'{"a": 1}\n[1, 2]\n', r"rows\.jsonl, line 2: holds a JSON list; expected one JSON object a line"),
        (b'{"a": "\xff"}\n', r"rows\.jsonl, line 1: not valid UTF-8 .*save the file as UTF-8"),
        (b"", r"rows\.jsonl has no rows; expected at least one"),
        (b"\n  \n", r"rows\.jsonl has no rows; expected at least one"),
    ],
)
def test_bad_jsonl_is_reported_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message):
        read_rows(str(path))


def test_missing_file_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist .*correct the path"):
        read_rows(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match=r"ends in '\.csv'; expected \.jsonl .*convert or rename"):
        read_rows(str(write(tmp_path, b"a,b\n", "rows.csv")))


def test_parquet_gives_nested_columns_as_plain_python(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": str(i)}], "reward_model": {"ground_truth": str(i), "style": "rule"}}
        for i in range(3)
    ]
    path = tmp_path / "of [2025]" / "rows.parquet"
    path.parent.mkdir()
    Dataset.from_list(rows).to_parquet(str(path))
    assert read_rows(str(path)) == rows
    assert read_rows(f"{path}@[1:2]") == rows[1:2]


def test_damaged_parquet_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as parquet .*write the file anew"):
        read_rows(str(write(tmp_path, b"this is not parquet at all", "rows.parquet")))


def test_parquet_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"prompt": []}).to_parquet(str(path))
    with pytest.raises(DataError, match="has no rows"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[0:2]", [0, 1]), ("[2:]", [2, 3, 4]), ("[:1]", [0]), ("[-2:]", [3, 4]), ("[:]", [0, 1, 2, 3, 4])],
)
def test_a_slice_counts_rows_as_python_does(tmp_path: Path, text: str, expected: list[int]) -> None:
    path = write(tmp_path, b"\n".join(b'{"n": %d}' % i for i in range(5)))
    assert [row["n"] for row in read_rows(f"{path}@{text}")] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[5:9]", r"selects none of the 2 rows; give a slice that overlaps \[0:2\]"),
        ("[1]", r"cannot read the slice .*expected file@\[start:stop\]"),
        ("[0:4:2]", "cannot read the slice"),
        ("[-:2]", "cannot read the slice"),
        ("[0:2", "cannot read the slice"),
    ],
)
def test_bad_slices_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, b'{"n": 0}\n{"n": 1}\n')
    with pytest.raises(DataError, match=message):
        read_rows(f"{path}@{text}")


def test_real_file_with_blank_lines_and_nested_fields() -> None:
    path = SHARED_MATH / "aime24.jsonl"
    if not path.is_file():
        pytest.skip(f"no real data at {path}")
    rows = read_rows(str(path))
    assert len(rows) == 30
    assert rows[0]["messages"][0]["role"] == "user"
