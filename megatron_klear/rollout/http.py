"""One server over HTTP: connections, limits, and what a failed call means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from megatron_klear.errors import EngineUnavailable, RequestRefused
from megatron_klear.types import ServerAddress

CONNECT_TIMEOUT_S = 10.0
# Servers close connections that nobody used for 5 s: one that is being closed must not be taken.
KEEPALIVE_S = 2.0


class HttpClient:
    """JSON calls to one server, for one event loop.

    Args:
        address: the server.
        timeout_s: longest wait for an answer where a call does not say.
        max_connections: calls that are on their way at a time; further ones wait.
    """

    def __init__(self, address: ServerAddress, *, timeout_s: float, max_connections: int) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            base_url=address.url,
            # A proxy of the environment is for the internet, not for the cluster's own servers.
            trust_env=False,
            # Waiting for a free connection is bounded by the caller's own limits.
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=KEEPALIVE_S,
            ),
        )

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON; errors as `post`."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """The answer's JSON (None where the answer is empty; text where it is not JSON).

        Raises:
            RequestRefused: status 4xx.
            EngineUnavailable: no connection, no answer in time, or status 5xx.
        """
        return await self._call("POST", path, dict(body or {}), timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        limit = self.timeout_s if timeout_s is None else timeout_s
        where = f"{self.address.name} ({self.address.url}): {method} {path}"
        timeout = httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit), pool=None)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise EngineUnavailable(f"{where}: no answer within {limit:g} s ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.is_server_error:
            raise EngineUnavailable(f"{where}: status {response.status_code}: {response.text[:300]}")
        if not response.is_success:
            raise RequestRefused(f"{where}: status {response.status_code}: {response.text[:300]}")
        return _content(response)


def _content(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        return response.text
