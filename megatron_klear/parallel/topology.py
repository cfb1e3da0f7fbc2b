"""Process groups. The only importer of Megatron's parallel_state: others get `Topology` or a group by value."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.errors import ConfigError
from megatron_klear.parallel.device import Device, megatron_scope, pick_device
from megatron_klear.types import Topology


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups this rank belongs to."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    replicas: dist.ProcessGroup
    """The ranks that hold the same part of the model and of their sequences, one a replica."""
    data: dist.ProcessGroup
    """The ranks that hold the same part of the model: all over which losses and gradients are summed."""
    replica: dist.ProcessGroup
    """Those that see the same samples: a copy of the model for each context rank."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Where this rank stands, whom it can talk to, and on which device."""

    topology: Topology
    groups: Groups
    device: Device

    @property
    def is_main(self) -> bool:
        """True on the rank that samples, packs, logs and writes."""
        return self.topology.rank == 0


@contextlib.contextmanager
def parallel_context(config: ParallelConfig) -> Iterator[ParallelContext]:
    """Join the other ranks (torchrun's RANK, WORLD_SIZE, MASTER_*; alone without them); leave on exit."""
    rank, world_size, local_rank = (int(os.environ.get(k, d)) for k, d in _ENV_DEFAULTS)
    _check_world_size(world_size, config)
    # Megatron overlaps tensor-parallel communication by the order of kernel launches; CUDA reads this when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = pick_device(local_rank)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if world_size == 1:
        # An in-memory store: one process needs no port, so several runs can share a machine.
        dist.init_process_group(device.backend, rank=0, world_size=1, store=HashStore(), timeout=timeout)
    else:
        dist.init_process_group(device.backend, rank=rank, world_size=world_size, timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            # Experts are not split over tensor ranks: each is whole on one rank of its group.
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=config.distributed_timeout_minutes,
        )
        with megatron_scope(device):
            # Nothing here draws from these states (no dropout, weights are imported), but Megatron asks for them.
            model_parallel_cuda_manual_seed(_MEGATRON_SEED)
        yield ParallelContext(_topology(rank, world_size), _groups(config, world_size), device)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


_MEGATRON_SEED = 1
_ENV_DEFAULTS = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _check_world_size(world_size: int, config: ParallelConfig) -> None:
    sizes = (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size)
    model_size = math.prod(sizes)
    if world_size % model_size:
        raise ConfigError(
            f"{world_size} ranks were started, but tensor_model_parallel_size {sizes[0]} x"
            f" pipeline_model_parallel_size {sizes[1]} x context_parallel_size {sizes[2]} = {model_size} does not"
            " divide that;"
            f" start a multiple of {model_size} ranks or change parallel.*"
        )
    stages = config.pipeline_model_parallel_size
    stage_size = world_size // stages
    if stage_size % config.expert_model_parallel_size:
        raise ConfigError(
            f"expert_model_parallel_size {config.expert_model_parallel_size} does not divide the {stage_size} ranks of"
            f" a pipeline stage ({world_size} ranks / pipeline_model_parallel_size {stages})"
        )


def _topology(rank: int, world_size: int) -> Topology:
    return Topology(
        rank=rank,
        world_size=world_size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def _replica_group(config: ParallelConfig, world_size: int) -> dist.ProcessGroup:
    """Megatron has no group of tensor x context x pipeline ranks."""
    sizes = (config.tensor_model_parallel_size, config.context_parallel_size, config.pipeline_model_parallel_size)
    tensor, context, pipeline = sizes
    generator = parallel_state.RankGenerator(
        tp=tensor, ep=1, dp=world_size // math.prod(sizes), pp=pipeline, cp=context, order="tp-cp-ep-dp-pp"
    )
    own: dist.ProcessGroup | None = None
    for ranks in generator.get_ranks("tp-cp-pp"):
        # Every rank must make every group.
        group = dist.new_group(ranks)
        if isinstance(group, dist.ProcessGroup):
            own = group
    assert own is not None, "every rank is in one of them"
    return own


def _groups(config: ParallelConfig, world_size: int) -> Groups:
    def real(group: object) -> dist.ProcessGroup:
        assert isinstance(group, dist.ProcessGroup), f"expected this rank to be in the group, got {group}"
        return group

    return Groups(
        tensor=real(parallel_state.get_tensor_model_parallel_group()),
        pipeline=real(parallel_state.get_pipeline_model_parallel_group()),
        context=real(parallel_state.get_context_parallel_group()),
        replicas=real(parallel_state.get_data_parallel_group()),
        data=real(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        replica=_replica_group(config, world_size),
    )
