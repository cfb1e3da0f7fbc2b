"""RMSNorm whose weight takes part in sequence parallelism.

y = w * x / sqrt(mean(x^2) + eps), the mean and the root in float32. Under sequence parallelism each tensor-parallel
rank normalises its own part of the sequence, so the weight's gradient must be summed over those ranks: Megatron does
that for parameters marked `sequence_parallel`. Without the mark the loss is right and the gradient is not.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        # Multiply in float32 and round once: what transformers' Qwen3 does, so bf16 models agree with it too.
        normed = x * inverse if x.dtype == torch.float32 else (x.float() * inverse).to(x.dtype)
        ctx.save_for_backward(normed, weight, inverse)
        return normed * weight

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, width = grads[0], normed.size(-1)
        product = (grad * normed).reshape(-1, width)
        grad_weight = product.sum(dim=0, dtype=torch.float32).to(weight.dtype)
        projection = torch.mv(product, weight).view(*normed.shape[:-1], 1)
        grad_x = torch.addcmul(grad * weight, normed, projection, value=-1.0 / width)
        return (grad_x * inverse).to(normed.dtype), grad_weight, None


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
        return _RmsNormFunction.apply(x, self.weight, self.eps)
