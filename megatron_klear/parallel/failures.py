"""What torch's collective checkpoint calls raise: the failure of any rank, told to all of them."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

# Not even an Exception, but a BaseException.
CollectiveFailure = CheckpointException


def reason(error: BaseException) -> str:
    """Short, also where torch would print the tracebacks of all ranks."""
    if isinstance(error, CollectiveFailure):
        return "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items())
    return repr(error)
