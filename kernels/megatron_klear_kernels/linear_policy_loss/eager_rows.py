"""The row passes of the loss in plain torch: statistics of logits, and the gradient with respect to them.

On a CPU these passes, not the matrix products, used to decide: each of the half dozen elementwise operations sends the
chunk through memory. Here they run over blocks of rows that stay in a core's cache, three times faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# float32 logits worked on at a time; two such blocks fit into the caches of common CPUs.
_BLOCK_BYTES = 1024 * 1024
# Smaller blocks would spend their time on calling operations.
_MIN_ROWS = 4
# On a GPU there is no cache to stay in, and launches cost.
_GPU_BLOCK_BYTES = 256 * 1024 * 1024


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = _BLOCK_BYTES if logits.device.type == "cpu" else _GPU_BLOCK_BYTES
    rows = max(_MIN_ROWS, size // (4 * max(1, logits.size(1))))
    for begin in range(0, logits.size(0), rows):
        yield slice(begin, min(begin + rows, logits.size(0)))


def _own_columns(targets: Tensor, start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """(local column, is it ours): a target on another rank points at column 0 and is masked, never a sentinel id."""
    local = targets - start
    ours = (local >= 0) & (local < num_valid)
    return local.masked_fill(~ours, 0), ours


def row_statistics(logits: Tensor, targets: Tensor, *, start: int, num_valid: int, inv_temperature: float) -> Tensor:
    """[4, C] float32 m, s, t, zt (see vocabulary.py) of logits [C, V/tp] before the temperature.

    `targets` [C] are global ids, `start` is that of column 0; only the first `num_valid` columns are tokens.
    """
    out = torch.zeros(4, logits.size(0), device=logits.device)
    if num_valid == 0:
        out[0] = -torch.inf
        return out
    columns, ours = _own_columns(targets, start, num_valid)
    for block in _blocks(logits):
        z = logits[block, :num_valid].to(torch.float32)
        z = z * inv_temperature if inv_temperature != 1 else z
        out[3, block] = z.gather(1, columns[block, None])[:, 0].masked_fill_(~ours[block], 0.0)
        num = z.size(0)
        # torch splits a long row that is alone among its threads: it would be summed in another order than in company.
        z = z.expand(2, -1) if num == 1 else z
        peak = z.amax(dim=1)
        shifted = z - peak[:, None]
        weights = shifted.exp()
        out[0, block] = peak[:num]
        out[1, block] = weights.sum(dim=1)[:num]
        out[2, block] = torch.linalg.vecdot(weights, shifted)[:num]
    return out


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
    *,
    start: int,
    num_valid: int,
    inv_temperature: float,
    out: Tensor,
) -> None:
    """d loss / d logits [C, V/tp] into `out`, which may be the logits themselves; padding columns get exactly 0.

    d logprob / dz_v = [v is the target] - p_v        d entropy / dz_v = -p_v (log p_v + entropy)
    """
    columns, ours = _own_columns(targets, start, num_valid)
    at_target = (d_logprob * inv_temperature).masked_fill(~ours, 0.0)
    d_all = -d_logprob * inv_temperature
    for block in _blocks(logits):
        if num_valid > 0:
            z = logits[block, :num_valid].to(torch.float32)
            log_p = (z * inv_temperature if inv_temperature != 1 else z) - peak[block, None]
            log_p.sub_(log_sum[block, None])
            if d_entropy is None:
                grad = log_p.exp_().mul_(d_all[block, None])
            else:
                p = log_p.exp()
                slope = d_entropy[block] * inv_temperature
                # p (d_all - slope (log p + H)). Where p underflows, log p is finite all the same.
                grad = log_p.add_(entropy[block, None]).mul_(-slope[:, None]).add_(d_all[block, None]).mul_(p)
            grad.scatter_add_(1, columns[block, None], at_target[block, None])
            out[block, :num_valid] = grad
        out[block, num_valid:] = 0
