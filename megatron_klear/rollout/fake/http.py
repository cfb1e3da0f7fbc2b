"""HTTP around the routes: one thread a connection, JSON in and out."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back. `body`: a str is sent as it is, None as nothing, anything else as JSON."""

    body: Any = None
    status: int = 200
    then: Callable[[], object] | None = None
    """Called when the answer is on its way."""


@dataclass(frozen=True, slots=True)
class Call:
    """What came: the path without its query, the body's JSON object, and whether the client still waits."""

    method: str
    path: str
    body: dict[str, Any]
    is_gone: Callable[[], bool]


class Dropped(Exception):
    """The connection is to be cut without an answer."""


class Routes(Protocol):
    """Who answers."""

    def answer(self, call: Call) -> Answer:
        """Raises `Dropped` to cut the connection."""
        ...


class Server(ThreadingHTTPServer):
    """Threads are daemons: a server that dies waits for nobody."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        super().__init__((host, port), Handler)
        self.routes = routes


class Handler(BaseHTTPRequestHandler):
    """One connection, kept alive between calls."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """A call."""
        self._serve()

    def do_POST(self) -> None:
        """A call."""
        self._serve()

    def _serve(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(text or b"{}")
        except ValueError as error:
            return self._send(Answer({"error": {"message": f"not JSON: {error}"}}, 400))
        if not isinstance(body, dict):
            return self._send(Answer({"error": {"message": "expected a JSON object"}}, 400))
        try:
            answer = self.server.routes.answer(Call(self.command, self.path.split("?")[0], body, self._is_gone))
        except Dropped:
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        self._send(answer)
        if answer.then is not None:
            self.wfile.flush()
            answer.then()

    def _is_gone(self) -> bool:
        """The client closed its end: what can be read is the end of the stream."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def _send(self, answer: Answer) -> None:
        is_text = isinstance(answer.body, str)
        data = b"" if answer.body is None else (answer.body if is_text else json.dumps(answer.body)).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/plain" if is_text else JSON_TYPE)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read the calls from /calls."""
