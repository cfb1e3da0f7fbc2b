"""Attention in C, of packed sequences and of one new token, against float64 in closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_klear_kernels.attention.decode import decode_attention
from megatron_klear_kernels.attention.short import Sequences, short_attention
from megatron_klear_kernels.native.library import LANES, why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=f"no C kernels: {why_missing()}")
EPS = 1e-6
# Around the sizes of a vector, of a tile of 4 rows and of a block of 32.
LENGTHS = [(1,), (2, 1, 3), (4, 5, 15, 16, 17), (31, 32, 33), (63, 64, 65), (130, 1, 257)]
# Query heads, key heads, numbers of a head.
HEADS = [(4, 2, 16), (1, 1, 32), (5, 1, 48), (8, 8, 128)]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sequences(lengths: Sequence[int], *, cover_all: bool = True) -> Sequences:
    sizes = torch.tensor(lengths)
    return Sequences(sizes.cumsum(0) - sizes, sizes, cover_all)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Sequence by sequence, float64 for float64 operands: [T, H, D]."""
    outputs = []
    share = q.size(1) // k.size(1)
    for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        keys, values = (x[begin:end].repeat_interleave(share, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[begin:end], keys) * scale
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.cat(outputs)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_values_and_gradients(heads: tuple[int, int, int], lengths: Sequence[int]) -> None:
    num_heads, groups, dim = heads
    total, scale = sum(lengths), dim**-0.5
    operands = [random(total, n, dim, seed=i) for i, n in enumerate((num_heads, groups, groups))]
    upstream = random(total, num_heads, dim, seed=9)
    leaves, exact_leaves = (
        [x.to(dtype).requires_grad_() for x in operands] for dtype in (torch.float32, torch.float64)
    )
    (q, k, v), (exact_q, exact_k, exact_v) = leaves, exact_leaves
    out = short_attention(q, k, v, scale, sequences(lengths))
    exact = exact_attention(exact_q, exact_k, exact_v, lengths, scale)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=3e-6)
    found = torch.autograd.grad(out, leaves, upstream)
    wanted = torch.autograd.grad(exact, exact_leaves, upstream.double())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)


def test_positions_of_no_sequence_are_zero_and_get_no_gradient() -> None:
    q, k, v = leaves = [random(12, 2, 16, seed=i).requires_grad_() for i in range(3)]
    middle = Sequences(torch.tensor([3]), torch.tensor([5]), cover_all=False)
    out = short_attention(q, k, v, 0.25, middle)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for x in (out, *grads):
        # (The first query sees one key, whatever it asks for.)
        assert not x[:3].any() and not x[8:].any() and bool(x[4:8].any(dim=-1).all())


def test_scores_of_any_size() -> None:
    """Hundreds apart: the largest takes all, and nothing overflows."""
    q, k, v = (random(20, 1, 16, seed=i) for i in range(3))
    out = short_attention(300 * q, k, v, 1.0, sequences((20,)))
    exact = exact_attention(300 * q.double(), k.double(), v.double(), (20,), 1.0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_is_not_hidden() -> None:
    q, k, v = (random(6, 1, 16, seed=i) for i in range(3))
    k[2, 0, 5] = torch.nan
    out = short_attention(q, k, v, 1.0, sequences((6,)))
    assert not out[:2].isnan().any() and bool(out[2:].isnan().any(dim=-1).all())


def test_parts_of_other_tensors() -> None:
    whole = random(20, 4, 48, seed=1)
    q, k, v = whole[..., :16], whole[:, ::2, 16:32], whole[:, 1::2, 32:]
    assert not q.is_contiguous() and not v.is_contiguous()
    out = short_attention(q, k, v, 0.25, sequences((9, 11)))
    torch.testing.assert_close(out, exact_attention(q, k, v, (9, 11), 0.25), rtol=1e-5, atol=3e-6)


def exact_step(
    qkv: Tensor, norms: Tensor, turns: Tensor, keys: Tensor, values: Tensor, begins: Sequence[int], end: int
) -> Tensor:
    """float64: keys [R, G, D, C] and values [R, G, C, D] are filled up to the column before `end` - 1."""
    groups, heads, dim = norms.shape
    rows = []
    for row, begin in enumerate(begins):
        own = qkv[row, : groups * heads * dim].view(groups, heads, dim)
        normed = own / (own.square().mean(-1, keepdim=True) + EPS).sqrt() * norms
        turned = torch.complex(normed[..., ::2], normed[..., 1::2]) * torch.complex(*turns[row].unbind(-1))
        turned = torch.view_as_real(turned).flatten(-2)
        new_value = qkv[row, groups * heads * dim :].view(groups, 1, dim)
        past_keys, past_values = keys[row, :, :, begin : end - 1].transpose(1, 2), values[row, :, begin : end - 1]
        all_keys = torch.cat((past_keys, turned[:, -1:]), dim=1)
        scores = turned[:, :-1] @ all_keys.transpose(1, 2)
        rows.append((scores.softmax(-1) @ torch.cat((past_values, new_value), dim=1)).flatten())
    return torch.stack(rows)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("groups", "per_group", "dim"), [(2, 2, 16), (1, 1, 32), (2, 4, 128), (3, 5, 48)])
@pytest.mark.parametrize("end", [1, 16, 17, 40, 48])
def test_a_step(groups: int, per_group: int, dim: int, end: int) -> None:
    """Rows that begin at the first column, at the last, and in the middle of a vector; a cache of three vectors."""
    room, heads = 3 * LANES, per_group + 1
    begins = torch.tensor([0, end - 1, end // 2, end // 3])
    rows = begins.numel()
    qkv = random(rows, groups * heads * dim + groups * dim, seed=1)
    norms, turns = random(groups, heads, dim, seed=2), random(rows, dim // 2, 2, seed=3) * dim**-0.25
    # One row more than are live, which must stay as it is.
    keys, values = random(rows + 1, groups, dim, room, seed=4), random(rows + 1, groups, room, dim, seed=5)
    before = keys.clone(), values.clone()
    exact = exact_step(
        *(x.double() for x in (qkv, norms, turns, keys, values)),  # type: ignore[arg-type]
        begins=begins.tolist(),
        end=end,
    )
    out = decode_attention(qkv, norms, turns, keys, values, begins, end, EPS)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    # Nothing was written but the new column.
    keys[:rows, :, :, end - 1], values[:rows, :, end - 1] = (
        before[0][:rows, :, :, end - 1],
        before[1][:rows, :, end - 1],
    )
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_what_a_step_leaves_is_what_the_next_reads() -> None:
    """Token by token: the same as all tokens at once."""
    dim, steps = 16, 21
    qkv, norms = random(steps, 3 * dim, seed=1), torch.ones(1, 2, dim)
    turns = torch.tensor([1.0, 0.0]).expand(1, dim // 2, 2) * dim**-0.25
    keys, values = torch.zeros(1, 1, dim, 2 * LANES), torch.zeros(1, 1, 2 * LANES, dim)
    outs = [
        decode_attention(qkv[i : i + 1], norms, turns, keys, values, torch.tensor([0]), i + 1, EPS)
        for i in range(steps)
    ]
    q, k, v = (x.double().unsqueeze(1) for x in qkv.split(dim, dim=1))
    q, k = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() for x in (q, k))
    exact = exact_attention(q, k, v, (steps,), 1 / math.sqrt(dim))
    torch.testing.assert_close(torch.cat(outs).double(), exact.flatten(1), rtol=1e-5, atol=1e-5)
