"""The prediction for one recipe on one layout: memory, time, traffic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_klear.config.recipe import RlRecipe
from megatron_klear.launch.compute import PassSeconds, backward_seconds, flops_per_token, forward_seconds
from megatron_klear.launch.decode import Rollout, rollout_of
from megatron_klear.launch.hardware import EFFICIENCIES
from megatron_klear.launch.job import Job
from megatron_klear.launch.memory import StageMemory, stage_memory
from megatron_klear.launch.parameters import rank_parameters
from megatron_klear.launch.traffic import (
    AXES,
    PassBytes,
    axis_speeds,
    backward_bytes,
    forward_bytes,
    update_bytes,
)

# Between a GPU and its host, one direction of PCIe 4 x16 as far as copies reach it.
HOST_BYTES_PER_S = 20e9
# Memory of the host that one rank's share of its cores streams.
HOST_MEMORY_BYTES_PER_S = 20e9
# Read gradient, main weight and two moments, write the last three and the weight.
OPTIMIZER_BYTES = 30


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """What one GPU sends over an axis in a step, on the stage that sends most."""

    axis: str
    group_size: int
    num_bytes: float
    bytes_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step."""

    rollout: float
    annotate: float
    """Passes without a gradient: old and reference log-probs, values."""
    train: float
    sync: float

    @property
    def total(self) -> float:
        """The whole step; its parts come one after the other."""
        return self.rollout + self.annotate + self.train + self.sync


@dataclass(frozen=True, slots=True)
class Prediction:
    """All numbers of a plan."""

    job: Job
    memory: tuple[StageMemory, ...]
    rollout: Rollout | None
    time: StepTime
    traffic: tuple[AxisTraffic, ...]
    micro_batch_s: float
    """Forward and backward of one micro-batch on the slowest stage."""
    work_share: dict[str, float]
    """Share of each kind of work in a micro-batch on the slowest stage, forward and backward."""
    bubble: float
    """Waiting of the pipeline, as a share of the time it works: (p - 1) / (m v)."""
    flops_per_token: float

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.fits for stage in self.memory)

    @property
    def fullest(self) -> StageMemory:
        """The stage with the least room left."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second of the whole step, all GPUs together."""
        return self.job.work.tokens_per_step / self.time.total

    @property
    def train_mfu(self) -> float:
        """Model FLOPs of the updates over what the GPUs could do meanwhile."""
        flops = self.job.work.tokens_per_step * self.flops_per_token
        return flops / (self.time.train * self.job.layout.num_gpus * self.job.gpu.bf16_flops)

    def numbers(self) -> dict[str, Any]:
        """Everything as plain data."""
        job = self.job
        stages = [asdict(stage) | {"total": stage.total, "fits": stage.fits} for stage in self.memory]
        return {
            "gpu": asdict(job.gpu),
            "num_gpus": job.layout.num_gpus,
            "layout": asdict(job.layout) | {"name": str(job.layout)},
            "parameters": job.model.total,
            "assumptions": asdict(job.assumed),
            "efficiencies": asdict(EFFICIENCIES),
            "workload": asdict(job.work) | {"tokens_per_step": job.work.tokens_per_step},
            "micro_batches": asdict(job.packed),
            "fits": self.fits,
            "stages": stages,
            "rollout": asdict(self.rollout) if self.rollout else None,
            "seconds": asdict(self.time) | {"total": self.time.total},
            "micro_batch_seconds": self.micro_batch_s,
            "work_share": self.work_share,
            "bubble": self.bubble,
            "traffic": [asdict(axis) for axis in self.traffic],
            "flops_per_token": self.flops_per_token,
            "tokens_per_s": self.tokens_per_s,
            "train_mfu": self.train_mfu,
        }


@dataclass(frozen=True, slots=True)
class _Stage:
    """One micro-batch on one stage."""

    forward: PassSeconds
    backward: PassSeconds
    forward_bytes: PassBytes
    backward_bytes: PassBytes

    def links(self, moved: PassBytes, speeds: dict[str, float]) -> dict[str, float]:
        """Seconds on each link, none of them hidden behind arithmetic."""
        return {axis: num_bytes / speeds[axis] for axis, num_bytes in asdict(moved).items()}

    def forward_total(self, speeds: dict[str, float]) -> float:
        """Seconds of a forward."""
        return self.forward.total + sum(self.links(self.forward_bytes, speeds).values())

    def total(self, speeds: dict[str, float]) -> float:
        """Seconds of a forward and its backward."""
        return self.forward_total(speeds) + self.backward.total + sum(self.links(self.backward_bytes, speeds).values())


