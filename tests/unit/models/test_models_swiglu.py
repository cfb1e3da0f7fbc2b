"""SwiGLU: what autograd gives on the formula, keeping its input alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear.models.qwen3.swiglu import SwiGLU


def formula(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 1, 96), (1, 1, 2), (40, 3, 130)], ids=str)
def test_output_and_gradient_are_those_of_autograd(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    start = (3 * torch.randn(shape, generator=generator)).to(dtype)
    x, y = start.clone().requires_grad_(), start.clone().requires_grad_()
    out, wanted = SwiGLU(None)(x), formula(y)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(grad)
    wanted.backward(grad)
    assert x.grad is not None and y.grad is not None
    # In bfloat16 torch's own operations run, in its order; in float32 the C kernel may.
    tolerance = 0.0 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance)


def test_only_the_input_is_kept() -> None:
    x, kept = torch.randn(5, 8, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        SwiGLU(None)(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
