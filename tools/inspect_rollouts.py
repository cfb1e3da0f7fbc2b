"""Rollouts on the terminal, token by token in colour: of a run, or of a file that debug.save_rollout_data wrote.

python tools/inspect_rollouts.py RUN_DIR --by version
"""

from __future__ import annotations

import os
import sys

from megatron_klear.errors import KlearError
from megatron_klear.report.inspect import main


def run() -> int:
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KlearError as error:
        print(f"inspect_rollouts.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `| head` has read enough. What is left in the buffer has nowhere to go when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    raise SystemExit(run())
