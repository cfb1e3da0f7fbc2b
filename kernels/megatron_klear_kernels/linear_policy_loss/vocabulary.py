"""Softmax statistics of rows whose vocabulary may lie on several ranks, and how parts become a whole.

A part of the vocabulary says four numbers of a row with logits z = (h W^T) / temperature:

    m = max z        s = sum exp(z - m)        t = sum exp(z - m) (z - m)        zt = z of the target, 0 if not here

Parts r merge in any number and always in the same order, so that every rank gets the same bits:

    m = max m_r      d_r = m_r - m      s = sum s_r e^d_r      t = sum e^d_r (t_r + s_r d_r)      zt = sum zt_r

and then  logprob = (zt - m) - log s,   entropy = log s - t / s,   log p_v = (z_v - m) - log s.
All is relative to the maximum: a common offset of the logits, however large, costs no digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's part of the vocabulary. Columns at or above `num_valid` (global ids) are padding, never a token."""

    start: int
    num_valid: int
    group: dist.ProcessGroup | None = None

    def num_local(self, num_columns: int) -> int:
        """How many of this rank's columns are tokens; they come first."""
        return min(max(self.num_valid - self.start, 0), num_columns)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is known of each row's softmax over the whole vocabulary; float32 [C] each, the same on every rank."""

    peak: Tensor
    log_sum: Tensor
    logprob: Tensor
    entropy: Tensor

    @property
    def stacked(self) -> Tensor:
        """All four as [4, C]."""
        return torch.stack((self.peak, self.log_sum, self.logprob, self.entropy))


def merge(parts: Tensor) -> Tensor:
    """[R, 4, C] statistics of R parts of the vocabulary -> [4, C] of all of them."""
    peak = parts[:, 0].amax(dim=0)
    whole = torch.zeros_like(parts[0])
    whole[0] = peak
    # One after the other: a reduction of torch over parts adds up in an order that depends on the number of rows, and
    # a row's bits must not depend on its company.
    for part_peak, total, moment, target in parts:
        # A part without a single token has a maximum of -inf, and -inf - -inf is NaN.
        empty = part_peak == -torch.inf
        shift = (part_peak - peak).masked_fill(empty, 0.0)
        weight = shift.exp().masked_fill(empty, 0.0)
        whole[1] += weight * total
        whole[2] += weight * (moment + total * shift)
        whole[3] += target
    return whole


def over_ranks(own: Tensor, group: dist.ProcessGroup | None) -> Distribution:
    """[4, C] of this rank's columns -> the whole softmax, by one all-gather."""
    whole = own
    if group is not None and group.size() > 1:
        parts = own.new_empty(group.size(), *own.shape)
        dist.all_gather_into_tensor(parts.view(-1), own.contiguous().view(-1), group=group)
        whole = merge(parts)
    peak, total, moment, target = whole.unbind()
    log_sum = total.log()
    # Rounding must not make a certain token more than certain.
    logprob = ((target - peak) - log_sum).clamp(max=0.0)
    return Distribution(peak, log_sum, logprob, log_sum - moment / total)
