"""Seconds to sample the responses of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.config.recipe import RlRecipe
from megatron_klear.launch.compute import active_parameters
from megatron_klear.launch.hardware import EFFICIENCIES
from megatron_klear.launch.job import Job
from megatron_klear.launch.memory import cache_bytes_per_token
from megatron_klear.launch.workload import response_lengths

# An engine with CUDA graphs spends this on scheduling and sampling a token of all rows.
SERVER_OVERHEAD_S = 2e-3
# The embedded engine starts about 25 small kernels a layer from Python.
EMBEDDED_LAYER_OVERHEAD_S = 25 * 6e-6
# Two small all-reduces a layer among the GPUs of one engine.
ALL_REDUCE_S = 15e-6
# Share of its GPUs' memory that an engine takes.
SERVER_MEMORY = 0.8
# The embedded engine reads every row from the start of the longest one, and copies the cache every 32nd step.
EMBEDDED_CACHE_FACTOR = 1.5
_POINTS = 64


@dataclass(frozen=True, slots=True)
class Rollout:
    """How the responses of a step are sampled."""

    seconds: float
    num_engines: int
    gpus_per_engine: int
    responses_per_engine: int
    running: int
    """Responses that an engine decodes at a time, at most."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """One engine's speed."""

    weight_bytes: float
    cache_bytes: float
    """Of a token."""
    flops: float
    """Of a token, without attention."""
    bytes_per_s: float
    flops_per_s: float
    overhead_s: float

    def step(self, rows: float, context: float) -> float:
        """Seconds of one token for each of `rows` responses with `context` tokens behind them."""
        moved = (self.weight_bytes + rows * context * self.cache_bytes) / self.bytes_per_s
        return max(moved, rows * self.flops / self.flops_per_s) + self.overhead_s


def rollout_of(job: Job) -> Rollout | None:
    """None for SFT."""
    if not isinstance(job.recipe, RlRecipe):
        return None
    embedded = job.assumed.engine == "embedded"
    size = 1 if embedded else job.assumed.engine_tensor
    num_engines = 1 if embedded else max(1, job.layout.num_gpus // size)
    responses = -(-job.work.num_responses // num_engines)
    engine = _engine(job, size, embedded=embedded)
    running = min(responses, _room(job, job.recipe, size, embedded=embedded))
    seconds = _seconds(job, engine, responses, running)
    return Rollout(seconds, num_engines, size, responses, running)


def _engine(job: Job, size: int, *, embedded: bool) -> _Engine:
    layers, shape = len(job.model.layers), job.shape
    flops = 2 * (sum(active_parameters(job, one) for one in job.model.layers) + shape.vocab_size * shape.hidden_size)
    # The embedding is looked up, not read; the embedded engine's output layer is in float32.
    weights = (job.model.total - job.model.embedding * (job.model.head > 0)) * job.e
    overhead = SERVER_OVERHEAD_S + (2 * layers * ALL_REDUCE_S if size > 1 else 0.0)
    if embedded:
        weights += (4 - job.e) * shape.vocab_size * shape.hidden_size
        overhead = layers * EMBEDDED_LAYER_OVERHEAD_S
    rate = job.gpu.bf16_flops * EFFICIENCIES.matmul if job.e == 2 else job.gpu.float32_flops * EFFICIENCIES.float32
    return _Engine(
        weight_bytes=weights,
        cache_bytes=cache_bytes_per_token(shape, job.e) * (EMBEDDED_CACHE_FACTOR if embedded else 1.0),
        flops=flops,
        bytes_per_s=job.gpu.hbm_bytes_per_s * EFFICIENCIES.hbm * size,
        flops_per_s=rate * size,
        overhead_s=overhead,
    )


def _room(job: Job, recipe: RlRecipe, size: int, *, embedded: bool) -> int:
    """Responses that have room in the cache at a time."""
    if embedded:
        return recipe.rollout.max_running_requests
    free = SERVER_MEMORY * job.gpu.hbm_bytes * size - job.model.total * job.e
    return max(1, int(free / (job.work.mean_sample * cache_bytes_per_token(job.shape, job.e))))


def _seconds(job: Job, engine: _Engine, responses: int, running: int) -> float:
    """First as many as have room, as long as responses wait; then those that are left, ever fewer."""
    work = job.work
    lengths = response_lengths(work.mean_response, work.longest_response, _POINTS)
    full_steps = (responses - running) / running * work.mean_response
    seconds = full_steps * engine.step(running, work.mean_prompt + work.mean_response / 2)
    # Each ends with the response that runs into the limit: somewhere there is one.
    borders = [*lengths, work.longest_response]
    done = 0
    for i, border in enumerate(borders):
        alive = max(1.0, running * (1 - i / _POINTS))
        seconds += (border - done) * engine.step(alive, work.mean_prompt + (done + border) / 2)
        done = border
    prefill = job.work.num_responses * job.work.mean_prompt * engine.flops / engine.flops_per_s
    return seconds + prefill * responses / max(1, job.work.num_responses)
