"""Measuring memory where no other test has left holes in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def number_of(file: str, function: str, *words: str) -> float:
    """What a module's function gives for these words, in a process of its own that keeps freed memory as a run does."""
    code = (
        "import runpy, sys; from megatron_klear.parallel.device import keep_freed_memory; keep_freed_memory();"
        " print(runpy.run_path(sys.argv[1])[sys.argv[2]](*sys.argv[3:]))"
    )
    path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", code, file, function, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout.split()[-1])
