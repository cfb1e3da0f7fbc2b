"""From an address to a server of its kind."""

from __future__ import annotations

from megatron_klear.protocols import EngineServer
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.rollout.vllm import VllmServer
from megatron_klear.types import ServerAddress


def connect(
    address: ServerAddress, labels: VersionLabels, *, timeout_s: float, max_connections: int, limits: ModelLimits
) -> EngineServer:
    """A client for one event loop. Nothing is sent yet: the server need not run."""
    kind = SglangServer if address.kind == "sglang" else VllmServer
    return kind(address, labels, timeout_s=timeout_s, max_connections=max_connections, limits=limits)
