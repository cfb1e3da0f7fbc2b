"""Bytes on the GPU of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.config.model import Qwen3Shape, padded_vocab_size
from megatron_klear.config.recipe import Recipe, RlRecipe
from megatron_klear.launch.activations import (
    Widths,
    final_norm_bytes,
    recompute_bytes,
    rotary_bytes,
)
from megatron_klear.launch.job import Job
from megatron_klear.launch.layout import Layout
from megatron_klear.launch.parameters import RankParameters, rank_parameters
from megatron_klear.launch.workload import MEAN_PROMPT

GIB = 1024**3
# CUDA context and libraries about 0.6 GiB, NCCL's buffers of a few communicators about 1 GiB.
CONTEXT_BYTES = int(1.6 * GIB)
# Freed blocks that the allocator cannot use: a share of what is not weights, gradients and optimizer.
FRAGMENTATION = 0.10
# Logits that the head holds at a time on a GPU unless a recipe says otherwise, as in its kernel.
HEAD_CHUNK_BYTES = 2400 * 1024**2

# Answers that the engine of an sft run decodes at a time when it evaluates.
SFT_EVALUATION_SLOTS = 256


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on a GPU of one stage, at the moment of most."""

    stage: int
    num_layers: int
    parameters: int
    in_flight: float
    """Micro-batches whose activations are held, in micro-batches of the whole stage."""
    weights: int
    gradients: int
    optimizer: int
    optimizer_on_host: int
    """Not counted in the total."""
    critic: int
    """Weights, gradients and optimizer of a critic."""
    activations: int
    head: int
    working: int
    """What one layer's backward needs beside: recomputed activations and gradients of activations."""
    engine: int
    """Embedded engine: on the first GPU of the run, which is of stage 0."""
    reserve: int
    capacity: int

    @property
    def total(self) -> int:
        """All of it; of head and working the larger, since the head's backward is over when the layers' begins."""
        held = self.weights + self.gradients + self.optimizer + self.critic
        return held + self.activations + max(self.head, self.working) + self.engine + self.reserve

    @property
    def fits(self) -> bool:
        """Whether it is within the GPU's memory."""
        return self.total <= self.capacity


def stage_memory(job: Job) -> list[StageMemory]:
    """Memory of every stage."""
    return [_stage_memory(job, stage) for stage in range(job.layout.pipeline)]


def _stage_memory(job: Job, stage: int) -> StageMemory:
    parameters = rank_parameters(job.shape, job.model, job.layout, stage)
    optimizer = optimizer_bytes(parameters, job.layout, job.dtype, sharded=job.parallel.use_distributed_optimizer)
    on_host = optimizer if job.recipe.optimizer.optimizer_cpu_offload else 0
    weights, gradients = parameters.total * job.e, parameters.total * 4
    flight = in_flight(job.layout, stage, job.most_micro_batches)
    # The critic has no output layer; its optimizer is the policy's kind.
    critic = weights + gradients + optimizer - on_host if job.work.has_critic else 0
    activations, head, working = _activations(job, stage, flight), _head(job, stage), _working(job)
    return StageMemory(
        stage=stage,
        num_layers=len(job.layout.stages[stage]),
        parameters=parameters.total,
        in_flight=flight,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer - on_host,
        optimizer_on_host=on_host,
        critic=critic,
        activations=activations,
        head=head,
        working=working,
        engine=engine_bytes(job) if stage == 0 else 0,
        reserve=CONTEXT_BYTES + int(FRAGMENTATION * (activations + max(head, working))),
        capacity=job.gpu.hbm_bytes,
    )


