"""Where a run's responses come from, and how weights get there: an engine in this process, or servers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import Recipe, RlRecipe
from megatron_klear.config.servers import ServersConfig
from megatron_klear.protocols import EngineServer, RolloutEngine, WeightSync
from megatron_klear.rollout.connect import connect
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.rollout.jobs import ProcessSettings
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.local_server import server_specs
from megatron_klear.rollout.process import RolloutProcess
from megatron_klear.rollout.stream import Mailbox, ServerEngine
from megatron_klear.types import ServerAddress
from megatron_klear.weight_sync.broadcast import BroadcastTransport
from megatron_klear.weight_sync.crew import WeightTransport
from megatron_klear.weight_sync.disk import DiskTransport
from megatron_klear.weight_sync.inprocess import InProcessSync
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync
from megatron_klear.weight_sync.tensor import TensorTransport


@dataclass(frozen=True, slots=True)
class Bridge:
    """Rank 0's end of the rollout process."""

    process: RolloutProcess
    mailbox: Mailbox
    labels: VersionLabels
    limits: ModelLimits


@dataclass(frozen=True, slots=True)
class Engines:
    """What rank 0 samples with. `bridge` is None where that is the embedded engine."""

    engine: RolloutEngine
    bridge: Bridge | None = None


def uses_servers(recipe: Recipe) -> bool:
    """Whether responses come from servers."""
    return isinstance(recipe, RlRecipe) and recipe.rollout.engine != "embedded"


def open_engines(recipe: Recipe, shape: Qwen3Shape, stack: contextlib.ExitStack) -> Engines:
    """On rank 0. Servers that the run starts begin to start here, and end with the stack."""
    if not isinstance(recipe, RlRecipe) or recipe.rollout.engine == "embedded":
        rows = recipe.rollout.max_running_requests if isinstance(recipe, RlRecipe) else 256
        return Engines(EmbeddedEngine(shape, max_running_requests=rows))
    kind, config = recipe.rollout.engine, recipe.servers
    assert config is not None
    labels = VersionLabels(secrets.token_hex(4))
    limits = ModelLimits(shape.vocab_size, shape.max_position_embeddings)
    settings = ProcessSettings(
        server_specs(kind, config, recipe.model.hf_checkpoint),
        config,
        limits,
        labels.tag,
        str(Path(recipe.run.output_dir) / "logs"),
        recipe.model.hf_checkpoint,
        recipe.rollout.rollout_max_response_len,
        # Whether a group is too old is known where it is used: rollout/stream.py.
        recipe.selection.model_copy(update={"max_staleness": None}),
        recipe.reward,
        ServerAddress("router", config.router_url, kind) if config.router_url else None,
    )
    process = stack.enter_context(RolloutProcess(settings))
    mailbox = Mailbox(process, stall_timeout_s=config.request_timeout_s + config.start_timeout_s)
    return Engines(ServerEngine(mailbox, lambda: _pushed(process)), Bridge(process, mailbox, labels, limits))


def open_sync(recipe: Recipe, engines: Engines | None, stack: contextlib.ExitStack, *, on_cpu: bool) -> WeightSync:
    """On every rank; only rank 0 has `engines`."""
    if not isinstance(recipe, RlRecipe) or recipe.servers is None:
        engine = engines.engine if engines is not None else None
        assert engine is None or isinstance(engine, EmbeddedEngine)
        return InProcessSync(engine)
    if engines is None:
        return RemoteSync(None)
    assert engines.bridge is not None
    config, bridge = recipe.servers, engines.bridge
    setup = PushSetup(
        bridge.process,
        _connector(bridge, config),
        _transport(config, recipe, on_cpu=on_cpu),
        config.pause_mode,
        config.push_timeout_s,
        config.max_probe_logprob_abs_diff,
    )
    return stack.enter_context(RemoteSync(setup))


def _connector(bridge: Bridge, config: ServersConfig) -> Callable[[ServerAddress], EngineServer]:
    """Connections of the trainer's own, for pushes."""

    def open_connection(address: ServerAddress) -> EngineServer:
        return connect(address, bridge.labels, timeout_s=config.push_timeout_s, max_connections=4, limits=bridge.limits)

    return open_connection


def _transport(config: ServersConfig, recipe: RlRecipe, *, on_cpu: bool) -> WeightTransport:
    if config.transport == "disk":
        folder = config.weights_dir or Path(recipe.run.output_dir) / "weights"
        return DiskTransport(folder, template=recipe.model.hf_checkpoint, keep=config.keep_weights)
    if config.transport == "tensor":
        return TensorTransport(bucket_bytes=config.bucket_bytes)
    return BroadcastTransport(
        host=config.broadcast_host,
        port=config.broadcast_port,
        backend="gloo" if on_cpu else "nccl",
        bucket_bytes=config.bucket_bytes,
    )


def _pushed(process: RolloutProcess) -> int:
    version = process.status().version
    return -1 if version is None else version
