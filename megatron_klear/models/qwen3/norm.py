"""RMSNorm whose weight takes part in sequence parallelism.

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, so the weight's gradient
must be summed over those ranks: Megatron does that for parameters marked `sequence_parallel`. Without the mark the loss
is right and the gradient is not.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_klear_kernels.rms_norm.autograd import rms_norm


class RMSNorm(torch.nn.Module):
    """Drop-in for Megatron's norm modules: [..., hidden] -> [..., hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_megatron: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  an attribute Megatron reads

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)
