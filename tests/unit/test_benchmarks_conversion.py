"""The benchmark of conversions runs, on a model of no size, and says what it measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.law
def test_a_tiny_model_goes_there_and_back(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "benchmarks/conversion.py", "--model", "tiny", "--turns", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "bit-equal after both ways: True" in done.stdout, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("copy", "import", "export")] == [
        "copy",
        "import",
        "export",
    ]
    # So small a copy is nothing but a few calls: no conversion comes near it, and the exit code says so.
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []
