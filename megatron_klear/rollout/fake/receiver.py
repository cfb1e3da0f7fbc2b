"""The child process that is the fake server's member of a process group (group.py). `... receiver FD`: its pipe."""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from megatron_klear.parallel.engine_member import EngineMember
from megatron_klear.rollout.fake.weights import RawTensor, raw_tensor
from megatron_klear.types import TensorSpec


def main() -> None:
    """First what `EngineMember` takes, then lists of tensors to receive. An error goes back as a text."""
    pipe = Connection(int(sys.argv[1]))
    questions: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, questions), daemon=True).start()
    try:
        member = EngineMember(**questions.get())
        pipe.send(True)
        while True:
            pipe.send(_received(member, questions.get()))
    except (RuntimeError, ValueError, OSError) as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _read(pipe: Connection, questions: queue.Queue[Any]) -> None:
    """The server's death is noticed here even while the other thread waits in a broadcast."""
    while True:
        try:
            questions.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)


def _received(member: EngineMember, specs: list[tuple[str, str, list[int]]]) -> dict[str, RawTensor]:
    names = [name for name, _, _ in specs]
    tensors = member.receive([TensorSpec(name, tuple(shape), dtype) for name, dtype, shape in specs])
    return {name: raw_tensor(tensor) for name, tensor in zip(names, tensors, strict=True)}


if __name__ == "__main__":
    main()
