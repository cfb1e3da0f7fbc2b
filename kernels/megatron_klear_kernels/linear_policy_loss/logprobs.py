"""Token log-probs and entropies from hidden states, for any loss: the backward makes each chunk's logits again.

Four matrix products with a gradient, one without. A loss that is separable over tokens takes three: policy_loss.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings, OutputLayer, RowGradients, Sinks
from megatron_klear_kernels.linear_policy_loss.paths import PathChoice
from megatron_klear_kernels.linear_policy_loss.products import WeightGradient, check_main_grad
from megatron_klear_kernels.linear_policy_loss.rows import RowChunk, RowPlan
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution


@dataclass(frozen=True, slots=True)
class LinearLogprobs:
    """float32 [T], the same on every rank of the vocabulary; 0 at rows that were left out."""

    logprobs: Tensor
    entropy: Tensor
    path: PathChoice


def fused_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LinearSettings,
    *,
    rows: RowPlan | None = None,
    entropy_gradient: bool = False,
    main_grad: Tensor | None = None,
) -> LinearLogprobs:
    """Log-prob of `targets` and entropy of the next-token distribution.

    Args:
        hidden: [T, H] float32, bfloat16 or float16, the same on every rank of the vocabulary's group.
        weight: [V/tp, H] of the same type, this rank's rows of the output layer.
        targets: [T] int64 global token ids.
        settings: which rows of the vocabulary `weight` holds, temperature, path, memory.
        rows: the rows to work on; None for all. Rows without a gradient in the plan get none.
        entropy_gradient: the entropies have a gradient, too.
        main_grad: [V/tp, H] float32. The backward adds the weight's gradient here, and autograd gets zeros.

    Returns:
        Log-probs (never above 0) and entropies with a gradient to `hidden` and `weight`. Unless
        `settings.sum_hidden_gradient`, the gradient of `hidden` is this rank's PART: the caller sums it over the group.

    Raises:
        ValueError: shapes or types do not fit, or a path was asked for that cannot run here.
    """
    plan = RowPlan.every_row(hidden.size(0), hidden.device) if rows is None else rows
    layer = OutputLayer(hidden, weight, targets, plan, settings)
    check_main_grad(weight, main_grad)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        logprobs, entropy = _Recomputed.apply(hidden, weight, layer, entropy_gradient, main_grad)
    else:
        logprobs, entropy = spread(layer.distribution(), layer)
    return LinearLogprobs(logprobs, entropy, layer.choice)


def spread(known: Distribution, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R] of the plan's rows -> [T], 0 elsewhere."""
    index = layer.plan.index
    zeros = torch.zeros(2, layer.hidden.size(0), device=layer.hidden.device)
    logprobs, entropy = zeros.index_copy_(1, index, torch.stack((known.logprob, known.entropy))).unbind()
    return logprobs, entropy


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        entropy_gradient: bool,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        known = layer.distribution()
        logprobs, entropy = spread(known, layer)
        # Tensors by autograd's way: it notices if someone changes them before the backward.
        ctx.save_for_backward(hidden, weight, known.stacked)
        ctx.rest = (layer.targets, layer.plan, layer.settings, main_grad)  # type: ignore[attr-defined]
        ctx.entropy_gradient = entropy_gradient  # type: ignore[attr-defined]
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, known = ctx.saved_tensors  # type: ignore[attr-defined]
        targets, plan, settings, main_grad = ctx.rest  # type: ignore[attr-defined]
        with_entropy: bool = ctx.entropy_gradient  # type: ignore[attr-defined]
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]

        def gradients_of(chunk: RowChunk, rows: Distribution) -> RowGradients:
            d_logprob, d_entropy = (grad.index_select(0, chunk.index) for grad in grads[:2])
            return RowGradients(d_logprob, d_entropy if with_entropy else None)

        layer = OutputLayer(hidden, weight, targets, plan, settings)
        sinks = Sinks(
            torch.zeros_like(hidden) if wants_hidden else None,
            WeightGradient(weight, main_grad) if wants_weight else None,
        )
        layer.backward(Distribution(*known.unbind()), gradients_of, sinks)
        return sinks.hidden, sinks.weight.result() if sinks.weight is not None else None, None, None, None
