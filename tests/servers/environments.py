"""Where real servers are installed, each kind in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
SETUP_TIMEOUT_S = 1800


def tools(kind: Literal["sglang", "vllm"]) -> Path:
    """The scripts that set a server up and start it on a CPU."""
    return ROOT / "tools" / "servers" / f"{kind}_cpu"


def environment(kind: Literal["sglang", "vllm"]) -> Path:
    """The environment that serves; made (minutes) if it is not there. SERVER_ENVIRONMENTS names another place."""
    folder = Path(os.environ.get("SERVER_ENVIRONMENTS") or ROOT / ".venv-servers").absolute() / kind
    command = [str(tools(kind) / "setup.sh"), str(folder)]
    subprocess.run(command, check=True, timeout=SETUP_TIMEOUT_S, env={**os.environ, "PYTHON": sys.executable})
    return folder
