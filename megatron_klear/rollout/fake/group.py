"""Process groups of the fake server. Each is in a child process, so that the server itself never loads torch."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron_klear.errors import WeightSyncError
from megatron_klear.rollout.fake.weights import RawTensor

RECEIVER = "megatron_klear.rollout.fake.receiver"
TIMEOUT_S = 120.0


class _Receiver:
    """A child that is a member of one group. It ends when this process does: its end of the pipe closes."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        fd = theirs.fileno()
        self.child = subprocess.Popen([sys.executable, "-m", RECEIVER, str(fd)], pass_fds=[fd])
        theirs.close()

    def ask(self, question: Any) -> Any:
        """The child's answer. Raises `WeightSyncError` with its error, or where there is none."""
        try:
            self.pipe.send(question)
            if not self.pipe.poll(TIMEOUT_S):
                raise WeightSyncError(f"the group did not answer within {TIMEOUT_S:g} s")
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise WeightSyncError(f"the group's process ended with {self.child.wait(10)}") from error
        if isinstance(answer, str):
            raise WeightSyncError(answer)
        return answer

    def close(self) -> None:
        # In this order: who still waits for an answer is woken by the pipe's end.
        self.child.kill()
        self.child.wait(10)
        self.pipe.close()


class Groups:
    """By name."""

    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}

    def join(self, name: str, **address: Any) -> None:
        """Returns when all members have come. `address`: host, port, rank, world_size, backend."""
        if name in self._receivers:
            raise WeightSyncError(f"group {name} exists already")
        receiver = _Receiver()
        try:
            receiver.ask({"name": name, "timeout_s": TIMEOUT_S - 10, **address})
        except WeightSyncError:
            receiver.close()
            raise
        self._receivers[name] = receiver

    def receive(self, name: str, specs: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, RawTensor]:
        """Tensors (name, dtype, shape) from rank 0, in order."""
        if name not in self._receivers:
            raise WeightSyncError(f"Failed to receive weights: group {name} does not exist")
        return self._receivers[name].ask(list(specs))

    def leave(self, name: str) -> bool:
        """False if there is no such group."""
        receiver = self._receivers.pop(name, None)
        if receiver is not None:
            receiver.close()
        return receiver is not None
