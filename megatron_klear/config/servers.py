"""Inference servers: where they are, how they are started, and how weights reach them."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from pydantic import BeforeValidator

from megatron_klear.config.base import Config, NonNegativeInt, PositiveFloat, PositiveInt, tuple_of_list


def _urls(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else tuple_of_list(value)


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else tuple_of_list(value)


Urls = Annotated[tuple[str, ...], BeforeValidator(_urls)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class ServersConfig(Config):
    """SGLang or vLLM servers (docs/rollouts.md): running ones, named by `urls`, or `num_servers` started by the run."""

    urls: Urls = ()
    """Running servers, as http://host:port, a list, or one text with commas. Behind a router, its workers: weights
    go to each of them."""
    router_url: str | None = None
    """Where requests go instead of straight to the servers (sglang-router)."""
    num_servers: NonNegativeInt = 0
    """Servers to start on this host, to watch and to restart."""
    launch_python: str = "python"
    """Interpreter of the environment that holds SGLang or vLLM: they pin a torch of their own."""
    launch_port: PositiveInt = 30000
    """Port of the first server; the others take the next ones."""
    launch_args: Words = ()
    """Further arguments of each server, as its command line takes them: a list, or one text."""
    launch_env: Words = ()
    """Further environment of each server, as NAME=value: a list, or one text."""
    max_restarts: NonNegativeInt = 5
    """How often a server that died is started again; the pause before doubles each time."""
    start_timeout_s: PositiveFloat = 900.0
    """Longest wait for a server's first generation. Nothing is asked of its /health: that lies."""
    request_timeout_s: PositiveFloat = 1800.0
    """Longest wait for a response."""
    max_requests_per_server: PositiveInt = 256
    """Requests that are on their way to a server at a time; the others wait here."""
    transport: Literal["disk", "tensor", "broadcast"] = "disk"
    """How weights travel: a folder that trainer and servers see; with the request; or a process group (gloo on CPU,
    NCCL on GPU)."""
    weights_dir: str | None = None
    """disk: where the folder of each version is written; output_dir/weights if not given."""
    keep_weights: PositiveInt = 2
    """disk: how many of the newest folders stay."""
    bucket_bytes: PositiveInt = 512 * 1024**2
    """tensor, broadcast: most bytes of weights that travel at a time."""
    broadcast_host: str = "127.0.0.1"
    """broadcast: address of the trainer's first rank, as the servers reach it."""
    broadcast_port: PositiveInt = 29600
    """broadcast: a free port there."""
    pause_mode: Literal["abort", "retract", "in_place", "wait"] = "abort"
    """What a push does to running requests. abort: they stop, and go on from their tokens under the new weights.
    retract: the server does the same by itself. in_place: they go on, on a cache of the old weights. wait: they end."""
    push_timeout_s: PositiveFloat = 600.0
    """Longest push of weights to all servers; one that has not confirmed by then is taken out, by name."""
    max_probe_logprob_abs_diff: PositiveFloat = 0.1
    """After a push each server scores a probe: largest |its log-prob - the trainer's|."""
    colocate: bool = False
    """Servers sleep while the trainer trains, for both share their GPUs."""
