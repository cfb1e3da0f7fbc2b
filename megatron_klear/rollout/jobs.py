"""What goes between rank 0 of the trainer and the rollout process: jobs, their outcomes, how the servers fare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron_klear.config.recipe import RewardConfig, SelectionConfig
from megatron_klear.config.servers import ServersConfig
from megatron_klear.metrics import Metric
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.types import Completion, GenerationRequest, Prompt, SampleGroup, ServerAddress

MemberState = Literal["starting", "stale", "serving", "dead"]
"""starting: no generation has worked yet. stale: works, but not with the current weights. serving: takes requests.
dead: failed; it is restarted, or asked again, after a pause."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server of the run. `argv`: the command that starts it, if the run does; it must then listen at the address."""

    address: ServerAddress
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """All that the rollout process must know; pickled when it is started."""

    servers: tuple[ServerSpec, ...]
    """From `local_server.server_specs(kind, config, model_dir)`."""
    config: ServersConfig
    """Limits of requests, starts and restarts."""
    limits: ModelLimits
    tag: str
    """Of `VersionLabels`: random for each run."""
    log_dir: str
    """The process writes rollout.log there, and each server that it starts NAME.log."""
    model_dir: str
    """Hugging Face folder, for its tokenizer."""
    max_response_len: int
    selection: SelectionConfig
    reward: RewardConfig | None = None
    """None where no job has a prompt."""
    router: ServerAddress | None = None
    """Where requests go instead of straight to `servers`."""
    max_results: int = 64
    """Finished jobs that wait in the process; further ones wait for room before they are sent."""


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that belong together. `started`: what each has already; it goes on from there with what is left."""

    job_id: str
    requests: tuple[GenerationRequest, ...]
    prompt: Prompt | None = None
    """Set: the completions are a group of it, to be scored and selected. None: they are only completed."""
    started: tuple[Completion | None, ...] = ()


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job's outcome. `group` is None for a job without prompt, a cancelled one, and where nothing was selected."""

    job_id: str
    completions: tuple[Completion, ...]
    """In the order of the requests; their ids are the requests'."""
    group: SampleGroup | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    cancelled: bool = False
    """Some completions may have stopped with "abort"."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How a server fares."""

    name: str
    url: str
    state: MemberState
    version: int | None
    """Weights that the last push gave it; None if it has lost them."""
    num_running: int
    num_restarts: int
    last_failure: str


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """How the servers fare, and counters since the start."""

    engines: tuple[EngineStatus, ...]
    version: int | None
    """Last push that ended; None before the first."""
    num_waiting: int
    """Requests that no server has taken yet."""
    num_retried: int
    """Requests that went elsewhere because a server failed them."""
    num_discarded: int
    """Answers thrown away because they were of other weights."""
    num_continued: int
    """Requests that were cut short by a push, and went on."""
    num_tokens: int
    """Tokens that were drawn and kept."""
