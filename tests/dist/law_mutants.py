"""Ways to get a layout wrong. Each changes this rank's process for good, and gives the loss to learn from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

import megatron_klear.models.build as build_module
import megatron_klear.models.qwen3.attention as attention_module
import megatron_klear.parallel.context as context_module
import megatron_klear.training.head as head_module
import megatron_klear.training.learner as learner_module
from megatron_klear.metrics import results
from megatron_klear.parallel.context import GatherRows, SumOverRanks
from megatron_klear.protocols import PolicyLoss
from megatron_klear.training.learner import Learner
from megatron_klear.types import LossOutput, MicroBatch, TokenStats

# Not an import statement: the package has a function of the module's name.
finalize_module = importlib.import_module("megatron.core.distributed.finalize_model_grads")

Mutant = Callable[[Learner, PolicyLoss], PolicyLoss]


def _put(holder: object, name: str, value: object) -> None:
    """Replace an attribute by one of another type, which is the point."""
    setattr(holder, name, value)


def _right(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    return loss


def _times_data_size(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """A loss for a trainer that averages gradients over the replicas, in one that sums them."""
    size = learner.context.topology.data_size

    def wrong(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        output = loss(stats, micro_batch)
        return LossOutput(output.loss * size, output.metrics)

    return wrong


def _two_tuple(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Megatron divides a 2-tuple's loss by the number of micro-batches."""

    def two_tuple(summed: Tensor, report: object) -> tuple[Tensor, object]:
        # The schedule divides in place what it is given, and the report holds the undivided loss.
        return summed.clone(), report

    _put(learner_module, "loss_tuple", two_tuple)
    return loss


def _replicas_apart(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Gradients that are not summed over the replicas."""
    for ddp in learner.ddps:
        _put(ddp, "finish_grad_sync", lambda *args, **kwargs: None)
    return loss


def _metrics_apart(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Each replica reports its own metrics."""
    _put(learner_module, "reduce_metrics", lambda metrics, context: results(metrics))
    return loss


def _unmarked_norms(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Norm weights whose gradient is not summed over the ranks of sequence parallelism."""
    for name, parameter in learner.stage.named_parameters():
        if "layernorm" in name:
            _put(parameter, "sequence_parallel", False)
    return loss


def _unmarked_shards(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Sharded weights that pass for replicated ones."""
    for parameter in learner.stage.parameters():
        _put(parameter, "tensor_model_parallel", False)
    return loss


def _head_alone(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """The head's gradient of the hidden states is not summed over the vocabulary's shards."""
    _put(head_module, "copy_to_tensor_model_parallel_region", lambda hidden: hidden)
    return loss


def _head_unheard(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Megatron is told that main_grad has the output weight's gradient, which only autograd has."""
    mark = head_module._mark
    _put(head_module, "_main_grad", lambda weight: None)
    _put(head_module, "_mark", lambda weight, *, added: mark(weight, added=True))
    return loss


def _tied_copies_apart(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """First and last stage each keep their own gradient of the embedding they share."""
    _put(finalize_module, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)
    return loss


def _values_summed(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """The value head's gradient of the hidden states is summed over ranks that all computed the whole of it."""
    gather = build_module.gather_from_sequence_parallel_region

    def wrong(hidden: Tensor, **_kwargs: Any) -> Tensor:
        return gather(hidden, tensor_parallel_output_grad=True)

    _put(build_module, "gather_from_sequence_parallel_region", wrong)
    return loss


def _local_sft_count(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """alpha / (tokens of right samples in THIS micro-batch) instead of all of them."""

    def wrong(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        kept, right = micro_batch.nll_scale, micro_batch.nll_scale != 0
        micro_batch.nll_scale = torch.where(right, 0.1 / right.sum().clamp(min=1), 0.0)
        output = loss(stats, micro_batch)
        micro_batch.nll_scale = kept
        return output

    return wrong


def _sequences_counted_locally(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """A mean over the sequences of THIS micro-batch, as in code that aggregates inside the loss."""

    def wrong(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        kept, mask = micro_batch.token_scale, micro_batch.token_scale != 0
        counted = micro_batch.sequence_ids[mask].unique().numel()
        micro_batch.token_scale = mask / max(counted, 1)
        output = loss(stats, micro_batch)
        micro_batch.token_scale = kept
        return output

    return wrong


def _keys_by_rank(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """Gathered keys and values taken for those of the packed micro-batch, in its order."""
    _put(attention_module, "gather_order", lambda cu_seqlens, size: torch.arange(int(cu_seqlens[-1])))
    return loss


class _OwnGradientOnly(GatherRows):
    """Each rank keeps what its own queries say of its keys."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None


def _keys_gradient_alone(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    _put(attention_module, "GatherRows", _OwnGradientOnly)
    return loss


class _NoSum(SumOverRanks):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _own_totals(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """The mean over a sequence taken over the positions of this rank."""
    _put(context_module, "SumOverRanks", _NoSum)
    return loss


def _weights_apart(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    """No gathering of weights where there is one replica, although its context ranks share the optimizer."""

    def start_param_sync(ddp: Any, *args: Any, **kwargs: Any) -> None:
        if ddp.dp_group.size() > 1:
            DistributedDataParallel.start_param_sync(ddp, *args, **kwargs)

    _put(type(learner.ddps[0]), "start_param_sync", start_param_sync)
    return loss


def _batched_messages(learner: Learner, loss: PolicyLoss) -> PolicyLoss:
    learner.stage.core.config.batch_p2p_comm = True
    return loss


MUTANTS: dict[str, Mutant] = {
    "": _right,
    "loss times the data-parallel size": _times_data_size,
    "loss divided by the number of micro-batches": _two_tuple,
    "gradients not summed over replicas": _replicas_apart,
    "metrics not summed over replicas": _metrics_apart,
    "norm weights unmarked under sequence parallelism": _unmarked_norms,
    "shards unmarked as tensor-parallel": _unmarked_shards,
    "head not summed over tensor ranks": _head_alone,
    "head's own gradient taken for added": _head_unheard,
    "tied copies not summed over stages": _tied_copies_apart,
    "values summed over tensor ranks": _values_summed,
    "SFT tokens counted locally": _local_sft_count,
    "sequences counted locally": _sequences_counted_locally,
    "keys in the order of ranks": _keys_by_rank,
    "keys' gradient not summed over context ranks": _keys_gradient_alone,
    "sequence totals of own positions": _own_totals,
    "weights not gathered over context ranks": _weights_apart,
    "batched messages between virtual stages": _batched_messages,
}
