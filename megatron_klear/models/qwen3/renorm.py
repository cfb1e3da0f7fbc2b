"""A norm and the linear layer behind it which do not both keep what passes between them.

The norm keeps its normed rows, the linear layer its input, which is those times a weight: when the backward asks for
the input, it is computed again. (Megatron's own recompute of norms asks Transformer Engine about FP8, and fails where
that is not installed.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_klear.models.qwen3.linear import ColumnLinear
from megatron_klear.models.qwen3.norm import RMSNorm


class RecomputableNorm(RMSNorm):
    """RMSNorm whose output knows how it came about."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        out, weight = super().forward(x), self.weight
        if out.grad_fn is not None:
            normed, *_ = out.grad_fn.saved_tensors  # type: ignore[attr-defined]
            setattr(out, "compute_again", lambda: normed * weight)  # noqa: B010  no field of a tensor
        return out


class LinearAfterNorm(ColumnLinear):
    """Column-parallel linear layer that keeps no output of a `RecomputableNorm`."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        compute_again: Callable[[], Tensor] | None = vars(input_).get("compute_again")
        if compute_again is None:
            return super().forward(input_, *args, **kwargs)
        place = input_.data_ptr()

        def keep(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            return compute_again if tensor.data_ptr() == place else tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, _given_back):
            return super().forward(input_, *args, **kwargs)


def _given_back(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept()
