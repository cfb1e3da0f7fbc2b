"""What must hold between the sizes of a layout, the model's shape and the number of ranks; faults show the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from megatron_klear.config.layers import layers_by_stage
from megatron_klear.config.model import ModelConfig, Qwen3Shape
from megatron_klear.config.recipe import BatchConfig, ParallelConfig
from megatron_klear.errors import Fault

Faults = Iterator[Fault]

_TP = "parallel.tensor_model_parallel_size"
_PP = "parallel.pipeline_model_parallel_size"
_EP = "parallel.expert_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _tensor_sizes(shape: Qwen3Shape) -> str:
    # More ranks than KV heads share one, so these limit nothing as long as the sizes divide each other.
    heads = shape.num_key_value_heads
    common = gcd(shape.num_attention_heads, 0 if all(shape.moe_layers) else shape.intermediate_size)
    fitting = [size for size in range(1, common + 1) if common % size == 0 and (heads % size == 0 or size % heads == 0)]
    return f"sizes that fit this model: {', '.join(map(str, fitting))}"


def _heads_split_evenly(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    size = parallel.tensor_model_parallel_size
    if shape.num_attention_heads % size:
        yield Fault(_TP, size, f"does not divide num_attention_heads {shape.num_attention_heads}", _tensor_sizes(shape))


def _key_value_heads_split_evenly(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    size, heads = parallel.tensor_model_parallel_size, shape.num_key_value_heads
    if heads % size and size % heads:
        reason = f"neither divides num_key_value_heads {heads} nor is a multiple of it"
        yield Fault(_TP, size, reason, _tensor_sizes(shape))


def _mlp_splits_evenly(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    size = parallel.tensor_model_parallel_size
    # Experts are not split over tensor ranks.
    if not all(shape.moe_layers) and shape.intermediate_size % size:
        yield Fault(_TP, size, f"does not divide intermediate_size {shape.intermediate_size}", _tensor_sizes(shape))


def _layers_split(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    try:
        layers_by_stage(shape.num_hidden_layers, parallel)
    except ValueError as error:
        given = [f"{name} {value}" for name in _ENDS if (value := parallel.model_dump()[name]) is not None]
        if given or parallel.virtual_pipeline_model_parallel_size is not None:
            hint = "change " + ", ".join(["it", *given]) + " or the number of chunks"
        else:
            hint = f"sizes that fit this model: {_divisors(shape.num_hidden_layers)}"
        yield Fault(_PP, parallel.pipeline_model_parallel_size, str(error), hint)


def _stages_are_several(parallel: ParallelConfig) -> Faults:
    if parallel.pipeline_model_parallel_size > 1:
        return
    settings = parallel.model_dump()
    for name in (*_ENDS, "virtual_pipeline_model_parallel_size"):
        if settings[name] is not None:
            reason = "would have no effect: pipeline_model_parallel_size is 1"
            yield Fault(f"parallel.{name}", settings[name], reason, "leave it out, or raise the pipeline size")


def _chunks_are_several(parallel: ParallelConfig) -> Faults:
    if parallel.virtual_pipeline_model_parallel_size == 1:
        yield Fault(_VPP, 1, "would have no effect: one chunk a stage is the plain pipeline", "leave it out")


def _sequence_parallel_has_ranks(parallel: ParallelConfig) -> Faults:
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        reason = "would have no effect: it splits over the tensor-parallel ranks and tensor_model_parallel_size is 1"
        yield Fault("parallel.sequence_parallel", True, reason, "leave it out, or raise tensor_model_parallel_size")


def replica_size(parallel: ParallelConfig) -> int:
    """Ranks that see the same samples: tensor x pipeline x context."""
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return model * parallel.context_parallel_size


def _world_divides(parallel: ParallelConfig, world_size: int) -> Faults:
    ranks = replica_size(parallel)
    whole, rest = divmod(world_size, ranks)
    if rest or not whole:
        sizes = f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size}"
        if parallel.context_parallel_size > 1:
            sizes += f" x context {parallel.context_parallel_size}"
        reason = f"{sizes} = {ranks} ranks hold one copy of the model, and {world_size} = {whole} x {ranks} + {rest}"
        smaller = f"{whole * ranks} or " if whole else ""
        yield Fault("world_size", world_size, reason, f"use {smaller}{(whole + 1) * ranks} ranks")


def _batch_reaches_every_rank(batch: BatchConfig, parallel: ParallelConfig, world_size: int) -> Faults:
    data_size = world_size // replica_size(parallel)
    if batch.global_batch_size < data_size:
        reason = f"leaves some of the {data_size} data-parallel ranks without a sample"
        yield Fault("batch.global_batch_size", batch.global_batch_size, reason, f"at least {data_size}")


def _experts_split_evenly(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    size = parallel.expert_model_parallel_size
    if shape.is_moe and shape.num_experts % size:
        sizes = f"sizes that fit this model: {_divisors(shape.num_experts)}"
        yield Fault(_EP, size, f"does not divide num_experts {shape.num_experts}", sizes)


def _expert_settings_have_experts(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    if shape.is_moe:
        return
    reason = f"would have no effect: the model is a {shape.model_type}, which has no experts"
    for name in ("expert_model_parallel_size", "moe_token_dispatcher_type"):
        value = dict(parallel)[name]
        if value != ParallelConfig.model_fields[name].default:
            yield Fault(f"parallel.{name}", value, reason, "leave it out")


def _balance_loss_has_experts(model: ModelConfig, shape: Qwen3Shape) -> Faults:
    if model.moe_aux_loss_coeff > 0 and not shape.is_moe:
        reason = f"would have no effect: the model is a {shape.model_type}, which has no experts"
        yield Fault("model.moe_aux_loss_coeff", model.moe_aux_loss_coeff, reason, "leave it out")


def _tensor_parallel_experts_need_sequence_parallel(parallel: ParallelConfig, shape: Qwen3Shape) -> Faults:
    size = parallel.tensor_model_parallel_size
    if shape.is_moe and size > 1 and not parallel.sequence_parallel:
        reason = f"with experts and tensor_model_parallel_size {size} the tokens must be split over the tensor ranks"
        yield Fault("parallel.sequence_parallel", False, reason, "set it to true")


def _experts_fit_a_stage(parallel: ParallelConfig, world_size: int) -> Faults:
    size, stages = parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size
    stage, rest = divmod(world_size, stages)
    if rest == 0 and stage % size:
        reason = (
            f"does not divide the {stage} ranks of a pipeline stage ({world_size} ranks / {stages} stages),"
            " over which experts are shared"
        )
        yield Fault(_EP, size, reason, f"sizes that fit: {_divisors(stage)}")


PARALLEL_RULES: tuple[tuple[Callable[..., Faults], tuple[str, ...]], ...] = (
    (_heads_split_evenly, ("parallel", "shape")),
    (_key_value_heads_split_evenly, ("parallel", "shape")),
    (_mlp_splits_evenly, ("parallel", "shape")),
    (_layers_split, ("parallel", "shape")),
    (_stages_are_several, ("parallel",)),
    (_chunks_are_several, ("parallel",)),
    (_sequence_parallel_has_ranks, ("parallel",)),
    (_experts_split_evenly, ("parallel", "shape")),
    (_expert_settings_have_experts, ("parallel", "shape")),
    (_balance_loss_has_experts, ("model", "shape")),
    (_tensor_parallel_experts_need_sequence_parallel, ("parallel", "shape")),
    (_experts_fit_a_stage, ("parallel", "world_size")),
    (_world_divides, ("parallel", "world_size")),
    (_batch_reaches_every_rank, ("batch", "parallel", "world_size")),
)


def layout_faults(parallel: ParallelConfig, shape: Qwen3Shape, world_size: int) -> list[Fault]:
    """What is wrong with a layout of so many ranks, whatever the rest of the recipe."""
    facts: dict[str, object] = {"parallel": parallel, "shape": shape, "world_size": world_size}
    return [
        fault
        for rule, needs in PARALLEL_RULES
        if facts.keys() >= set(needs)
        for fault in rule(*(facts[name] for name in needs))
    ]
