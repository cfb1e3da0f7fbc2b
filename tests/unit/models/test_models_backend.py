"""Segments of queries and keys: what a varlen kernel is told, and the loop of the torch path."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megatron_klear.models.qwen3.backend as backend
from helpers.micro_batches import micro_batch_of_lengths
from megatron_klear.config.rope import RopeConfig
from megatron_klear.models.qwen3.attention import packed_sequences, torch_attention
from megatron_klear.models.qwen3.backend import VarlenPlan, attention_kernel, varlen_attention, varlen_plan
from megatron_klear.parallel.context import context_rows
from megatron_klear.types import Topology

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.3
# Multiples of 2 x 4, as context parallelism of up to 4 asks for.
LENGTHS = (8, 24, 16, 40)


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), n, DIM, generator=generator, dtype=dtype) for n in (HEADS, GROUPS, GROUPS))
    return q, k, v


def one_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last len(q) of len(k) positions, written out."""
    ahead = k.size(0) - q.size(0)
    rows = torch.arange(q.size(0))[:, None] + ahead
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    scores = scores.masked_fill(torch.arange(k.size(0)) > rows, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True)
    return torch.cat([one_sequence(*part) for part in parts])


def by_segments(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan) -> Tensor:
    """What a varlen kernel does with a plan, in the alignment that flash-attn documents (bottom right)."""
    queries, keys = plan.cu_queries.tolist(), plan.cu_keys.tolist()
    ends = zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
    assert max(b - a for a, b in itertools.pairwise(queries)) == plan.max_queries
    assert max(b - a for a, b in itertools.pairwise(keys)) == plan.max_keys
    return torch.cat([one_sequence(q[a:b], k[c:d], v[c:d]) for a, b, c, d in ends])


def own_rows(size: int, rank: int) -> Tensor:
    return context_rows(micro_batch_of_lengths(LENGTHS).cu_seqlens, rank, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_all_positions_and_the_work(size: int) -> None:
    rows = [own_rows(size, rank) for rank in range(size)] if size > 1 else [torch.arange(sum(LENGTHS))]
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(LENGTHS)))
    # Each position costs as many keys as it sees.
    seen = torch.cat([torch.arange(1, n + 1) for n in LENGTHS])
    assert len({int(seen[own].sum()) for own in rows}) == 1
    for own in rows:
        assert torch.equal(own, own.sort().values)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plan_gives_each_rank_its_rows_of_the_whole(size: int) -> None:
    q, k, v = operands()
    wanted, cu_seqlens = whole(q, k, v), micro_batch_of_lengths(LENGTHS).cu_seqlens
    for rank in range(size):
        own = own_rows(size, rank) if size > 1 else torch.arange(sum(LENGTHS))
        plan = varlen_plan(cu_seqlens, max(LENGTHS), own.numel(), size, rank)
        assert plan.cu_queries.dtype == plan.cu_keys.dtype == torch.int32
        keys, values = (k, v) if plan.key_rows is None else (k[plan.key_rows], v[plan.key_rows])
        torch.testing.assert_close(by_segments(q[own], keys, values, plan), wanted[own], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("longest_dense", "block"),
    [(0, 3), (0, 1024), (min(LENGTHS), 3), (1024, 3)],
    ids=["rows", "loop", "mixed", "dense"],
)
def test_each_rank_gets_its_rows_and_gradients(
    size: int, longest_dense: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_klear.models.qwen3.attention.MAX_DENSE_LENGTH", longest_dense)
    monkeypatch.setattr("megatron_klear.models.qwen3.attention.BLOCK_ROWS", block)
    micro_batch = micro_batch_of_lengths(LENGTHS)
    leaves = [x.requires_grad_() for x in operands()]
    weights = torch.randn(sum(LENGTHS), HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((whole(*leaves) * weights).sum(), leaves)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(size):
        own = own_rows(size, rank) if size > 1 else torch.arange(sum(LENGTHS))
        topology = Topology(context_rank=rank, context_size=size)
        part = micro_batch_of_lengths(LENGTHS)
        part.positions, part.sequence_ids = micro_batch.positions[own], micro_batch.sequence_ids[own]
        sequences = packed_sequences(part, topology, head_dim=DIM, rope=RopeConfig(rope_theta=1e4), dtype=torch.float64)
        out = torch_attention(leaves[0][own], leaves[1], leaves[2], sequences, SCALE)
        torch.testing.assert_close(out, whole(*leaves)[own], rtol=1e-12, atol=1e-12)
        total = total + (out * weights[own]).sum()
    for found, right in zip(torch.autograd.grad(total, leaves), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


def test_without_a_gpu_the_plain_paths_run_and_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    choice = attention_kernel(torch.bfloat16)
    assert str(choice) == "attention: torch (no CUDA device)" and varlen_attention(choice.kernel) is None


@pytest.mark.parametrize(
    ("there", "dtype", "kernel"),
    [
        (("te", "flash", "varlen"), torch.float32, "transformer_engine"),
        (("flash", "varlen"), torch.bfloat16, "flash_attn"),
        (("varlen",), torch.bfloat16, "torch_varlen"),
        ((), torch.bfloat16, "torch"),
        (("flash", "varlen"), torch.float32, "torch"),
    ],
    ids=str,
)
def test_on_cuda_the_first_that_is_there_runs(
    there: Sequence[str], dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, short in (
        ("TEDotProductAttention", "te"),
        ("flash_attn_varlen_func", "flash"),
        ("varlen_attn", "varlen"),
    ):
        monkeypatch.setattr(backend, name, F.silu if short in there else None)
    # Past the cache, which belongs to the machine as it is.
    assert attention_kernel.__wrapped__(dtype).kernel == kernel
