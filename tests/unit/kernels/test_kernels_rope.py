"""Rotary positions, all implementations with one set of tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.small_kernels import DTYPES, ON_CPU, Where, angle_table, cases, check_rotation, exact_rotation
from megatron_klear_kernels.implementations import Implementation
from megatron_klear_kernels.rope.autograd import rotate
from megatron_klear_kernels.triton_support import interpreted

# (positions, query heads, key heads, half a head)
SIZES = [(1, 1, 1, 1), (7, 4, 2, 6), (5, 20, 3, 5), (3, 33, 17, 64), (9, 16, 8, 48)]
each = pytest.mark.parametrize("implementation", ON_CPU)
each_case = pytest.mark.parametrize(("implementation", "dtype"), cases(*DTYPES), ids=str)


def test_the_closed_form_is_transformers_rotation() -> None:
    """Written out with halves and signs."""
    where = Where("eager", torch.float32)
    x, (cos, sin) = where.random((5, 3, 8), 1).double(), angle_table(5, 4, where)
    half_turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
    written_out = x * torch.cat((cos, cos), -1) + half_turned * torch.cat((sin, sin), -1)
    torch.testing.assert_close(exact_rotation(x, cos, sin), written_out, rtol=0, atol=1e-15)


@each_case
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, implementation: Implementation
) -> None:
    where, (num_positions, queries, keys, half) = Where(implementation, dtype), sizes
    query, key = (where.random((num_positions, heads, 2 * half), heads) for heads in (queries, keys))
    check_rotation(query, key, angle_table(num_positions, half, where), where)


@each
def test_parts_of_the_fused_projection(implementation: Implementation) -> None:
    """[T, groups, (heads of a group + key + value) x D], cut up as Megatron does; and heads or dimensions first."""
    where = Where(implementation, torch.float32)
    fused, table = where.random((6, 2, 4 * 12), 1), angle_table(6, 6, where)
    one_group = fused[:, 0, :24].unflatten(-1, (2, 12))
    check_rotation(one_group, fused[..., 24:36], table, where)
    turned = where.random((12, 4, 6), 2).permute(2, 1, 0)
    check_rotation(turned, where.random((2, 6, 12), 3).transpose(0, 1), table, where)
    every_other = (x.repeat_interleave(2, dim=-1)[..., ::2] for x in table)
    check_rotation(one_group, fused[..., 24:36], tuple(every_other), where)  # type: ignore[arg-type]


@each
def test_nothing_is_written_over_and_only_the_table_is_kept(implementation: Implementation) -> None:
    where, kept = Where(implementation, torch.float32), []
    query, key = where.random((5, 2, 8), 1).requires_grad_(), where.random((5, 1, 8), 2).requires_grad_()
    before, table = (query.detach().clone(), key.detach().clone()), angle_table(5, 4, where)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = rotate(query, key, *table, implementation=implementation)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr() for x in table]
    grads = [torch.ones_like(out) for out in outs]
    torch.autograd.grad(outs, (query, key), grads)
    assert torch.equal(query, before[0]) and torch.equal(key, before[1])
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)


@each
def test_the_gradient_turns_back(implementation: Implementation) -> None:
    where = Where(implementation, torch.float32)
    query, key = where.random((5, 2, 8), 1).requires_grad_(), where.random((5, 1, 8), 2).requires_grad_()
    outs = rotate(query, key, *angle_table(5, 4, where), implementation=implementation)
    back = torch.autograd.grad(outs, (query, key), [out.detach() for out in outs])
    for found, x in zip(back, (query, key), strict=True):
        torch.testing.assert_close(found, x.detach())


@each
def test_no_positions(implementation: Implementation) -> None:
    where = Where(implementation, torch.float32)
    query, key = torch.randn(0, 2, 8, requires_grad=True), torch.randn(0, 1, 8, requires_grad=True)
    outs = rotate(query, key, *angle_table(0, 4, where), implementation=implementation)
    (outs[0].sum() + outs[1].sum()).backward()
    assert [out.shape for out in outs] == [query.shape, key.shape]


@pytest.mark.skipif(not interpreted(), reason="Triton's interpreter is not in use")
def test_offsets_beyond_32_bits(huge_buffer: Tensor) -> None:
    """Position 2 of a view whose row stride is 2^30 lies at 2^31: an int32 product would point before the tensor."""
    where = Where("triton", torch.float16)
    query, key = (huge_buffer[start:].as_strided((3, heads, 8), (2**30, 8, 1)) for start, heads in ((0, 2), (32, 1)))
    for seed, x in enumerate((query, key)):
        x.copy_(where.random(x.shape, seed))
    check_rotation(query, key, angle_table(3, 4, where), where)
