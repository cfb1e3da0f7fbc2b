"""Servers that the run starts on its own host: their commands, their logs, their end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megatron_klear.config.servers import ServersConfig
from megatron_klear.errors import EngineUnavailable
from megatron_klear.rollout.jobs import ServerSpec
from megatron_klear.types import ServerAddress

HOST = "127.0.0.1"
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL."""
_GUARDIAN = str(Path(__file__).with_name("guardian.py"))


def server_specs(kind: Literal["sglang", "vllm"], config: ServersConfig, model_dir: str) -> tuple[ServerSpec, ...]:
    """The servers of a recipe, named KIND-0, KIND-1, ...: those at `urls`, or `num_servers` with their commands."""
    if config.urls:
        return tuple(ServerSpec(ServerAddress(f"{kind}-{i}", url, kind)) for i, url in enumerate(config.urls))
    return tuple(
        ServerSpec(
            ServerAddress(f"{kind}-{i}", f"http://{HOST}:{config.launch_port + i}", kind),
            server_command(kind, config, model_dir, config.launch_port + i),
        )
        for i in range(config.num_servers)
    )


def server_command(
    kind: Literal["sglang", "vllm"], config: ServersConfig, model_dir: str, port: int
) -> tuple[str, ...]:
    """Command that starts one server."""
    where = ("--host", HOST, "--port", str(port))
    python = (config.launch_python, "-m")
    if kind == "sglang":
        # Its own warm-up is a generation that nobody checks; the fleet asks for one that counts.
        ours = (*python, "sglang.launch_server", "--model-path", model_dir, *where, "--skip-server-warmup")
        return ("env", *config.launch_env, *ours, *config.launch_args)
    # Weights are loaded over calls that exist in its development mode alone.
    environment = ("VLLM_SERVER_DEV_MODE=1", *config.launch_env)
    # With --tokens-only its answers say which weights drew each token.
    ours = (*python, "vllm.entrypoints.cli.main", "serve", model_dir, *where, "--tokens-only")
    return ("env", *environment, *ours, "--logprobs-mode", "processed_logprobs", *config.launch_args)


class LocalServer:
    """Starts one server, again and again, behind a guardian that ends it even if this process is killed.

    Args:
        name, url: the server's; it must listen at the URL's port.
        command: what is run.
        log_file: all that the server writes, start after start.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(
        self, name: str, url: str, command: Sequence[str], log_file: Path, *, grace_s: float = GRACE_S
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._url = url
        self._command = tuple(command)
        self._grace_s = grace_s
        self._guardian: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it. Raises `EngineUnavailable` if its port is taken: whoever answers there would be mistaken for it."""
        self._check_port()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            log.write(f"--- {' '.join(self._command)}\n".encode())
            log.flush()
            self._guardian = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                _GUARDIAN,
                str(self._grace_s),
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal is for the trainer, which then ends everything in order.
                start_new_session=True,
            )

    async def ended(self) -> str:
        """Wait until the server has ended; its exit code and the end of its log."""
        assert self._guardian is not None, f"{self.name} was not started"
        code = await self._guardian.wait()
        return f"{self.name} ended with exit code {code}; the end of {self.log_file}:\n{last_lines(self.log_file)}"

    async def stop(self) -> None:
        """End it with all its processes, if it runs: SIGTERM, then SIGKILL."""
        guardian = self._guardian
        if guardian is None or guardian.returncode is not None:
            return
        assert guardian.stdin is not None
        guardian.stdin.close()
        await guardian.wait()

    def _check_port(self) -> None:
        parts = urlsplit(self._url)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((parts.hostname or HOST, parts.port or 80))
            except OSError as error:
                raise EngineUnavailable(
                    f"{self.name}: port {parts.port} is not free ({error}); end what listens there, or set another"
                    " servers.launch_port"
                ) from error


def last_lines(path: Path, num_lines: int = 15) -> str:
    """The end of a log, for a message."""
    if not path.is_file():
        return "(no log)"
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
