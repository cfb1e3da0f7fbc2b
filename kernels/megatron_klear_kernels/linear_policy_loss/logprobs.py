"""Token log-probs and entropies from hidden states, without ever holding [T, V].

Rows are worked off in chunks of bounded bytes. The vocabulary may be sharded over a process group: each rank holds
V/tp rows of the output weight, and ranks merge (max, sum, shifted sum, target logit) statistics. The backward
recomputes each chunk's logits.

With z = (h W^T) / temperature, m = max z, s = sum exp(z - m), t = sum exp(z - m) (z - m):
    logprob = z_target - m - log s        entropy = log s - t / s
The shifted form of the entropy keeps its accuracy however large a common offset of the logits is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

DEFAULT_CHUNK_BYTES = 48 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's part of the vocabulary. Columns at or above `num_valid` (global ids) are padding, never a token."""

    start: int
    num_valid: int
    group: dist.ProcessGroup | None = None


def _logits(hidden: Tensor, weight: Tensor, inv_temperature: float, vocab: Vocabulary) -> Tensor:
    """float32 logits [C, V/tp] from a float32 weight; padding columns are -inf so that they carry no probability."""
    logits = (hidden.float() @ weight.t()).mul_(inv_temperature)
    num_real = min(max(vocab.num_valid - vocab.start, 0), weight.size(0))
    if num_real < weight.size(0):
        logits[:, num_real:] = -torch.inf
    return logits


def _all_reduce(value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


def _own_targets(targets: Tensor, vocab: Vocabulary, num_local: int) -> tuple[Tensor, Tensor]:
    """(local column, is it ours): a target on another rank points at column 0 and is masked, never a sentinel id."""
    local = targets - vocab.start
    ours = (local >= 0) & (local < num_local)
    return local.masked_fill(~ours, 0), ours


def _chunk_statistics(
    logits: Tensor, targets: Tensor, vocab: Vocabulary, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob [C], entropy [C], log-sum-exp [C]) of a chunk over the whole vocabulary. `logits` is destroyed."""
    column, ours = _own_targets(targets, vocab, logits.size(1))
    peak = _all_reduce(logits.amax(dim=1), dist.ReduceOp.MAX, vocab.group)
    target = logits.gather(1, column[:, None])[:, 0].sub_(peak).masked_fill_(~ours, 0.0)
    shifted = logits.sub_(peak[:, None])
    weights = shifted.exp()
    # -inf * 0 of a padding column would be NaN.
    moment = (
        (shifted.masked_fill_(weights == 0, 0.0)).mul_(weights).sum(dim=1) if with_entropy else torch.zeros_like(target)
    )
    sums = _all_reduce(torch.stack((weights.sum(dim=1), moment, target)), dist.ReduceOp.SUM, vocab.group)
    log_sum = sums[0].log()
    logprob = (sums[2] - log_sum).clamp_(max=0.0)
    return logprob, log_sum - sums[1] / sums[0], peak + log_sum


EntropyMode = Literal["none", "value", "gradient"]


@dataclass(frozen=True, slots=True)
class _Settings:
    vocab: Vocabulary
    inv_temperature: float
    entropy: EntropyMode
    rows: int


def _logit_gradient(
    logits: Tensor, statistics: Sequence[Tensor], gradients: Sequence[Tensor | None], own: tuple[Tensor, Tensor]
) -> Tensor:
    """d loss / d logits [C, V/tp] from those of log-probs and entropies [C], on this rank's columns.

    d logprob / dz_v = [v is the target] - p_v        d entropy / dz_v = -p_v (log p_v + entropy)
    """
    lse, entropy = statistics
    grad, grad_entropy = gradients
    column, ours = own
    log_p = logits.sub_(lse[:, None])
    p = log_p.exp()
    assert grad is not None
    total = p * -grad[:, None]
    total.scatter_add_(1, column[:, None], grad.masked_fill(~ours, 0.0)[:, None])
    if grad_entropy is not None:
        # -inf * 0 of a padding column would be NaN.
        total -= p * (log_p.masked_fill_(p == 0, 0.0) + entropy[:, None]) * grad_entropy[:, None]
    return total


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        weight_float = weight.float()
        logprobs, entropies, lses = [], [], []
        for h, y in zip(hidden.split(settings.rows), targets.split(settings.rows), strict=True):
            logits = _logits(h, weight_float, settings.inv_temperature, settings.vocab)
            logprob, entropy, lse = _chunk_statistics(logits, y, settings.vocab, settings.entropy != "none")
            logprobs.append(logprob)
            entropies.append(entropy)
            lses.append(lse)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(lses), entropy)
        ctx.settings = settings  # type: ignore[attr-defined]
        if settings.entropy != "gradient":
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, lses, entropies = ctx.saved_tensors  # type: ignore[attr-defined]
        settings: _Settings = ctx.settings  # type: ignore[attr-defined]
        weight_float = weight.float()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, hidden.size(0), settings.rows):
            rows = slice(begin, begin + settings.rows)
            d_logits = _logit_gradient(
                _logits(hidden[rows], weight_float, settings.inv_temperature, settings.vocab),
                (lses[rows], entropies[rows]),
                (grads[0][rows], grads[1][rows] if settings.entropy == "gradient" else None),
                _own_targets(targets[rows], settings.vocab, weight.size(0)),
            ).mul_(settings.inv_temperature)
            grad_hidden[rows] = (d_logits @ weight_float).to(hidden.dtype)
            grad_weight.addmm_(d_logits.t(), hidden[rows].float())
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab: Vocabulary,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy of the next-token distribution.

    Args:
        hidden: [T, H], the same on every rank of `vocab.group`.
        weight: [V/tp, H], this rank's rows of the output layer.
        targets: [T] int64 global token ids.
        vocab: which rows of the vocabulary `weight` holds.
        temperature: logits are divided by it.
        entropy: "none" returns entropies that mean nothing and saves their cost; "value" without, "gradient" with
            a gradient.
        chunk_bytes: most bytes of float32 logits held at a time.

    Returns:
        (logprobs [T] float32, entropies [T] float32), the same on every rank. The gradient of `hidden` is this rank's
        PART: the caller sums it over `vocab.group` (Megatron's copy_to/gather_from regions do).
    """
    if hidden.size(-1) != weight.size(-1):
        raise ValueError(
            f"hidden states have width {hidden.size(-1)} but the output weight has {weight.size(-1)}:"
            " hand over hidden states [T, H], not logits"
        )
    rows = max(1, chunk_bytes // (4 * max(1, weight.size(0))))
    return _LinearLogprobs.apply(hidden, weight, targets, _Settings(vocab, 1.0 / temperature, entropy, rows))
