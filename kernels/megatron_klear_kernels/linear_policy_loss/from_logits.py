"""A separable loss from logits that exist already; the backward may write their gradient over them.

The logits stay as they are until the backward, so whoever looks at them before sees logits. In place needs no
`mark_dirty` then, which is for a forward that changes its input; the version is raised in the backward instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_klear_kernels.linear_policy_loss.one_pass import LinearLoss, SeparableLoss
from megatron_klear_kernels.linear_policy_loss.paths import PathName, Shard, choose_path, row_passes
from megatron_klear_kernels.linear_policy_loss.token_terms import TokenTerms
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution, Vocabulary, over_ranks


def linear_loss_from_logits(
    logits: Tensor,
    targets: Tensor,
    loss: SeparableLoss,
    vocab: Vocabulary,
    *,
    temperature: float = 1.0,
    inplace: bool = False,
    path: PathName = "auto",
) -> LinearLoss:
    """Any separable loss of logits [T, V/tp]; see `policy_loss.policy_loss_from_logits`.

    Raises:
        ValueError: shapes that do not fit, or a path that cannot run here or needs hidden states.
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits [T, V/tp] and targets [T], got {list(logits.shape)} and {list(targets.shape)}"
        )
    if path == "triton_scaled_exp":
        raise ValueError("path triton_scaled_exp makes its logits from hidden states; ask for auto, eager or triton")
    choice = choose_path(path, logits.device)
    passes = row_passes(choice)
    shard = Shard.of(vocab, logits.size(1), temperature)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        rows = over_ranks(passes.row_statistics(logits.detach(), targets, **shard.settings()), vocab.group)
        terms = loss(rows.logprob, rows.entropy, torch.arange(targets.numel(), device=targets.device))
        value = terms.loss.sum()
    if torch.is_grad_enabled() and logits.requires_grad:
        value = _FromLogits.apply(logits, value, _Backward(passes, shard, targets, rows, terms, inplace))
    return LinearLoss(value, rows.logprob, rows.entropy, choice)


@dataclass(frozen=True, slots=True)
class _Backward:
    """What the gradient is made of, besides the logits."""

    passes: Any
    shard: Shard
    targets: Tensor
    rows: Distribution
    terms: TokenTerms
    inplace: bool


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, value: Tensor, call: _Backward) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.call = call  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        call: _Backward = ctx.call  # type: ignore[attr-defined]
        logits, rows, d_entropy = logits.detach(), call.rows, call.terms.d_entropy
        out = logits if call.inplace else torch.empty_like(logits)
        call.passes.logit_gradient(
            logits,
            call.targets,
            rows.peak,
            rows.log_sum,
            rows.entropy,
            call.terms.d_logprob * grads[0],
            None if d_entropy is None else d_entropy * grads[0],
            **call.shard.settings(),
            out=out,
        )
        if call.inplace:
            # Whoever kept these logits for a backward of his own must hear of it, a Triton kernel does not tell him.
            torch.autograd.graph.increment_version(logits)
        return out, None, None
