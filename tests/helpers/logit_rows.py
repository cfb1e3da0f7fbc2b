"""Rows of logits: made up, merged over shards, and their log-prob, entropy and gradient written out in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Merged:
    """Whole rows, from the statistics of their shards or tiles: [C] float32 each."""

    peak: Tensor
    log_sum: Tensor
    entropy: Tensor
    logprob: Tensor


def merged(parts: Tensor) -> Merged:
    """Merge (m, s, t, zt) statistics [n, 4, C]."""
    m, s, t, z_target = parts.unbind(1)
    peak = m.amax(0)
    distance = (m - peak).clamp(min=-1e4)  # a part of padding has m = -inf
    decay = distance.exp()
    total, moment = (decay * s).sum(0), (decay * (t + s * distance)).sum(0)
    log_sum = total.log()
    return Merged(peak, log_sum, log_sum - moment / total, z_target.sum(0) - peak - log_sum)


@dataclass(frozen=True)
class Upstream:
    """dL/dlogprob and dL/dentropy of each row: [C] float32."""

    d_logprob: Tensor
    d_entropy: Tensor | None


def random_upstream(num_rows: int, *, seed: int = 0, with_entropy: bool = True) -> Upstream:
    generator = torch.Generator().manual_seed(seed)
    d_logprob, d_entropy = torch.randn(2, num_rows, generator=generator)
    return Upstream(d_logprob, d_entropy if with_entropy else None)


@dataclass(frozen=True)
class WrittenOut:
    """float64: log-prob [C], entropy [C], dL/dlogit and probabilities [C, num_valid]."""

    logprob: Tensor
    entropy: Tensor
    gradient: Tensor
    probabilities: Tensor


def written_out(logits: Tensor, targets: Tensor, upstream: Upstream, inv_temperature: float) -> WrittenOut:
    """Logits [C, num_valid] without padding."""
    logits = logits.detach().double().requires_grad_()
    log_p = (logits * inv_temperature).log_softmax(-1)
    logprob = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    loss = (logprob * upstream.d_logprob).sum()
    if upstream.d_entropy is not None:
        loss = loss + (entropy * upstream.d_entropy).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    return WrittenOut(logprob.detach(), entropy.detach(), gradient, log_p.detach().exp())


def cuts(num_columns: int, num_shards: int) -> list[slice]:
    """Shards of `num_columns`, of unequal widths where they do not divide it."""
    edges = [round(i * num_columns / num_shards) for i in range(num_shards + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
