"""The scaling contract with Megatron: gradients are the SUM over micro-batches and data-parallel ranks, times one.

`pack` fixed every division in `token_scale`, so Megatron must divide by nothing:

- `calculate_per_token_loss=True`: DDP sums gradients over data-parallel ranks instead of averaging them, and the
  schedule does not divide by the number of micro-batches;
- the loss function returns the 3-tuple (loss, num_tokens, report) with num_tokens = 0: the schedule would multiply a
  2-tuple by the context-parallel size and divide it by the number of micro-batches; `finalize_model_grads` divides
  gradients by the all-reduced num_tokens, a division that is skipped at 0 (0.16) or clamped to 1 (0.19).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_tuple(loss: Tensor, report: Any) -> tuple[Tensor, Tensor, Any]:
    """What a Megatron loss function of this project returns: its loss is used as it is."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


def assert_sum_contract(*, calculate_per_token_loss: bool, gradient_scaling_factor: float) -> None:
    """Fail at start, not after a night, if Megatron would scale gradients by anything but 1."""
    assert calculate_per_token_loss, "config.calculate_per_token_loss must be True: losses are sums"
    assert gradient_scaling_factor == 1.0, (
        f"DDP scales gradients by {gradient_scaling_factor}, expected 1.0: losses already hold every division"
    )
