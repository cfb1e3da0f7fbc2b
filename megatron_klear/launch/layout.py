"""How the ranks of a run share the model and the data, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.config.layers import layers_by_stage
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.config.rules_parallel import layout_faults, replica_size
from megatron_klear.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes, in Megatron's order of ranks (tensor innermost, then context, data, pipeline)."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    chunks: int
    """Chunks of layers on each pipeline rank (virtual pipeline); 1 without."""
    sequence_parallel: bool
    stages: tuple[tuple[int, ...], ...]
    """Which layers each pipeline rank holds, from 0."""

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard of a weight: gradients are summed, and optimizer state shared, over them."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.tensor * self.replicas // self.expert)

    @property
    def sequence_shards(self) -> int:
        """Into how many parts the tensors between the linear layers are cut."""
        return self.tensor if self.sequence_parallel else 1

    def __str__(self) -> str:
        """Short, as in tp4 pp1 cp1 dp64 sp."""
        parts = [f"tp{self.tensor}", f"pp{self.pipeline}", f"cp{self.context}", f"dp{self.data}"]
        parts += [f"ep{self.expert}"] if self.expert > 1 else []
        parts += [f"vpp{self.chunks}"] if self.chunks > 1 else []
        return " ".join([*parts, *(["sp"] if self.sequence_parallel else [])])


def layout_of(parallel: ParallelConfig, shape: Qwen3Shape, num_gpus: int) -> Layout:
    """The layout on so many GPUs. Raises `ConfigError` with the arithmetic of what does not divide."""
    faults = layout_faults(parallel, shape, num_gpus)
    if faults:
        raise ConfigError("\n  ".join([f"this layout cannot run on {num_gpus} GPUs:", *map(str, faults)]), faults)
    stages = layers_by_stage(shape.num_hidden_layers, parallel)
    return Layout(
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
        data=num_gpus // replica_size(parallel),
        pipeline=parallel.pipeline_model_parallel_size,
        expert=parallel.expert_model_parallel_size,
        chunks=parallel.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=parallel.sequence_parallel,
        stages=tuple(tuple(layer for chunk in own for layer in chunk) for own in stages),
    )
