"""Files that go to the disk while they are written, so that little is left to wait for at their end."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

# Large enough that the disk is never asked twice for the same, small against a file of weights.
STEP = 64 << 20


class DiskFlusher:
    """For one open file: `wrote` after each write, `finish` after the last."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = 0
        self._pool: ThreadPoolExecutor | None = None
        self._flush: Future[None] | None = None

    def wrote(self, num_bytes: int) -> None:
        """Count, and begin to flush if enough has come since the last flush. Raises the `OSError` of that one."""
        self._waiting += num_bytes
        if self._waiting < STEP or (self._flush is not None and not self._flush.done()):
            return
        self._check()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._flush, self._waiting = self._pool.submit(os.fdatasync, self._descriptor), 0

    def finish(self) -> None:
        """Wait until all is on disk. Raises `OSError`."""
        self._check()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Before the file is closed, also when something failed."""
        if self._pool is not None:
            self._pool.shutdown()

    def _check(self) -> None:
        # The system tells of a failed write only once, to whom waits first: it must not be lost here.
        if self._flush is not None:
            self._flush.result()
