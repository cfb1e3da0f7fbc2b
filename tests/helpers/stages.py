"""A whole model on one rank, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import ModelStage, build_stage
from megatron_klear.models.hf_bridge import TensorSource, import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel import topology
from megatron_klear.parallel.device import Device, megatron_scope
from megatron_klear.parallel.topology import ParallelContext, parallel_context


@contextlib.contextmanager
def cpu_context() -> Iterator[ParallelContext]:
    """A parallel context of this one process, on the CPU even where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "pick_device", lambda _local_rank: Device("cpu"))
        with parallel_context(ParallelConfig()) as context:
            yield context


def source_of(tensors: Mapping[str, Tensor]) -> TensorSource:
    """A source as `import_weights` takes it."""

    def get(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"no tensor {name}")
        return tensors[name]

    return get


def stage_on_cpu(shape: Qwen3Shape, tensors: Mapping[str, Tensor], context: ParallelContext) -> ModelStage:
    """The stage with these weights, in float32."""
    with megatron_scope(context.device):
        stage = build_stage(shape, ParallelConfig(), context.topology, dtype=torch.float32, on_cpu=True)
    import_weights(stage, qwen3_table(shape), source_of(tensors))
    return stage
