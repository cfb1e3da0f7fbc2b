"""Let Megatron write checkpoint files from this process.

Megatron collects writer results through a queue of a spawned manager process, which costs seconds on the first save
and outlives a rank that leaves in a hurry; 0.16 also forks its writers. Both stand-ins below are entered around one
save and undone after it.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async


class _NoCount:
    """Stands for the queue by which forked writers say that they are done."""

    def get(self) -> None:
        """A writer in this process is done when it returns."""

    def task_done(self) -> None:
        """Nothing waits."""


def _write_buckets(
    transforms: list[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """Megatron's contract: {bucket: write results}, or the exception of the first failure."""
    outcome: Any = {}
    for i, bucket in enumerate(buckets):
        # Megatron's annotations ask for queues between processes; any object with their methods will do.
        answer: Any = queue.Queue()
        count: Any = _NoCount()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, answer, count, use_fsync=True
        )
        _, result = answer.get()
        if isinstance(result, Exception):
            outcome = result
            break
        outcome[i] = result
    results.put(outcome)


@contextlib.contextmanager
def in_process_writer() -> Iterator[None]:
    """No process is started by a save made inside."""
    results: queue.Queue[Any] = queue.Queue()
    module, writer = filesystem_async, filesystem_async.FileSystemWriterAsync
    if "_get_write_results_queue" in vars(module):  # 0.16
        stand_ins = [
            (module, "_get_write_results_queue", lambda: results),
            (writer, "write_preloaded_data_multiproc", staticmethod(_write_buckets)),
        ]
    else:  # 0.19 writes with threads already
        stand_ins = [(module, "get_write_results_queue", lambda *_args, **_kwargs: results)]
    with contextlib.ExitStack() as undo:
        for owner, name, stand_in in stand_ins:
            undo.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, stand_in)
        yield
