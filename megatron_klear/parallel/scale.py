"""The scaling contract with Megatron: gradients are the SUM over micro-batches and data-parallel ranks, times one.

`pack` fixed every division in `token_scale`, so Megatron must divide by nothing:

- `calculate_per_token_loss=True`: DDP sums gradients over data-parallel ranks instead of averaging them, and the
  schedule does not divide by the number of micro-batches;
- the loss function returns the 3-tuple (loss, num_tokens, report) with num_tokens = 0: the schedule would multiply a
  2-tuple by the context-parallel size and divide it by the number of micro-batches; `finalize_model_grads` divides
  gradients by the all-reduced num_tokens, a division that is skipped at 0 (0.16) or clamped to 1 (0.19).

Experts obey it too: with expert parallelism a token's gradient reaches an expert's rank from every rank that sent it
tokens, in the backward of the dispatch; what is left to sum are the ranks that hold the same expert, and Megatron does
so (factor 1 again) over them.

The load-balancing loss of a layer with experts is Switch's (arXiv 2101.03961 Eq. 4-6, for k experts a token), taken
over the T positions of one micro-batch m, prompts and padding included:

    L_m = E x sum_e f_e P_e,   f_e = positions that chose expert e / (k T),   P_e = mean probability of e

f is a count and has no gradient. Megatron counts f over the tensor- and context-parallel ranks of a replica and gives
each of them the part of L_m that its own positions make, so the ranks' gradients add up to L_m's. It hooks that
gradient to the router's output with factor 1; `coefficient / (micro-batches x replicas)` makes the sum over an update

    coefficient x mean over all micro-batches of all replicas of L_m        (summed over layers)

whatever the layout. How the update is cut into micro-batches does matter, as L_m is not a mean over tokens: that is
what "balanced within a micro-batch" means. All micro-batches of an update have the same T, so their plain mean is the
one weighted by tokens, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_tuple(loss: Tensor, report: Any) -> tuple[Tensor, Tensor, Any]:
    """What a Megatron loss function of this project returns: its loss is used as it is."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


def balance_loss_coefficient(coefficient: float, *, num_micro_batches: int, data_size: int) -> float:
    """What a micro-batch's load-balancing loss is multiplied by; `num_micro_batches` is a replica's."""
    return coefficient / (num_micro_batches * data_size)


def assert_sum_contract(*, calculate_per_token_loss: bool, gradient_scaling_factor: float) -> None:
    """Fail at start, not after a night, if Megatron would scale gradients by anything but 1."""
    assert calculate_per_token_loss, "config.calculate_per_token_loss must be True: losses are sums"
    assert gradient_scaling_factor == 1.0, (
        f"DDP scales gradients by {gradient_scaling_factor}, expected 1.0: losses already hold every division"
    )
