"""Other settings of the same recipe: the smallest change that fits, and the fastest layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_klear.config.recipe import RlRecipe
from megatron_klear.errors import ConfigError
from megatron_klear.launch.job import Job, job_of
from megatron_klear.launch.predict import Prediction, predict
from megatron_klear.launch.variants import changed, difference, is_allowed

_TP = "parallel.tensor_model_parallel_size"
_SP = "parallel.sequence_parallel"
_PP = "parallel.pipeline_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"
_CP = "parallel.context_parallel_size"
_EP = "parallel.expert_model_parallel_size"
_TOKENS = "batch.max_tokens_per_gpu"
_SLOTS = "rollout.max_running_requests"
_RECOMPUTE = tuple(f"parallel.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
_NONE: dict[str, Any] = dict.fromkeys(_RECOMPUTE)
_FULL = {**_NONE, _RECOMPUTE[0]: "full"}
# Of the modules, core_attn saves nothing with fused attention, and Megatron 0.16 recomputes norms with Transformer
# Engine alone.
_SELECTIVE = {**_NONE, _RECOMPUTE[0]: "selective", _RECOMPUTE[3]: ("mlp",)}


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings that differ from the recipe's, and what they give."""

    changes: dict[str, Any]
    prediction: Prediction


def try_changes(job: Job, changes: dict[str, Any]) -> Variant | None:
    """What the recipe would give with these settings; None if they cannot be."""
    recipe, num_gpus = changed(job.recipe, changes), job.layout.num_gpus
    try:
        other = job_of(recipe, job.shape, job.gpu, num_gpus, job.assumed, model=job.model)
    except ConfigError:
        return None
    if not is_allowed(recipe, num_gpus):
        return None
    return Variant(difference(job.recipe, recipe, changes), predict(other))


def smallest_change(prediction: Prediction) -> Variant | None:
    """The fewest settings, of a list, that make it fit; of as many, those with the fastest step. None if none does."""
    job = prediction.job
    single = [*_memory_settings(job), *_more_ranks(job)]
    slots = list(_fewer_slots(job)) if prediction.memory[0].engine else []
    pairs = list(_pairs(single, single))
    for choices in ([*single, *slots], [*pairs, *_pairs(single, slots)], _pairs(pairs, slots)):
        fitting = [v for v in (try_changes(job, changes) for changes in choices) if v is not None and v.prediction.fits]
        if fitting:
            return min(fitting, key=lambda variant: variant.prediction.time.total)
    return None


def _pairs(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Both changes together, unless they set the same thing."""
    for one, other in itertools.product(first, second):
        if not one.keys() & other.keys():
            yield {**one, **other}


def _memory_settings(job: Job) -> Iterator[dict[str, Any]]:
    parallel = job.parallel
    if not parallel.use_distributed_optimizer and job.layout.replicas > 1:
        yield {"parallel.use_distributed_optimizer": None}
    if parallel.recompute_granularity is None:
        yield _SELECTIVE
    if parallel.recompute_granularity != "full":
        yield _FULL
    needed = -(-job.work.longest_sample // job.layout.context)
    if needed < job.recipe.batch.max_tokens_per_gpu:
        yield {_TOKENS: needed}


def _more_ranks(job: Job) -> Iterator[dict[str, Any]]:
    layout = job.layout
    for factor in (2, 4, 8):
        yield {_TP: layout.tensor * factor, _SP: True}
        yield {_PP: layout.pipeline * factor}
        size = layout.context * factor
        # Each rank holds that much less of the longest sample.
        yield {_CP: size, _TOKENS: -(-job.work.longest_sample // size)}
    if not job.recipe.optimizer.optimizer_cpu_offload:
        yield {"optimizer.optimizer_cpu_offload": True}


def _fewer_slots(job: Job) -> Iterator[dict[str, Any]]:
    if isinstance(job.recipe, RlRecipe):
        slots = job.recipe.rollout.max_running_requests // 2
        while slots:
            yield {_SLOTS: slots}
            slots //= 2


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found: `fitting` from the fastest to the slowest."""

    fitting: tuple[Variant, ...]
    num_tried: int
    num_allowed: int


def search_layouts(job: Job) -> Search:
    """All layouts in powers of two that the rules allow, by trained tokens a second."""
    grid = list(_grid(job))
    allowed = [variant for variant in (try_changes(job, changes) for changes in grid) if variant is not None]
    fitting = [variant for variant in allowed if variant.prediction.fits]
    # Of equals the simplest, which the grid lists first.
    fitting.sort(key=lambda variant: -variant.prediction.tokens_per_s)
    return Search(tuple(fitting), len(grid), len(allowed))


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]


def _grid(job: Job) -> Iterator[dict[str, Any]]:
    num_gpus, experts = job.layout.num_gpus, job.shape.num_experts
    tensors = _powers(min(num_gpus, job.gpu.per_node))
    pipelines = _powers(min(num_gpus, job.shape.num_hidden_layers))
    contexts = _powers(min(num_gpus, 16))
    for tp, pp, cp in itertools.product(tensors, pipelines, contexts):
        if num_gpus % (tp * pp * cp):
            continue
        ranks = {_TP: tp, _PP: pp, _CP: cp, _SP: True if tp > 1 else None}
        for ep, vpp in itertools.product(_powers(min(experts, num_gpus // pp)), (None, 2, 4)):
            if vpp is not None and pp == 1:
                continue
            for recompute, tokens in itertools.product((_NONE, _SELECTIVE, _FULL), _budgets(job, cp)):
                yield {**ranks, _EP: ep if ep > 1 else None, _VPP: vpp, **recompute, _TOKENS: tokens}


def _budgets(job: Job, context: int) -> list[int]:
    """Tokens of a micro-batch: as the recipe says, and just enough for the longest sample."""
    given = job.recipe.batch.max_tokens_per_gpu
    return sorted({given, min(given, -(-job.work.longest_sample // context))}, reverse=True)
