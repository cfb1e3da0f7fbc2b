"""All that a prediction depends on, worked out once."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig, Recipe
from megatron_klear.launch.activations import BYTES, saved_activation_bytes
from megatron_klear.launch.hardware import Gpu
from megatron_klear.launch.layout import Layout, layout_of
from megatron_klear.launch.parameters import ModelParameters, count_parameters
from megatron_klear.launch.workload import Assumptions, Packed, Workload, packed, workload_of


@dataclass(frozen=True, slots=True)
class Job:
    """A recipe on a number of GPUs."""

    recipe: Recipe
    shape: Qwen3Shape
    model: ModelParameters
    gpu: Gpu
    layout: Layout
    assumed: Assumptions
    work: Workload
    packed: Packed
    """Micro-batches of an update, of mean lengths."""

    @property
    def parallel(self) -> ParallelConfig:
        """The recipe's section."""
        return self.recipe.parallel

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        return self.recipe.model.params_dtype

    @property
    def e(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.dtype]

    def num_expert_layers(self, stage: int) -> int:
        """Layers of a stage that have experts."""
        return sum(self.model.layers[i].experts > 0 for i in self.layout.stages[stage])

    def saved_bytes(self, stage: int, tokens: int, parallel: ParallelConfig) -> int:
        """Activations that the layers of a stage keep of one micro-batch."""
        return saved_activation_bytes(
            self.shape,
            tokens,
            parallel,
            self.dtype,
            num_layers=len(self.layout.stages[stage]),
            num_expert_layers=self.num_expert_layers(stage),
        )

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank, as expected."""
        return self.packed.tokens / self.layout.context

    @property
    def samples_per_replica(self) -> int:
        """Samples of an update on a data-parallel rank."""
        return -(-self.work.num_samples // (self.work.num_updates * self.layout.data))

    @property
    def most_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, at worst: the limit, unless all samples together are less."""
        longest = -(-self.samples_per_replica * self.work.longest_sample // self.layout.context)
        return min(self.recipe.batch.max_tokens_per_gpu, longest)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of an update on a rank, at worst: each sample its own."""
        return max(self.packed.count, self.samples_per_replica)


def job_of(
    recipe: Recipe,
    shape: Qwen3Shape,
    gpu: Gpu,
    num_gpus: int,
    assumed: Assumptions,
    *,
    model: ModelParameters | None = None,
) -> Job:
    """Raises `ConfigError` for a layout that does not divide and for assumptions the recipe rules out."""
    layout = layout_of(recipe.parallel, shape, num_gpus)
    work = workload_of(recipe, assumed)
    budget = recipe.batch.max_tokens_per_gpu * layout.context
    multiple = layout.sequence_shards * (2 * layout.context if layout.context > 1 else 1)
    # The interleaved schedule counts micro-batches in pipeline sizes.
    counted_in = layout.pipeline if layout.chunks > 1 else 1
    fitted = packed(work.samples_of_update(), layout.data, budget, multiple=multiple, counted_in=counted_in)
    return Job(recipe, shape, model or count_parameters(shape), gpu, layout, assumed, work, fitted)
