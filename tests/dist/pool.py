"""A pool of gloo ranks for tests: one clean process imports Megatron once and forks the ranks of each job.

Forking needs a parent that never ran OpenMP or autograd, which the pytest process is not; so the pool is a process of
its own, started once a session. A job is a function named "module:function"; its rank processes call it with
`(rank, world_size, *args)` and what it returns comes back by pickle.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What jobs use and what takes long to import. Modules only: nothing here may start a thread.
COSTLY_IMPORTS = (
    "megatron_klear.training.rl",
    "megatron_klear.training.sft",
    "megatron_klear.training.convert",
    "transformers.models.qwen3.modeling_qwen3",
)
# A rank whose peer died waits for it in a collective; it gets this long to fail by itself.
GRACE_S = 3.0


class RankFailure(AssertionError):
    """A rank raised or died; the message holds the traceback of each."""


class Pool:
    """Client side. Use `shared_pool()`, so that a session imports Megatron once."""

    def __init__(self) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), f"{ROOT}/kernels", f"{ROOT}/tests")),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def run(self, world_size: int, function: str, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Results of all ranks, in order. Raises `RankFailure` if one raised, died or took over `timeout` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump((world_size, function, args, timeout), self.process.stdin)
        self.process.stdin.flush()
        results, failures = pickle.load(self.process.stdout)
        if failures:
            raise RankFailure("\n".join(failures))
        return results

    def close(self) -> None:
        """End the pool process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)


@functools.cache
def shared_pool() -> Pool:
    """The one pool of this session; it ends with this process."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a rank prints must not end up among the answers
    for module in COSTLY_IMPORTS:
        importlib.import_module(module)
    while True:
        try:
            world_size, function, args, timeout = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_run_job(world_size, function, args, timeout), answers)
        answers.flush()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_job(world_size: int, function: str, args: tuple[Any, ...], timeout: float) -> tuple[list[Any], list[str]]:
    folder, port = Path(tempfile.mkdtemp(prefix="klear-ranks-")), free_port()
    try:
        ranks = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _rank_main(rank, world_size, port, function, args, folder)
            ranks[pid] = rank
        stuck = _wait(ranks, timeout)
        failures = [f"rank {rank}: killed (waited for a peer, or over {timeout} s)" for rank in stuck]
        outcomes = [_outcome(folder, rank) for rank in range(world_size)]
        told = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok and text is not None]
        silent = [
            f"rank {rank}: died without a word"
            for rank, (ok, text) in enumerate(outcomes)
            if not ok and text is None and rank not in stuck
        ]
        return [value if ok else None for ok, value in outcomes], told + silent + failures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(ranks: dict[int, int], timeout: float) -> list[int]:
    """Wait for processes (pid -> rank) and kill, with all they started, those that do not end; their ranks."""
    running, deadline, failed = dict(ranks), time.monotonic() + timeout, False
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            if status and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.005)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return sorted(running.values())


def _outcome(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"{rank}.pkl"
    return pickle.loads(path.read_bytes()) if path.exists() else (False, None)


def _rank_main(rank: int, world_size: int, port: int, function: str, args: tuple[Any, ...], folder: Path) -> None:
    code = 0
    try:
        os.setpgid(0, 0)
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
        )
        module, name = function.split(":")
        outcome = pickle.dumps((True, vars(importlib.import_module(module))[name](rank, world_size, *args)))
    except BaseException:
        outcome, code = pickle.dumps((False, traceback.format_exc()[-6000:])), 1
    # Renamed when complete, so that a kill leaves no half-written pickle.
    (folder / f"{rank}.tmp").write_bytes(outcome)
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pkl")
    os._exit(code)


if __name__ == "__main__":
    # The script's own folder would make this file importable under two names.
    sys.path[0] = str(ROOT)
    _serve()
