"""Bytes that each GPU sends over the links, by axis, for one micro-batch and one update."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.launch.activations import Widths
from megatron_klear.launch.hardware import EFFICIENCIES, link_bytes_per_s
from megatron_klear.launch.job import Job
from megatron_klear.launch.parameters import rank_parameters

AXES = {
    "tensor": "sums of activations after each attention and MLP",
    "context": "keys and values of the other ranks' tokens, and their gradients",
    "expert": "tokens to their experts and back",
    "pipeline": "activations to the next stage, gradients to the one before",
    "data": "sum of the gradients, then the updated weights",
}


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Bytes of one micro-batch on one rank of a stage, forward or backward."""

    tensor: float
    context: float
    expert: float
    pipeline: float


def again_fraction(job: Job) -> float:
    """Share of a stage's layers whose whole forward runs again in the backward."""
    parallel = job.parallel
    if parallel.recompute_granularity != "full":
        return 0.0
    if parallel.recompute_method == "uniform":
        return 1.0
    most = max(len(layers) for layers in job.layout.stages)
    return min(1.0, parallel.recompute_num_layers / most)


def forward_bytes(job: Job, stage: int) -> PassBytes:
    """Bytes a rank sends in the forward of one micro-batch."""
    layout, layers = job.layout, len(job.layout.stages[stage])
    hidden = job.tokens * job.shape.hidden_size * job.e
    ring = (layout.tensor - 1) / layout.tensor
    expert = _expert_bytes(job, job.num_expert_layers(stage), hidden / layout.tensor)
    # After attention and after the MLP an all-reduce, or a reduce-scatter and an all-gather: 2 rings of [T, H] each.
    # One more for the embedding on the first stage.
    tensor = (2 * layers + (stage == 0)) * 2 * ring * hidden
    key = Widths.of(job.shape, layout.tensor).key
    context = layers * (layout.context - 1) * job.tokens * 2 * key * job.e
    is_last = stage == layout.pipeline - 1
    sent = layout.chunks - is_last if layout.pipeline > 1 else 0
    return PassBytes(tensor, context, expert, sent * hidden / layout.sequence_shards)


def backward_bytes(job: Job, stage: int) -> PassBytes:
    """Bytes a rank sends in the backward of one micro-batch, those of computing again included."""
    layout, layers = job.layout, len(job.layout.stages[stage])
    forward, again = forward_bytes(job, stage), again_fraction(job)
    hidden = job.tokens * job.shape.hidden_size * job.e
    ring = (layout.tensor - 1) / layout.tensor
    gradients = (2 * layers + (stage == layout.pipeline - 1)) * 2 * ring * hidden
    # Under sequence parallelism the inputs of both column-parallel layers were kept in parts and are gathered again.
    regathered = 2 * layers * ring * hidden if job.parallel.sequence_parallel else 0.0
    sent = layout.chunks - (stage == 0) if layout.pipeline > 1 else 0
    return PassBytes(
        tensor=gradients + regathered + again * forward.tensor,
        context=(1 + again) * forward.context,
        expert=(1 + again) * forward.expert,
        pipeline=sent * hidden / layout.sequence_shards,
    )


def _expert_bytes(job: Job, layers: int, hidden: float) -> float:
    size = job.layout.expert
    if size == 1 or not layers:
        return 0.0
    if job.parallel.moe_token_dispatcher_type == "allgather":
        return layers * 2 * (size - 1) * hidden
    chosen = int(job.shape.model_dump()["num_experts_per_tok"])
    # There and back, the share that is not on this rank, under even routing.
    return layers * 2 * chosen * hidden * (size - 1) / size


def update_bytes(job: Job, stage: int) -> float:
    """Bytes a rank sends over the data-parallel axis in one update: gradients in float32, then weights."""
    parameters, layout = rank_parameters(job.shape, job.model, job.layout, stage), job.layout
    # Sharded: reduce-scatter of float32 gradients and all-gather of weights; else an all-reduce of the gradients.
    each = 4 + job.e if job.parallel.use_distributed_optimizer else 8
    dense = parameters.dense * (layout.replicas - 1) / layout.replicas
    experts = parameters.experts * (layout.expert_replicas - 1) / layout.expert_replicas
    return each * (dense + experts)


def axis_speeds(job: Job) -> dict[str, float]:
    """Bytes a second on each axis, by where its ranks stand: neighbours are `stride` ranks apart."""
    layout, gpu = job.layout, job.gpu
    return {
        "tensor": link_bytes_per_s(gpu, group_size=layout.tensor, stride=1),
        "context": link_bytes_per_s(gpu, group_size=layout.context, stride=layout.tensor),
        "expert": link_bytes_per_s(gpu, group_size=layout.expert, stride=1),
        "pipeline": gpu.nvlink_bytes_per_s * EFFICIENCIES.nvlink
        if layout.num_gpus <= gpu.per_node
        else gpu.network_bytes_per_s * EFFICIENCIES.network,
        "data": link_bytes_per_s(gpu, group_size=layout.replicas, stride=layout.tensor),
    }
