from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from helpers.fake_servers import free_port
from megatron_klear.config.servers import ServersConfig
from megatron_klear.errors import EngineUnavailable
from megatron_klear.rollout import guardian
from megatron_klear.rollout.local_server import LocalServer, last_lines, server_specs

# Says its pid and that of a helper which takes no notice of SIGTERM; ends by SIGTERM itself unless told otherwise.
SERVER = """
import os, signal, subprocess, sys, time
wait = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
helper = subprocess.Popen(wait)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pids", os.getpid(), helper.pid, os.environ.get("COLOUR"), flush=True)
if "brief" in sys.argv:
    sys.exit(7)
time.sleep(60)
"""


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pids(log: Path, *, count: int = 1) -> list[int]:
    """Of server and helper, as the start number `count` has said them."""

    def said() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith("pids")] if log.is_file() else []

    wait_for(lambda: len(said()) >= count, f"pids in {log}")
    return [int(word) for word in said()[count - 1].split()[1:3]]


def server(tmp_path: Path, *words: str, grace_s: float = 5.0, port: int | None = None) -> LocalServer:
    command = ("env", "COLOUR=blue", sys.executable, "-c", SERVER, *words)
    url = f"http://127.0.0.1:{port or free_port()}"
    return LocalServer("fake-0", url, command, tmp_path / "logs" / "fake-0.log", grace_s=grace_s)


def test_it_runs_in_its_environment_and_ends_with_all_its_processes(tmp_path: Path) -> None:
    async def test() -> None:
        local = server(tmp_path)
        await local.start()
        try:
            own = await asyncio.to_thread(pids, local.log_file)
            assert all(map(is_running, own))
            assert "blue" in local.log_file.read_text()
        finally:
            await asyncio.wait_for(local.stop(), 20)
        assert not any(map(is_running, own))
        await local.stop()

    asyncio.run(test())


def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def test() -> None:
        local = server(tmp_path, "stubborn", grace_s=0.3)
        await local.start()
        try:
            own = await asyncio.to_thread(pids, local.log_file)
        finally:
            begin = time.monotonic()
            await asyncio.wait_for(local.stop(), 20)
        assert time.monotonic() - begin >= 0.3
        assert not any(map(is_running, own))

    asyncio.run(test())


def test_its_death_is_told_with_its_code_and_log_and_it_can_be_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        local = server(tmp_path, "brief")
        for count in (1, 2):
            await local.start()
            how = await asyncio.wait_for(local.ended(), 20)
            assert how.startswith("fake-0 ended with exit code 7; the end of ") and "pids" in how
            # The helper that outlived it would have held its port.
            assert not any(map(is_running, pids(local.log_file, count=count)))
        assert local.log_file.read_text().count("--- env COLOUR=blue") == 2

    asyncio.run(test())


def test_a_signal_that_ended_it_is_told_as_shells_do(tmp_path: Path) -> None:
    async def test() -> None:
        local = server(tmp_path)
        await local.start()
        os.kill((await asyncio.to_thread(pids, local.log_file))[0], signal.SIGKILL)
        assert "exit code 137" in await asyncio.wait_for(local.ended(), 20)

    asyncio.run(test())


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            local = server(tmp_path, port=other.getsockname()[1])
            with pytest.raises(EngineUnavailable, match=r"fake-0: port \d+ is not free.*servers.launch_port"):
                await local.start()
        assert not local.log_file.exists()

    asyncio.run(test())


def test_a_command_that_does_not_exist_is_told_by_the_log(tmp_path: Path) -> None:
    async def test() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        local = LocalServer("x", url, ("no-such-program",), tmp_path / "x.log")
        await local.start()
        assert "cannot start no-such-program" in await asyncio.wait_for(local.ended(), 20)

    asyncio.run(test())


def test_the_death_of_the_starter_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter = (
        "import subprocess, sys, time\n"
        "guardian = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=open(sys.argv[1], 'wb'))\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, guardian.__file__, "5", sys.executable, "-c", SERVER]
    parent = subprocess.Popen([sys.executable, "-c", starter, str(log), *command])
    try:
        own = pids(log)
        parent.kill()
        wait_for(lambda: not any(map(is_running, own)), "the end of the server")
    finally:
        parent.kill()
        parent.wait(10)


def test_the_end_of_a_log_is_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == "(no log)"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    assert last_lines(log, 2) == "line 98\nline 99"


def test_servers_are_named_in_order_with_their_commands() -> None:
    config = ServersConfig(
        num_servers=2, launch_python="/env/bin/python", launch_env=("A=1",), launch_args=("--x", "2")
    )
    first, second = server_specs("sglang", config, "/model")
    assert (first.address.name, first.address.url) == ("sglang-0", "http://127.0.0.1:30000")
    assert (second.address.name, second.address.url) == ("sglang-1", "http://127.0.0.1:30001")
    assert " ".join(second.argv) == (
        "env A=1 /env/bin/python -m sglang.launch_server --model-path /model --host 127.0.0.1 --port 30001"
        " --skip-server-warmup --x 2"
    )
    assert " ".join(server_specs("vllm", config, "/model")[0].argv) == (
        "env VLLM_SERVER_DEV_MODE=1 A=1 /env/bin/python -m vllm.entrypoints.cli.main serve /model --host 127.0.0.1"
        " --port 30000 --tokens-only --logprobs-mode processed_logprobs --x 2"
    )


def test_running_servers_have_no_command() -> None:
    (only,) = server_specs("vllm", ServersConfig(urls=("http://far:1",)), "/model")
    assert (only.address.name, only.address.url, only.address.kind, only.argv) == ("vllm-0", "http://far:1", "vllm", ())
