"""From hidden states to a loss that is separable over tokens, with its gradients made in the forward: three products.

Once a row's log-prob and entropy are known, so is its loss's gradient with respect to its logits. It is made while they
are still there, and nothing needs them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings, OutputLayer, RowGradients, Sinks
from megatron_klear_kernels.linear_policy_loss.logprobs import spread
from megatron_klear_kernels.linear_policy_loss.paths import PathChoice
from megatron_klear_kernels.linear_policy_loss.products import WeightGradient, check_main_grad
from megatron_klear_kernels.linear_policy_loss.rows import RowChunk, RowPlan
from megatron_klear_kernels.linear_policy_loss.token_terms import TokenTerms
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution


class SeparableLoss(Protocol):
    """A loss that is a sum over tokens, each of which needs nothing but its own log-prob and entropy."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, index: Tensor) -> TokenTerms:
        """Terms of the tokens `index` [C] that have these log-probs and entropies [C] float32."""
        ...


@dataclass(frozen=True, slots=True)
class MainGrad:
    """Megatron's float32 gradient of the output weight [V/tp, H], to be added to in the forward.

    What lies there already cannot be rescaled, so the gradient of the loss must be known before: `upstream_scale`. The
    backward asserts it.
    """

    tensor: Tensor
    upstream_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """A summed loss (scalar, with gradient), and per token what made it, float32 [T] without gradient."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    path: PathChoice
    added_to_main_grad: bool = False
    """The weight's gradient lies in `main_grad`; autograd brings zeros."""


def fused_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: SeparableLoss,
    settings: LinearSettings,
    *,
    rows: RowPlan | None = None,
    main_grad: MainGrad | None = None,
) -> LinearLoss:
    """Any separable loss; `policy_loss.py` has the policy losses by name. Arguments as `fused_linear_logprobs`.

    Without gradients (no_grad, inside a checkpointed forward) nothing but the statistics is computed, and `main_grad`
    is never touched; nor is it where a forward is recomputed inside a backward, which gets the gradient itself.

    Raises:
        ValueError: shapes or types do not fit, or a path was asked for that cannot run here.
        RuntimeError: in the backward, if the loss's gradient is not `upstream_scale`, or at a second backward.
    """
    plan = RowPlan.every_row(hidden.size(0), hidden.device) if rows is None else rows
    layer = OutputLayer(hidden, weight, targets, plan, settings)
    check_main_grad(weight, main_grad.tensor if main_grad is not None else None)
    results, held = _Results(), None
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        held = main_grad if weight.requires_grad and not _recomputing() else None
        value = _OnePass.apply(hidden, weight, layer, loss, held, results)
    else:
        value = _evaluate(layer, loss, Sinks(None, None), results)
    assert results.logprobs is not None and results.entropy is not None
    return LinearLoss(value, results.logprobs, results.entropy, layer.choice, held is not None)


@dataclass(slots=True)
class _Results:
    """What the forward finds besides the loss; autograd has no place for it."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None


def _recomputing() -> bool:
    """Whether this thread is inside a backward: the forward of a checkpointed part is run again."""
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def _evaluate(layer: OutputLayer, loss: SeparableLoss, sinks: Sinks, results: _Results, scale: float = 1.0) -> Tensor:
    """The loss of all rows; gradients, times `scale`, into the sinks."""

    def gradients_of(chunk: RowChunk, rows: Distribution) -> RowGradients:
        terms = loss(rows.logprob, rows.entropy, chunk.index)
        d_entropy = terms.d_entropy
        if scale == 1:
            return RowGradients(terms.d_logprob, d_entropy)
        return RowGradients(terms.d_logprob * scale, None if d_entropy is None else d_entropy * scale)

    known = layer.one_pass(gradients_of if sinks.wanted else None, sinks)
    results.logprobs, results.entropy = spread(known, layer)
    return loss(known.logprob, known.entropy, layer.plan.index).loss.sum()


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        loss: SeparableLoss,
        main_grad: MainGrad | None,
        results: _Results,
    ) -> Tensor:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        sinks = Sinks(
            torch.zeros_like(hidden) if wants_hidden else None,
            WeightGradient(weight, main_grad.tensor if main_grad is not None else None) if wants_weight else None,
        )
        scale = main_grad.upstream_scale if main_grad is not None else 1.0
        value = _evaluate(layer, loss, sinks, results, scale)
        ctx.sinks = sinks  # type: ignore[attr-defined]
        ctx.expected = scale if main_grad is not None else None  # type: ignore[attr-defined]
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        sinks: Sinks | None = ctx.sinks  # type: ignore[attr-defined]
        if sinks is None:
            raise RuntimeError(
                "a second backward through a fused loss: its gradients are made in the forward and handed out once;"
                " call the loss again"
            )
        ctx.sinks = None  # type: ignore[attr-defined]
        expected: float | None = ctx.expected  # type: ignore[attr-defined]
        if expected is None:
            sinks.multiply(grads[0])
        else:
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                grads[0] == expected,
                f"the gradient of a fused loss is not upstream_scale = {expected}, with which the weight's gradient was"
                " added to main_grad in the forward; pass the factor that the loss is multiplied by",
            )
        d_weight = sinks.weight.result() if sinks.weight is not None else None
        return sinks.hidden, d_weight, None, None, None, None