def predict(job: Job) -> Prediction:
    """Memory, time and traffic of a step."""
    speeds = axis_speeds(job)
    stages = [
        _Stage(forward_seconds(job, i), backward_seconds(job, i), forward_bytes(job, i), backward_bytes(job, i))
        for i in range(job.layout.pipeline)
    ]
    slowest = max(stages, key=lambda stage: stage.total(speeds))
    rollout = rollout_of(job)
    time = StepTime(
        rollout=rollout.seconds if rollout else 0.0,
        annotate=_annotate_seconds(job, max(stage.forward_total(speeds) for stage in stages)),
        train=_train_seconds(job, slowest.total(speeds), speeds["data"]),
        sync=_sync_seconds(job),
    )
    return Prediction(
        job=job,
        memory=tuple(stage_memory(job)),
        rollout=rollout,
        time=time,
        traffic=tuple(_traffic(job, stages, speeds)),
        micro_batch_s=slowest.total(speeds),
        work_share=_work_share(slowest, speeds),
        bubble=(job.layout.pipeline - 1) / (job.packed.count * job.layout.chunks),
        flops_per_token=flops_per_token(job),
    )


def _pipelined(job: Job, seconds: float) -> float:
    """Time of all micro-batches of an update through the pipeline, the slowest stage setting the pace."""
    return (job.packed.count + (job.layout.pipeline - 1) / job.layout.chunks) * seconds


def _annotate_seconds(job: Job, forward: float) -> float:
    passes = job.work.num_forward_passes + job.work.has_critic
    seconds = passes * job.work.num_updates * _pipelined(job, forward)
    if isinstance(job.recipe, RlRecipe) and job.recipe.kl.kl_coef > 0:
        # The reference's weights come from the host, the policy's go there and back.
        weights = max(rank_parameters(job.shape, job.model, job.layout, i).total for i in range(job.layout.pipeline))
        seconds += 3 * weights * job.e / HOST_BYTES_PER_S
    return seconds


def _train_seconds(job: Job, micro_batch: float, data_speed: float) -> float:
    sent = max(update_bytes(job, i) for i in range(job.layout.pipeline))
    one = _pipelined(job, micro_batch) + sent / data_speed + _optimizer_seconds(job)
    # A critic is a second model of the same size.
    return job.work.num_updates * one * (1 + job.work.has_critic)


def _optimizer_seconds(job: Job) -> float:
    shards = job.layout.replicas if job.parallel.use_distributed_optimizer else 1
    parameters = max(rank_parameters(job.shape, job.model, job.layout, i).total for i in range(job.layout.pipeline))
    stepped = parameters / shards
    if job.recipe.optimizer.optimizer_cpu_offload:
        return stepped * ((4 + job.e) / HOST_BYTES_PER_S + OPTIMIZER_BYTES / HOST_MEMORY_BYTES_PER_S)
    return stepped * OPTIMIZER_BYTES / (job.gpu.hbm_bytes_per_s * EFFICIENCIES.hbm)


def _sync_seconds(job: Job) -> float:
    """Weights are gathered tensor by tensor on rank 0, and go from there to the engines."""
    if not job.work.num_responses:
        return 0.0
    in_node = job.layout.num_gpus <= job.gpu.per_node
    link = job.gpu.nvlink_bytes_per_s * EFFICIENCIES.nvlink
    speed = link if in_node else job.gpu.network_bytes_per_s * EFFICIENCIES.network
    copies = 1 if job.assumed.engine == "embedded" else 2
    return copies * job.model.total * job.e / speed


def _traffic(job: Job, stages: list[_Stage], speeds: dict[str, float]) -> list[AxisTraffic]:
    layout, work = job.layout, job.work
    passes = work.num_updates * job.packed.count
    sizes = {
        "tensor": layout.tensor,
        "context": layout.context,
        "expert": layout.expert,
        "pipeline": layout.pipeline,
        "data": layout.replicas,
    }

    def moved(axis: str) -> float:
        if axis == "data":
            return work.num_updates * max(update_bytes(job, i) for i in range(layout.pipeline))
        both = [(asdict(stage.forward_bytes)[axis], asdict(stage.backward_bytes)[axis]) for stage in stages]
        return max((1 + work.num_forward_passes) * passes * one + passes * other for one, other in both)

    rows = [AxisTraffic(axis, sizes[axis], moved(axis), speeds[axis], moved(axis) / speeds[axis]) for axis in AXES]
    if work.num_responses:
        num_bytes = float(job.model.total * job.e)
        rows.append(AxisTraffic("sync", layout.num_gpus, num_bytes, num_bytes / _sync_seconds(job), _sync_seconds(job)))
    return rows


def _work_share(stage: _Stage, speeds: dict[str, float]) -> dict[str, float]:
    forward, backward = asdict(stage.forward), asdict(stage.backward)
    links = stage.links(stage.forward_bytes, speeds), stage.links(stage.backward_bytes, speeds)
    seconds = {kind: forward[kind] + backward[kind] for kind in forward}
    seconds |= {f"{axis} links": links[0][axis] + links[1][axis] for axis in links[0]}
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items() if value}
