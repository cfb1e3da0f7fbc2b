"""RMSNorm, SwiGLU and rotary positions on CUDA, torch's and Triton's implementations."""

from __future__ import annotations

import pytest
import torch

from helpers.small_kernels import (
    DTYPES,
    EPS,
    Where,
    angle_table,
    check_rms_norm,
    check_rotation,
    check_swiglu,
    rows_of_many_sizes,
)
from megatron_klear_kernels.implementations import Implementation, small_kernels
from megatron_klear_kernels.rms_norm.autograd import rms_norm
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.swiglu.autograd import swiglu

pytestmark = pytest.mark.gpu

both = pytest.mark.parametrize("implementation", ("eager", "triton"))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
triton_alone = Where("triton", torch.bfloat16, "cuda")


def test_triton_is_what_runs() -> None:
    assert small_kernels(True, torch.bfloat16).implementation == "triton"


@both
@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (5000, 1, 37), (700, 1, 8, 128), (300, 1, 4096), (9, 1001), (3, 16384)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, implementation: Implementation) -> None:
    where = Where(implementation, dtype, "cuda")
    check_rms_norm(rows_of_many_sizes(shape, where), where.random(shape[-1:], 2), where.random(shape, 3), where)
    apart = where.random((*shape[:-1], shape[-1] + 3), 1)[..., 3:]
    check_rms_norm(apart, where.random(shape[-1:], 2), where.random((1,), 3).expand(shape), where)


def test_rms_norm_of_a_row_gives_the_same_bits_alone_without_gradients_and_twice() -> None:
    for width, num_rows in ((128, 70001), (4096, 3001)):
        x = triton_alone.random((num_rows, width), 1).requires_grad_()
        weight, grad = triton_alone.random((width,), 2).requires_grad_(), triton_alone.random((num_rows, width), 3)
        whole = rms_norm(x, weight, EPS)
        assert whole.grad_fn is not None
        normed, *_ = whole.grad_fn.saved_tensors  # type: ignore[attr-defined]
        assert torch.equal(normed * weight, whole)
        with torch.no_grad():
            assert torch.equal(rms_norm(x, weight, EPS), whole)
            for part in (slice(0, 1), slice(16, 48), slice(num_rows - 5, num_rows)):
                assert torch.equal(rms_norm(x[part], weight, EPS), whole[part])
        first, second = (torch.autograd.grad(whole, (x, weight), grad, retain_graph=True) for _ in range(2))
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@both
@each_dtype
@pytest.mark.parametrize("shape", [(1, 2), (700, 1, 2 * 12288), (33, 3, 130), (9, 2 * 5001)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype, implementation: Implementation) -> None:
    where = Where(implementation, dtype, "cuda")
    x, half = 3 * where.random((*shape[:-1], shape[-1] + 5), 1), shape[-1] // 2
    check_swiglu(x[..., : shape[-1]].contiguous(), where.random((*shape[:-1], half), 2), where)
    check_swiglu(x[..., 5:], where.random((*shape[:-1], half + 3), 2)[..., 3:], where)


@both
@each_dtype
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3000, 32, 8, 64), (100, 20, 3, 5), (70, 64, 4, 64)])
def test_rotation(sizes: tuple[int, int, int, int], dtype: torch.dtype, implementation: Implementation) -> None:
    where, (num_positions, queries, keys, half) = Where(implementation, dtype, "cuda"), sizes
    table = angle_table(num_positions, half, where)
    query = where.random((num_positions, queries, 2 * half), 1)
    fused = where.random((num_positions, keys, 3 * 2 * half), 2)
    check_rotation(query, fused[..., 2 * half : 4 * half], table, where)


def test_nothing_to_do() -> None:
    x = torch.ones(0, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)
    query, key = rotate(x[:, None], x[:, None], x[:, None, :32], x[:, None, :32])
    (rms_norm(x, weight, EPS).sum() + swiglu(x).sum() + query.sum() + key.sum()).backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_more_elements_than_32_bits_count() -> None:
    """The last row of 2^31 + 4096 elements, against the same row alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB of free device memory")
    num_rows, width = 2**19 + 1, 4096
    x = torch.empty(num_rows, width, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    weight = triton_alone.random((width,), 1)
    last = x.detach()[-1:].clone().requires_grad_()
    for function in (lambda x: rms_norm(x, weight, EPS), swiglu, rotated):
        out, alone = function(x), function(last)
        assert torch.equal(out[-1:], alone)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        (grad_alone,) = torch.autograd.grad(alone, last, torch.ones_like(alone))
        assert torch.equal(grad[-1:], grad_alone)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [rows, 4096] as 32 heads, each row at the same position."""
    cos, sin = (part.expand(x.size(0), 1, 64) for part in angle_table(1, 64, triton_alone))
    heads = x.unflatten(-1, (32, 128))
    return rotate(heads, heads[:, :1], cos, sin)[0].flatten(1)
