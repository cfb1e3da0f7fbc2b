"""Packed attention, in C, in dense blocks and one by one, against plain float64 attention of each sequence."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.config.rope import RopeConfig
from megatron_klear.models.qwen3 import attention as attention_module
from megatron_klear.models.qwen3 import dense_attention as dense_module
from megatron_klear.models.qwen3.attention import (
    MAX_DENSE_LENGTH,
    MAX_NATIVE_LENGTH,
    PackedAttention,
    PackedSequences,
    ShortSequences,
    packed_sequences,
)
from megatron_klear.models.qwen3.dense_attention import DensePlan, Share, dense_plan
from megatron_klear.models.qwen3.spec import qwen3_config
from megatron_klear.types import Topology
from megatron_klear_kernels.native.library import why_missing

HEADS, GROUPS, DIM = 4, 2, 12
THETA = 1000.0
ROPE = RopeConfig(rope_theta=THETA)
RAGGED = (7, 1, 12, 4, 1, 12, 2)
LENGTHS = [RAGGED, (1,), (1, 1, 1), (9,)]

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def projections(num_positions: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_positions)
    q, k, v = (torch.randn(num_positions, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def packed(lengths: Sequence[int], *, dtype: torch.dtype = torch.float32) -> PackedSequences:
    return packed_sequences(micro_batch_of_lengths(lengths), Topology(), head_dim=DIM, rope=ROPE, dtype=dtype)


def attention(sequences: PackedSequences) -> Forward:
    shape = tiny_shape(tied=True).model_copy(update={"head_dim": DIM})
    config = qwen3_config(shape, ParallelConfig(), dtype=torch.float32, on_cpu=True)
    module = PackedAttention(config, 1, AttnMaskType.causal, "self")
    module.engine = None  # where there is a GPU with Transformer Engine: this is a test of the other paths
    return lambda q, k, v: module(q, k, v, None, packed_seq_params=sequences)


# Longest sequence of a block, and scores that it holds: all in one, several, short and long ones, none.
PATHS = {
    "dense": (MAX_DENSE_LENGTH, 1 << 19),
    "blocks": (MAX_DENSE_LENGTH, 250),
    "mixed": (5, 30),
    "one by one": (0, 1),
}


def set_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest, scores = PATHS[name]
    monkeypatch.setattr(attention_module, "MAX_DENSE_LENGTH", longest)
    monkeypatch.setattr(attention_module, "MAX_NATIVE_LENGTH", longest)
    monkeypatch.setattr(dense_module, "BLOCK_SCORES", scores)


@pytest.fixture(params=[*PATHS, "in C", "in C and one by one"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernel takes heads of a multiple of 16."""
    if request.param.startswith("in C"):
        if (reason := why_missing()) is not None:
            pytest.skip(f"no C kernels: {reason}")
        monkeypatch.setattr(sys.modules[__name__], "DIM", 16)
    path: str = request.param
    set_path({"in C": "dense", "in C and one by one": "mixed"}.get(path, path), monkeypatch)
    return path


def planned(lengths: Sequence[int]) -> DensePlan:
    return dense_plan(
        packed(lengths).starts,
        Share(),
        heads=HEADS,
        groups=GROUPS,
        longest=attention_module.MAX_DENSE_LENGTH,
        dtype=torch.float32,
    )