def optimizer_bytes(parameters: RankParameters, layout: Layout, dtype: str, *, sharded: bool) -> int:
    """Two float32 moments, and float32 main weights where the weights are bfloat16 (float32 ones serve as both)."""
    each = 8 + (4 if dtype == "bfloat16" else 0)
    if not sharded:
        return parameters.total * each
    return each * (-(-parameters.dense // layout.replicas) + -(-parameters.experts // layout.expert_replicas))


def in_flight(layout: Layout, stage: int, num_micro_batches: int) -> float:
    """Micro-batches that a stage has gone forward with and not yet backward, at most; chunks count as their share.

    1F1B: one for each stage from here to the last. Interleaved: Megatron's warm-up of 2 (p - s - 1) + (v - 1) p chunks,
    and the one at work.
    """
    to_last = layout.pipeline - stage - 1
    if layout.chunks == 1:
        return float(min(num_micro_batches, to_last + 1))
    warmup = 2 * to_last + (layout.chunks - 1) * layout.pipeline
    return min(num_micro_batches * layout.chunks, warmup + 1) / layout.chunks


def _activations(job: Job, stage: int, flight: float) -> int:
    """Of all micro-batches in flight."""
    one = job.saved_bytes(stage, job.most_tokens, job.parallel)
    one += rotary_bytes(job.shape, job.most_tokens, job.dtype)
    hidden = job.most_tokens // job.layout.sequence_shards * job.shape.hidden_size * job.e
    if stage > 0 or job.layout.chunks > 1:
        # What came from the stage before; the schedule holds it until its gradient is sent back.
        one += hidden * job.layout.chunks
    if stage == job.layout.pipeline - 1:
        one += final_norm_bytes(job.shape, job.most_tokens, job.parallel, job.dtype)
    return int(flight * one)


def _head(job: Job, stage: int) -> int:
    """The output layer and its loss, on the last stage."""
    if stage != job.layout.pipeline - 1:
        return 0
    width, e = job.shape.hidden_size, job.e
    columns = padded_vocab_size(job.shape.vocab_size, job.layout.tensor) // job.layout.tensor
    logits = min(job.recipe.head.chunk_bytes or HEAD_CHUNK_BYTES, job.most_tokens * columns * 4)
    # Of a chunk, its hidden states and their gradient; of all positions, hidden states gathered from the tensor ranks
    # and their gradient, and a few numbers each.
    hidden = 2 * (logits // (4 * columns) + job.most_tokens) * width * e + 24 * job.most_tokens
    # The weight's gradient is added to Megatron's buffer; what autograd is given for it are zeros.
    return logits + hidden + columns * width * e


def _working(job: Job) -> int:
    """The backward of one layer."""
    widths, e = Widths.of(job.shape, job.layout.tensor), job.e
    # Gradients of the MLP's product, of silu(gate), of gate and up together [T, 4F] and of its input, of the residual
    # and of the gathered input [T, 3H].
    moving = job.most_tokens * (4 * widths.mlp + 3 * widths.hidden) * e
    # Gradient of the largest weight before it is added to the float32 buffer [2F, H].
    largest = 2 * widths.mlp * widths.hidden * e
    return (
        moving
        + largest
        + recompute_bytes(job.shape, job.most_tokens, job.parallel, job.dtype, experts=job.model.num_expert_layers > 0)
    )


def engine_bytes(job: Job) -> int:
    """The embedded engine on rank 0: whole weights, the output layer in float32, and a cache of full length a slot."""
    tokens = _cached_tokens(job.recipe) if job.assumed.engine == "embedded" else 0
    if not tokens:
        return 0
    head = 4 * job.shape.vocab_size * job.shape.hidden_size if job.dtype == "bfloat16" else 0
    return job.model.total * job.e + head + tokens * cache_bytes_per_token(job.shape, job.e)


def _cached_tokens(recipe: Recipe) -> int:
    """Room in the engine's cache; 0 for a run that never samples."""
    if isinstance(recipe, RlRecipe):
        longest = recipe.data.max_prompt_len + recipe.rollout.rollout_max_response_len
        return recipe.rollout.max_running_requests * longest
    if recipe.eval.prompt_data is None:
        return 0
    return SFT_EVALUATION_SLOTS * (MEAN_PROMPT + recipe.eval.max_response_len)


def cache_bytes_per_token(shape: Qwen3Shape, e: int) -> int:
    """Keys and values of all layers."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * e
