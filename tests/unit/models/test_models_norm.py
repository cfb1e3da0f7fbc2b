"""RMSNorm against transformers and against autograd of its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.models.qwen3.norm import RMSNorm
from megatron_klear.models.qwen3.spec import qwen3_config

EPS = 1e-5
# Megatron norms [T, 1, hidden], and [T, 1, heads, head_dim] for queries and keys.
SHAPES = [(7, 1, 32), (5, 1, 4, 12), (1, 1, 1, 8)]


def build(width: int, *, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False) -> RMSNorm:
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    config = qwen3_config(tiny_shape(tied=True), parallel, dtype=dtype, on_cpu=True)
    norm = RMSNorm(config, width, eps=EPS)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1.5, 1.5, width))
    return norm


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, one of them all zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    if shape[0] > 1:
        x[1] = 0.0
    return x.to(dtype)


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_agrees_with_transformers_in_float32(shape: tuple[int, ...]) -> None:
    norm, x = build(shape[-1]), inputs(shape, torch.float32)
    theirs = Qwen3RMSNorm(shape[-1], eps=EPS)
    theirs.weight.data.copy_(norm.weight.data)
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_agrees_with_transformers_in_bfloat16(shape: tuple[int, ...]) -> None:
    """The same roundings in the same places: equal but for a float32 mean that ends on the other side of one."""
    norm, x = build(shape[-1], dtype=torch.bfloat16), inputs(shape, torch.bfloat16)
    theirs = Qwen3RMSNorm(shape[-1], eps=EPS).to(torch.bfloat16)
    theirs.weight.data.copy_(norm.weight.data)
    mine, expected = norm(x), theirs(x)
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, expected, rtol=2**-7, atol=0)
    assert (mine != expected).float().mean() < 0.02


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=("f32", "bf16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    norm, x = build(shape[-1], dtype=dtype), inputs(shape, dtype).requires_grad_()
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    norm(x).backward(upstream)
    exact_x = x.detach().double().requires_grad_()
    exact_weight = norm.weight.detach().double().requires_grad_()
    formula(exact_x, exact_weight).backward(upstream.double())
    assert x.grad is not None and exact_x.grad is not None and exact_weight.grad is not None
    assert norm.weight.grad is not None and x.grad.dtype == norm.weight.grad.dtype == dtype
    # Each row has its own size, so each is held against its own largest entry.
    size = exact_x.grad.abs().amax(dim=-1, keepdim=True)
    assert ((x.grad.double() - exact_x.grad).abs() <= tolerance * size).all()
    limit = tolerance * exact_weight.grad.abs().max()
    assert ((norm.weight.grad.double() - exact_weight.grad).abs() <= limit).all()


def test_gradient_does_not_point_along_the_input() -> None:
    """Scaling x changes nothing, so the gradient is orthogonal to x (up to eps)."""
    norm, x = build(32), (100.0 * inputs((3, 1, 32), torch.float32)[2:]).requires_grad_()
    norm(x).backward(torch.linspace(-1, 1, 32).view(1, 1, 32))
    assert x.grad is not None
    cosine = torch.nn.functional.cosine_similarity(x.grad.flatten(), x.detach().flatten(), dim=0)
    assert abs(cosine.item()) < 1e-5


def test_a_part_of_a_wider_tensor_can_be_normed() -> None:
    """Queries are a slice of the fused projection: not contiguous."""
    whole = torch.randn(5, 1, 4, 24, generator=torch.Generator().manual_seed(3))
    norm, part = build(12), whole[..., 6:18]
    assert not part.is_contiguous()
    torch.testing.assert_close(norm(part), norm(part.contiguous()))


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_the_weight_is_marked_for_sequence_parallelism(sequence_parallel: bool) -> None:
    """Megatron sums the gradients of marked weights over the ranks that hold parts of the sequence."""
    weight = build(32, sequence_parallel=sequence_parallel).weight
    assert vars(weight)["sequence_parallel"] is sequence_parallel
