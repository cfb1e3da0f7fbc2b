"""Micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_klear.models.build import ModelStage
from megatron_klear.types import MicroBatch

LossOf = Callable[[MicroBatch], Callable[..., Any]]
"""Makes a micro-batch's loss function: hidden -> `scale.loss_tuple(...)`, or (hidden, non_loss_data=True) -> anything
when nothing is trained."""


def run_schedule(
    stage: ModelStage,
    modules: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_of: LossOf,
    *,
    forward_only: bool,
) -> list[Any]:
    """What the loss functions reported, a micro-batch each, on the last stage; else empty. Inside `megatron_scope`.

    `modules` are the stage's chunks, wrapped for training or not. With `forward_only` nothing keeps a gradient.
    """

    def forward_step(batches: Iterator[MicroBatch], wrapped: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(batches)
        return stage.forward_hidden(wrapped, micro_batch), loss_of(micro_batch)

    with torch.no_grad() if forward_only else contextlib.nullcontext():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            # Each chunk sees every micro-batch.
            data_iterator=[iter(micro_batches) for _ in modules],
            model=list(modules),
            num_microbatches=len(micro_batches),
            # Of the whole replica: the schedule divides it by the context-parallel size.
            seq_length=micro_batches[0].token_ids.numel() * stage.topology.context_size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
