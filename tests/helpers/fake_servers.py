"""Fake SGLang servers as processes, for a test: `with fake_servers(2, token_seconds=0.001) as servers: servers[0].url`.

Settings are the command line's (megatron_klear/rollout/fake/command.py). Servers end with the `with` block, and also
when the test's own process is killed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_klear.types import ServerAddress

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
# A proxy of the environment is for the internet.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Reply:
    """Status and body: parsed where it is JSON, None where it is empty, else its text."""

    status: int
    body: Any


def call(url: str, body: dict[str, Any] | None = None, *, method: str = "POST", timeout_s: float = 60.0) -> Reply:
    """One HTTP call. Any status is a reply; no answer is an `OSError`, or `http.client.HTTPException`."""
    data = json.dumps(body or {}).encode() if method == "POST" else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with OPENER.open(request, timeout=timeout_s) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return Reply(status, json.loads(text) if text else None)
    except ValueError:
        return Reply(status, text)


def free_port() -> int:
    """Below the ports that the system gives to outgoing connections, so that none of these takes it meanwhile."""
    start = 20000 + os.getpid() * 37 % 9000
    for port in (20000 + (start + 11 * i) % 10000 for i in range(1000)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port
    raise RuntimeError("no free port from 20000 to 29999")


_GIVEN: set[int] = set()


def command_line(port: int, settings: dict[str, Any]) -> list[str]:
    """`token_seconds=0.1` as `--token-seconds 0.1`; True as the bare flag; a dict as JSON."""
    words = [sys.executable, "-m", "megatron_klear.rollout.fake", "--port", str(port), "--with-parent"]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


class FakeServer:
    """One of them."""

    def __init__(self, name: str, port: int, settings: dict[str, Any]) -> None:
        self.name, self.port, self.settings = name, port, settings
        self.url = f"http://127.0.0.1:{port}"
        self.address = ServerAddress(name, self.url, "sglang")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        return subprocess.Popen(
            command_line(self.port, self.settings),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def wait_until_up(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.log()}")
            try:
                call(f"{self.url}/health", method="GET", timeout_s=5)
                return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"{self.name} did not open its port within {timeout_s:g} s: {self.log()}")

    def log(self) -> str:
        """What it wrote."""
        self._log.seek(0)
        return self._log.read().decode()

    def get(self, path: str, *, timeout_s: float = 60.0) -> Reply:
        return call(self.url + path, method="GET", timeout_s=timeout_s)

    def post(self, path: str, *, timeout_s: float = 60.0, **body: Any) -> Reply:
        return call(self.url + path, body, timeout_s=timeout_s)

    def generate(self, input_ids: list[int], max_new_tokens: int = 8, **more: Any) -> Reply:
        """`sampling_*` words go into sampling_params (`temperature`, `sampling_seed`, `stop_token_ids` too)."""
        inside = ("temperature", "sampling_seed", "stop_token_ids", "ignore_eos")
        sampling = {"max_new_tokens": max_new_tokens} | {name: more.pop(name) for name in inside if name in more}
        return self.post("/generate", input_ids=input_ids, sampling_params=sampling, **{"return_logprob": True} | more)

    def faults(self, **changes: Any) -> Reply:
        """Set faults (megatron_klear/rollout/fake/faults.py); the reply holds all as they are then."""
        return self.post("/faults", **changes)

    def calls(self) -> list[str]:
        """Paths that were asked for, in order; /faults and /calls left out."""
        return [one["path"] for one in self.get("/calls").body]

    def kill(self) -> None:
        """At once, whatever runs."""
        self.process.kill()
        self.process.wait(10)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def restart(self, **changes: Any) -> None:
        """On the same port, with the settings it had and `changes`. As any new server: without weights of the run."""
        self.kill()
        self._close_stdin()
        self.settings = self.settings | changes
        self.process = self._start()
        self.wait_until_up()

    def close(self) -> None:
        self.kill()
        self._close_stdin()
        self._log.close()

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def fake_servers(num: int = 1, **settings: Any) -> Iterator[list[FakeServer]]:
    """`num` servers that are up, named fake0, fake1, ..."""
    servers: list[FakeServer] = []
    try:
        for i in range(num):
            servers.append(FakeServer(f"fake{i}", free_port(), settings))
        for server in servers:
            server.wait_until_up()
        yield servers
    finally:
        for server in servers:
            server.close()
