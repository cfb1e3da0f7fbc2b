"""A rollout process over fake SGLang servers, and the trainer's side of a push, as small as it can be."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.fake_servers import ROOT, FakeServer, call, free_port
from megatron_klear.config.recipe import SelectionConfig
from megatron_klear.config.servers import ServersConfig
from megatron_klear.errors import WeightsWanted
from megatron_klear.rollout.jobs import Job, JobDone, ProcessSettings, ServerSpec
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.process import RolloutProcess
from megatron_klear.types import GenerationRequest, ServerAddress

TAG = "run"
LIMITS = ModelLimits(vocab_size=1024, max_context=4096)


def running(server: FakeServer) -> ServerSpec:
    """One that the test has started."""
    return ServerSpec(server.address)


def launched(name: str, **settings: Any) -> ServerSpec:
    """One that the process is to start; settings are those of its command line."""
    port = free_port()
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    path = f"PYTHONPATH={ROOT}{os.pathsep}{ROOT / 'kernels'}"
    argv = ("env", path, sys.executable, "-m", "megatron_klear.rollout.fake", "--port", str(port), *words)
    return ServerSpec(ServerAddress(name, f"http://127.0.0.1:{port}", "sglang"), argv)


def settings_of(specs: Sequence[ServerSpec], folder: Path, **changes: Any) -> ProcessSettings:
    config = ServersConfig(num_servers=len(specs), start_timeout_s=60.0, request_timeout_s=60.0)
    settings = ProcessSettings(
        servers=tuple(specs),
        config=config,
        limits=LIMITS,
        tag=TAG,
        log_dir=str(folder / "logs"),
        model_dir=str(folder),
        max_response_len=64,
        selection=SelectionConfig(),
    )
    return replace(settings, **changes)


def weights_folder(folder: Path) -> Path:
    """Weights that a scripted server takes: one tensor of one number."""
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    return folder


def bring(url: str, version: int, weights: Path) -> None:
    """New weights for one server: abort, load, flush, resume. Raises where one of the calls does not succeed."""
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {"model_path": str(weights), "weight_version": f"{TAG}.{version}"}),
        ("/flush_cache", {}),
        ("/continue_generation", {}),
    )
    for path, body in steps:
        reply = call(url + path, body, timeout_s=20.0)
        if reply.status != 200:
            raise ConnectionError(f"{path}: status {reply.status}: {reply.body}")


def push(process: RolloutProcess, version: int, weights: Path) -> list[str]:
    """To all that are listed; a server that fails is reported. The names of those that took it."""
    failed: dict[str, str] = {}
    addresses = process.begin_push(version)
    for address in addresses:
        try:
            bring(address.url, version, weights)
        except OSError as error:
            failed[address.name] = f"{type(error).__name__}: {error}"
    process.end_push(version, failed)
    return [address.name for address in addresses if address.name not in failed]


def receive(
    process: RolloutProcess, push_again: Callable[[], object] | None = None, timeout_s: float = 60.0
) -> JobDone:
    """The next that is done, pushing where that is asked for."""
    while True:
        try:
            done = process.receive(60.0)
        except WeightsWanted:
            if push_again is None:
                raise
            push_again()
            continue
        if done is None:
            raise TimeoutError(f"no job was done within 60 s: {process.status()}")
        return done


def job(name: str, count: int = 2, *, tokens: int = 16) -> Job:
    """Requests of a few prompt tokens that differ in their seeds."""
    prompt = tuple(name.encode()[-6:])
    requests = (GenerationRequest(f"{name}/{i}", prompt, tokens, seed=i) for i in range(count))
    return Job(name, tuple(requests))
