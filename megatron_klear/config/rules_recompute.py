"""What must hold between the layers of a model and those that are computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_klear.config.layers import layers_by_stage
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.errors import Fault


def _recomputed_layers_fit(parallel: ParallelConfig, shape: Qwen3Shape) -> Iterator[Fault]:
    if parallel.recompute_granularity != "full":
        return
    try:
        stages = layers_by_stage(shape.num_hidden_layers, parallel)
    except ValueError:
        return  # a fault of the layout, which its own rule reports
    num, sizes = parallel.recompute_num_layers, sorted({len(chunk) for chunks in stages for chunk in chunks})
    key, what = "parallel.recompute_num_layers", _chunks(parallel, shape, sizes)
    if parallel.recompute_method == "block":
        if num > sizes[-1]:
            yield Fault(key, num, f"is more than there are: {what}", f"at most {sizes[-1]}")
    elif any(size % num for size in sizes):
        fitting = ", ".join(str(n) for n in range(1, sizes[0] + 1) if not any(size % n for size in sizes))
        yield Fault(key, num, f"does not divide what is there: {what}", f"numbers that fit: {fitting}")


def _chunks(parallel: ParallelConfig, shape: Qwen3Shape, sizes: list[int]) -> str:
    stages = parallel.pipeline_model_parallel_size
    chunks = stages * (parallel.virtual_pipeline_model_parallel_size or 1)
    if chunks == 1:
        return f"the model's {sizes[0]} layers"
    each = " or ".join(map(str, sizes))
    return f"{shape.num_hidden_layers} layers in {chunks} {'stages' if chunks == stages else 'chunks'}, each of {each}"


RECOMPUTE_RULES: tuple[tuple[Callable[..., Iterator[Fault]], tuple[str, ...]], ...] = (
    (_recomputed_layers_fit, ("parallel", "shape")),
)
