"""silu(gate) * up as a module of Megatron's MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_klear_kernels.swiglu.autograd import swiglu


class SwiGLU(torch.nn.Module):
    """Activation of Megatron's MLP: gate and up side by side [..., 2 F] -> [..., F]."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return swiglu(x)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to checkpoint."""
        return {}
