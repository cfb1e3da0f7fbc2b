"""The Triton kernels of the policy loss on a CUDA device, against float64. At most 20 GB of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import helpers.triton_installed  # noqa: F401  skips this file
from helpers.logit_rows import Merged, Upstream, WrittenOut, cuts, merged, random_upstream, written_out
from megatron_klear_kernels.linear_policy_loss.triton_exp import exp_gradient, exp_statistics, merge_tiles
from megatron_klear_kernels.linear_policy_loss.triton_rows import (
    gradient_view,
    logit_gradient,
    row_statistics,
    scale_,
)

pytestmark = pytest.mark.gpu

VOCABULARY, NUM_TOKENS = 151_936, 151_669
INV_TEMPERATURE = 1 / 0.7
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PRECISION = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Rows x Qwen3's vocabulary exceeds 2^31.
MANY_ROWS = 14_400


@dataclass(frozen=True)
class Found:
    merged: Merged
    gradient: Tensor  # [C, V]


def upstream_of(num_rows: int, *, with_entropy: bool = True) -> Upstream:
    made = random_upstream(num_rows, with_entropy=with_entropy)
    return Upstream(made.d_logprob.cuda(), None if made.d_entropy is None else made.d_entropy.cuda())


def targets_of(num_rows: int, num_valid: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(num_valid, (num_rows,), generator=generator).cuda()


def where(shard: slice, num_valid: int) -> dict[str, Any]:
    local = min(max(num_valid - shard.start, 0), shard.stop - shard.start)
    return {"start": shard.start, "num_valid": local, "inv_temperature": INV_TEMPERATURE}


def check(found: Found, wanted: WrittenOut, upstream: Upstream, precision: float, rows: slice = slice(None)) -> None:
    """`wanted` and `upstream` are of `rows` only."""
    torch.testing.assert_close(found.merged.logprob[rows].double(), wanted.logprob, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.merged.entropy[rows].double(), wanted.entropy, atol=2e-5, rtol=0)
    num_valid = wanted.gradient.size(1)
    gradient, padding = found.gradient[rows, :num_valid].double(), found.gradient[rows, num_valid:]
    allowed = precision * wanted.gradient.abs() + 2e-4 * wanted.probabilities
    if upstream.d_entropy is not None:
        allowed += precision * upstream.d_entropy.abs()[:, None] * INV_TEMPERATURE * wanted.probabilities
    # The smallest float16 is 6e-8.
    assert float(((gradient - wanted.gradient).abs() - allowed).max()) < 6e-8
    assert not bool(padding.count_nonzero())


def row_path(logits: Tensor, targets: Tensor, upstream: Upstream, num_valid: int, outs: list[Tensor]) -> Found:
    shards = cuts(logits.size(1), len(outs))
    parts = [row_statistics(logits[:, shard], targets, **where(shard, num_valid)) for shard in shards]
    row = merged(torch.stack(parts))
    vectors = (row.peak, row.log_sum, row.entropy, upstream.d_logprob, upstream.d_entropy)
    for shard, out in zip(shards, outs, strict=True):
        logit_gradient(logits[:, shard], targets, *vectors, out=out, **where(shard, num_valid))
    return Found(row, torch.cat(outs, dim=1) if len(outs) > 1 else outs[0])


def exp_path(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Upstream, num_valid: int) -> Found:
    out = hidden.new_full((hidden.size(0), weight.size(0)), torch.nan)
    kw = where(slice(0, weight.size(0)), num_valid)
    statistics = exp_statistics(hidden, weight, targets, out=out, **kw)
    row = merged(merge_tiles(statistics)[None])
    vectors = (row.peak, row.log_sum, row.entropy, row.logprob, upstream.d_logprob, upstream.d_entropy)
    exp_gradient(out, statistics, targets, *vectors, **kw)
    return Found(row, out)


def random_logits(num_rows: int, num_columns: int, num_valid: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.empty(num_rows, num_columns, device="cuda").normal_(std=3.0, generator=generator)
    logits[:, num_valid:] = 123.0
    return logits


def random_operands(num_rows: int, num_columns: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(width)
    hidden = torch.empty(num_rows, width, device="cuda").normal_(generator=generator)
    weight = torch.empty(num_columns, width, device="cuda").normal_(std=3 * width**-0.5, generator=generator)
    return hidden.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_logits(dtype: torch.dtype, num_shards: int, with_entropy: bool) -> None:
    for num_columns, num_valid in ((VOCABULARY, NUM_TOKENS), (1001, 1001), (4099, 4000)):
        logits = random_logits(48, num_columns, num_valid).to(dtype)
        targets, upstream = targets_of(48, num_valid), upstream_of(48, with_entropy=with_entropy)
        shards = cuts(num_columns, num_shards)
        outs = [torch.full((48, s.stop - s.start), torch.nan, device="cuda", dtype=dtype) for s in shards]
        wanted = written_out(logits[:, :num_valid], targets, upstream, INV_TEMPERATURE)
        check(row_path(logits, targets, upstream, num_valid, outs), wanted, upstream, PRECISION[dtype])


def test_rows_of_any_strides() -> None:
    logits, targets, upstream = random_logits(48, 4099, 4099), targets_of(48, 4099), upstream_of(48)
    wanted = row_path(logits, targets, upstream, 4099, [torch.empty_like(logits)])
    sparse = torch.full((48, 2 * 4099), torch.nan, device="cuda")[:, ::2]
    sparse.copy_(logits)
    for view in (sparse, logits.t().contiguous().t()):
        found = row_path(view, targets, upstream, 4099, [view])
        torch.testing.assert_close(found.merged.logprob, wanted.merged.logprob, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.gradient, wanted.gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_on_top_of_logits_do_not_race(dtype: torch.dtype) -> None:
    logits, targets, upstream = (
        random_logits(2048, VOCABULARY, NUM_TOKENS),
        targets_of(2048, NUM_TOKENS),
        upstream_of(2048),
    )
    apart = row_path(logits, targets, upstream, NUM_TOKENS, [torch.empty_like(logits, dtype=dtype)]).gradient
    for _ in range(5):
        again = logits.clone()
        found = row_path(again, targets, upstream, NUM_TOKENS, [gradient_view(again, dtype)])
        assert torch.equal(found.gradient, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_two_billion_logits(dtype: torch.dtype) -> None:
    logits = random_logits(MANY_ROWS, VOCABULARY, NUM_TOKENS).to(dtype)
    targets, upstream = targets_of(MANY_ROWS, NUM_TOKENS), upstream_of(MANY_ROWS)
    assert logits.numel() > 2**31
    last = slice(MANY_ROWS - 8, None)
    assert upstream.d_entropy is not None
    part = Upstream(upstream.d_logprob[last], upstream.d_entropy[last])
    wanted = written_out(logits[last, :NUM_TOKENS], targets[last], part, INV_TEMPERATURE)
    out = gradient_view(logits, torch.bfloat16) if dtype == torch.float32 else logits
    found = row_path(logits, targets, upstream, NUM_TOKENS, [out])
    check(found, wanted, part, PRECISION[torch.bfloat16], last)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_with_exponentials(dtype: torch.dtype, with_entropy: bool) -> None:
    for num_rows, num_columns, num_valid, width in (
        (300, VOCABULARY, NUM_TOKENS, 256),
        (130, 4099, 4000, 500),
        (7, 1001, 1001, 33),
    ):
        hidden, weight = random_operands(num_rows, num_columns, width, dtype)
        weight[num_valid:] = 123.0
        targets, upstream = targets_of(num_rows, num_valid), upstream_of(num_rows, with_entropy=with_entropy)
        logits = hidden.double() @ weight[:num_valid].double().t()
        wanted = written_out(logits, targets, upstream, INV_TEMPERATURE)
        check(exp_path(hidden, weight, targets, upstream, num_valid), wanted, upstream, 2 * PRECISION[dtype])


def test_more_than_two_billion_exponentials() -> None:
    hidden, weight = random_operands(MANY_ROWS, VOCABULARY, 64, torch.bfloat16)
    targets, upstream = targets_of(MANY_ROWS, NUM_TOKENS), upstream_of(MANY_ROWS)
    last = slice(MANY_ROWS - 8, None)
    assert upstream.d_entropy is not None
    part = Upstream(upstream.d_logprob[last], upstream.d_entropy[last])
    logits = hidden[last].double() @ weight[:NUM_TOKENS].double().t()
    wanted = written_out(logits, targets[last], part, INV_TEMPERATURE)
    found = exp_path(hidden, weight, targets, upstream, NUM_TOKENS)
    check(found, wanted, part, 2 * PRECISION[torch.bfloat16], last)


def test_a_row_depends_on_neither_its_place_nor_its_company() -> None:
    """Bitwise: old and current log-probs of the same weights must have a ratio of exactly 1."""
    hidden, weight = random_operands(700, VOCABULARY, 512, torch.bfloat16)
    targets, upstream = targets_of(700, NUM_TOKENS), upstream_of(700)
    assert upstream.d_entropy is not None
    whole = exp_path(hidden, weight, targets, upstream, NUM_TOKENS)
    for rows in (slice(5, 6), slice(123, 456), slice(650, 700)):
        part = Upstream(upstream.d_logprob[rows].clone(), upstream.d_entropy[rows].clone())
        found = exp_path(hidden[rows], weight, targets[rows].clone(), part, NUM_TOKENS)
        for name in ("peak", "log_sum", "entropy", "logprob"):
            assert torch.equal(vars(found.merged)[name], vars(whole.merged)[name][rows]), name
        assert torch.equal(found.gradient, whole.gradient[rows])


def test_scaling_by_a_number_on_the_device() -> None:
    values = torch.randn(5_000_001, device="cuda")
    for factor in (0.5, 1.0, -3.0):
        scaled = values.clone()
        scale_(scaled, torch.tensor(factor, device="cuda"))
        assert torch.equal(scaled, values * factor)