def shared(sequences: PackedSequences) -> ShortSequences:
    q, k, _ = projections(int(sequences.starts[-1]))
    return sequences.short_sequences(q, k)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), dim=-1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Head by head and query by query, rotary positions as transformers writes them. [T, heads x D]."""
    outputs = []
    for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        positions = torch.arange(end - begin, dtype=torch.float64)
        inverse = 1.0 / THETA ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angles = torch.cat((positions[:, None] * inverse, positions[:, None] * inverse), dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        query = q[begin:end] * cos + rotate_half(q[begin:end]) * sin
        key = k[begin:end] * cos + rotate_half(k[begin:end]) * sin
        value = v[begin:end]
        rows = []
        for t in range(end - begin):
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                weights = (key[: t + 1, group] @ query[t, head] / DIM**0.5).softmax(dim=0)
                heads.append(weights @ value[: t + 1, group])
            rows.append(torch.cat(heads))
        outputs.append(torch.stack(rows))
    return torch.cat(outputs)


def forward_backward(run: Forward, operands: Sequence[Tensor]) -> list[Tensor]:
    """Output and the gradients of q, k and v under a fixed upstream gradient."""
    leaves = [x.clone().requires_grad_() for x in operands]
    out = run(*leaves)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view_as(out)
    out.backward(upstream.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_output_and_gradients(lengths: Sequence[int], path: str) -> None:
    operands = projections(sum(lengths))
    exact = forward_backward(lambda q, k, v: plain_attention(q, k, v, lengths), [x.double() for x in operands])
    actual = forward_backward(attention(packed(lengths)), operands)
    assert len(actual) == len(exact) == 4
    for mine, theirs in zip(actual, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_of_like_lengths(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_path(path, monkeypatch)
    plan = planned(RAGGED)
    found = [(block.num_sequences, block.mask.size(-1)) for block in plan.blocks], plan.left_out
    assert (
        found
        == {
            "dense": ([(7, 12)], ()),
            # Of 4 heads and 12 x 12 scores none has room for two.
            "blocks": ([(1, 12), (1, 12), (1, 7), (3, 4), (1, 1)], ()),
            "mixed": ([(1, 4), (1, 2), (2, 1)], (0, 2, 5)),
            "one by one": ([], tuple(range(7))),
        }[path]
    )


def test_bfloat16_stays_close() -> None:
    sequences, operands = packed(RAGGED, dtype=torch.bfloat16), projections(sum(RAGGED), dtype=torch.bfloat16)
    out = attention(sequences)(*operands)
    assert out.dtype == torch.bfloat16
    q, k, v = (x.double() for x in operands)
    exact = plain_attention(q, k, v, RAGGED)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4e-2)


def test_a_sequence_does_not_see_its_neighbours_or_its_future() -> None:
    lengths = (5, 6)
    run = attention(packed(lengths))
    operands = projections(11)
    before = run(*operands)
    changed = [x.clone() for x in operands]
    for x in changed:
        x[3:5] += 100.0  # the last two positions of the first sequence
    after = run(*changed)
    untouched = [0, 1, 2, *range(5, 11)]
    assert torch.equal(before[untouched], after[untouched])
    assert (before[3:5] != after[3:5]).any(dim=1).all()


def test_the_order_of_sequences_does_not_matter() -> None:
    lengths = (3, 8, 5)
    q, k, v = projections(16)
    forward = attention(packed(lengths))(q, k, v).split(lengths)
    swap = [torch.cat([x.split(lengths)[i] for i in (2, 0, 1)]) for x in (q, k, v)]
    moved = attention(packed((5, 3, 8)))(*swap).split((5, 3, 8))
    for i, piece in zip((2, 0, 1), moved, strict=True):
        torch.testing.assert_close(piece, forward[i], rtol=1e-6, atol=1e-6)


def test_a_maximum_length_above_the_longest_sequence_changes_nothing() -> None:
    batch = micro_batch_of_lengths(RAGGED)
    batch.max_seqlen = 20
    wide = packed_sequences(batch, Topology(), head_dim=DIM, rope=ROPE, dtype=torch.float32)
    operands = projections(sum(RAGGED))
    torch.testing.assert_close(attention(wide)(*operands), attention(packed(RAGGED))(*operands), rtol=1e-6, atol=1e-6)


def test_only_long_sequences_leave_the_dense_path() -> None:
    lengths = (MAX_DENSE_LENGTH, 2, MAX_DENSE_LENGTH + 1)
    plan = planned(lengths)
    assert plan.left_out == shared(packed(lengths)).left_out == (2,)
    assert sum(block.num_sequences for block in plan.blocks) == 2


def test_the_c_kernel_takes_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_missing()) is not None:
        pytest.skip(f"no C kernels: {reason}")
    monkeypatch.setattr(sys.modules[__name__], "DIM", 16)
    assert shared(packed((MAX_NATIVE_LENGTH, 2, MAX_NATIVE_LENGTH + 1))).left_out == (2,)


def test_a_plan_is_made_once() -> None:
    sequences = packed(RAGGED)
    assert shared(sequences) is shared(sequences)


def test_what_the_layers_share() -> None:
    sequences = packed((3, 1, 2))
    assert sequences.starts.tolist() == [0, 3, 4, 6]
    assert sequences.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert sequences.cos.shape == sequences.sin.shape == (6, 1, DIM // 2)
    assert torch.equal(sequences.cos[3], torch.ones(1, DIM // 2))  # position 0 again
