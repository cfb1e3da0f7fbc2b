"""Stands between the run and a server that it started, and ends the server with all its processes in every case.

    python guardian.py GRACE_S COMMAND ...

Ends the command's process group when stdin closes: by those who started this, or by the system because they died,
however that was. Standard library only, for it stays in memory as long as the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time


def main(grace_s: float, command: list[str]) -> int:
    """Run the command until it ends or stdin closes; its exit code, negative for a signal."""
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"guardian: cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    threading.Thread(target=_end_with_parent, args=(server.pid, grace_s), daemon=True).start()
    code = server.wait()
    # A server's helpers may outlive it, and hold its port and its memory.
    _signal(server.pid, signal.SIGKILL)
    print(f"guardian: the server ended, exit code {code}", file=sys.stderr, flush=True)
    return code


def _end_with_parent(group: int, grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal(group, signal.SIGTERM)
    time.sleep(grace_s)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = main(float(sys.argv[1]), sys.argv[2:])
    # An exit code has no sign; shells write 128 + signal.
    sys.exit(128 - code if code < 0 else code)
