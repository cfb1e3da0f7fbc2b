"""Triton path B under Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import helpers.triton_interpreter  # noqa: F401  skips this file
from helpers.logit_rows import Merged, Upstream, WrittenOut, cuts, merged, random_upstream, written_out
from megatron_klear_kernels.linear_policy_loss.triton_exp import (
    ExpStatistics,
    exp_gradient,
    exp_statistics,
    merge_tiles,
)

# numpy computes the lanes that a mask or a `where` throws away, too.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
INV_TEMPERATURE = 1 / 0.7
# Two roundings, of E and of the gradient; the interpreter cuts bfloat16 off where hardware rounds it.
PRECISION = {torch.float32: 2e-5, torch.bfloat16: 2 * 2.0**-7, torch.float16: 2 * 2.0**-11}
# The smallest float16 is 6e-8.
TINY = {torch.float32: 1e-12, torch.bfloat16: 1e-12, torch.float16: 6e-8}


@dataclass(frozen=True)
class Case:
    hidden: Tensor  # [C, H]
    weight: Tensor  # [num_valid + padding, H]
    targets: Tensor
    num_valid: int
    offset: float = 0.0
    inv_temperature: float = INV_TEMPERATURE


def make_case(
    num_valid: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_rows: int = 6,
    width: int = 40,
    num_padding: int = 0,
    offset: float = 0.0,
) -> Case:
    """Logits of standard deviation 3 around `offset`, two of which tie; padding rows would win every softmax."""
    generator = torch.Generator().manual_seed(num_valid + num_rows)
    hidden = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(num_valid + num_padding, width, generator=generator) * 3 * width**-0.5
    hidden[:, -1], weight[:, -1] = 1.0, offset
    targets = torch.randint(num_valid, (num_rows,), generator=generator)
    targets[:2] = torch.tensor([0, num_valid - 1])
    weight[targets[3]] = weight[targets[2]]
    weight[num_valid:] = 123.0
    return Case(hidden.to(dtype), weight.to(dtype), targets, num_valid, offset)


@dataclass(frozen=True)
class Found:
    merged: Merged
    gradient: Tensor  # [C, V]
    exponentials: list[Tensor]
    statistics: list[ExpStatistics]


def run(case: Case, upstream: Upstream, *, num_shards: int = 1, out: Tensor | None = None) -> Found:
    where, spaces, before, statistics = [], [], [], []
    for shard in cuts(case.weight.size(0), num_shards):
        num_columns = shard.stop - shard.start
        num_valid = min(max(case.num_valid - shard.start, 0), num_columns)
        where.append({"start": shard.start, "num_valid": num_valid, "inv_temperature": case.inv_temperature})
        spaces.append(case.hidden.new_full((case.hidden.size(0), num_columns), torch.nan) if out is None else out)
        made = exp_statistics(case.hidden, case.weight[shard], case.targets, out=spaces[-1], **where[-1])
        before.append(spaces[-1].clone())
        statistics.append(made)
    row = merged(torch.stack([merge_tiles(one) for one in statistics]))
    vectors = (row.peak, row.log_sum, row.entropy, row.logprob, upstream.d_logprob, upstream.d_entropy)
    for space, one, kw in zip(spaces, statistics, where, strict=True):
        exp_gradient(space, one, case.targets, *vectors, **kw)
    return Found(row, torch.cat(spaces, dim=1), before, statistics)


def reference(case: Case, upstream: Upstream) -> WrittenOut:
    logits = case.hidden.double() @ case.weight[: case.num_valid].double().t()
    return written_out(logits, case.targets, upstream, case.inv_temperature)


def check(case: Case, upstream: Upstream, found: Found) -> None:
    wanted = reference(case, upstream)
    rounding = 1e-5 + 2.0**-22 * abs(case.offset) * case.inv_temperature
    torch.testing.assert_close(found.merged.logprob.double(), wanted.logprob, atol=rounding, rtol=0)
    torch.testing.assert_close(found.merged.entropy.double(), wanted.entropy, atol=2 * rounding, rtol=0)
    assert float(found.merged.logprob.max()) <= rounding
    gradient, padding = found.gradient.split([case.num_valid, found.gradient.size(1) - case.num_valid], dim=1)
    # E and the gradient are rounded, and log p is of the rounded E.
    precision = PRECISION[case.hidden.dtype]
    allowed = precision * wanted.gradient.abs() + 10 * rounding * wanted.probabilities
    if upstream.d_entropy is not None:
        slope = upstream.d_entropy.abs()[:, None] * case.inv_temperature
        allowed += precision / 2 * slope * wanted.probabilities
    error = (gradient.double() - wanted.gradient).abs()
    assert float((error - allowed).max()) < TINY[case.hidden.dtype]
    assert torch.equal(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_valid", [1000, 1001, 4099, 8192])
def test_statistics_and_gradient_are_those_of_float64(num_valid: int, dtype: torch.dtype) -> None:
    case = make_case(num_valid, dtype)
    for with_entropy in (True, False):
        upstream = random_upstream(6, with_entropy=with_entropy)
        check(case, upstream, run(case, upstream))


@pytest.mark.parametrize("width", [1, 33, 256, 300])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_any_number_of_rows_and_any_width(num_rows: int, width: int) -> None:
    if num_rows == 1:  # make_case ties the targets of four rows
        case = make_case(1001, width=width)
        case = replace(case, hidden=case.hidden[:1], targets=case.targets[:1].clone())
    else:
        case = make_case(1001, num_rows=num_rows, width=width)
    upstream = random_upstream(num_rows)
    check(case, upstream, run(case, upstream))


def test_the_whole_vocabulary_of_qwen3() -> None:
    case, upstream = make_case(151_669, num_padding=267, num_rows=4, width=16), random_upstream(4)
    check(case, upstream, run(case, upstream, num_shards=2))


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_tiles_and_padding(num_shards: int) -> None:
    """6000 columns, 1300 of them tokens: with 2 shards two tiles, with 4 two shards hold padding only."""
    case, upstream = make_case(1300, num_padding=4700), random_upstream(6)
    found = run(case, upstream, num_shards=num_shards)
    check(case, upstream, found)
    if num_shards == 4:
        assert torch.equal(merge_tiles(found.statistics[-1]), found.statistics[-1].parts[0])
    empty = found.statistics[0].parts[-1] if num_shards == 2 else found.statistics[-1].parts[0]
    assert torch.equal(empty, torch.tensor([-torch.inf, 0.0, 0.0, 0.0])[:, None].expand(4, 6))
    assert torch.equal(found.exponentials[-1], torch.zeros_like(found.exponentials[-1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [100.0, 1000.0, -1000.0])
def test_a_common_offset_of_the_logits(offset: float, dtype: torch.dtype) -> None:
    """bfloat16 has neither 100 + x nor 1000 + x, but 100 and 1000 (as 1000 = 2^3 x 125) times a 1."""
    for inv_temperature in (1.0, INV_TEMPERATURE):
        case = replace(make_case(4099, dtype, offset=offset), inv_temperature=inv_temperature)
        upstream = random_upstream(6)
        check(case, upstream, run(case, upstream, num_shards=2))


def test_exponentials_are_those_of_the_tile() -> None:
    case = make_case(2500, num_padding=12)
    found = run(case, random_upstream(6))
    z = (case.hidden.double() @ case.weight.double().t() * INV_TEMPERATURE)[:, :2500]
    tiles = found.statistics[0].tile_columns
    for i, tile in enumerate(z.split(tiles, dim=1)):
        wanted = (tile - tile.amax(1, keepdim=True)).exp()
        e = found.exponentials[0][:, i * tiles : i * tiles + tile.size(1)]
        torch.testing.assert_close(e.double(), wanted, rtol=2.0**-7, atol=1e-30)
    assert torch.equal(found.exponentials[0][:, 2500:], torch.zeros(6, 12, dtype=torch.bfloat16))


def test_float16_keeps_small_probabilities() -> None:
    """13 below the peak, exp(z - m) = 2e-6 is no normal float16 number; a large gradient shows what is left of it."""
    hidden, weight = torch.ones(1, 16).half(), torch.zeros(1001, 16).half()
    weight[0] = 13.0 / 16
    targets, upstream = torch.zeros(1, dtype=torch.int64), Upstream(torch.full((1,), 2.0**10), torch.zeros(1))
    case = Case(hidden, weight, targets, 1001, inv_temperature=1.0)
    wanted = reference(case, upstream).gradient
    torch.testing.assert_close(run(case, upstream).gradient.double(), wanted, rtol=2.0**-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_certain_and_impossible_tokens_give_no_nan(dtype: torch.dtype) -> None:
    """The first token is certain: every other probability underflows."""
    hidden, weight = torch.ones(2, 16).to(dtype), torch.zeros(2100, 16).to(dtype)
    weight[5] = 30.0
    case = Case(hidden, weight, torch.tensor([5, 2000]), 2100, offset=480.0)
    upstream = random_upstream(2)
    found = run(case, upstream)
    check(case, upstream, found)
    assert torch.equal(found.gradient[0], torch.zeros(2100, dtype=dtype))


def test_a_target_that_equals_a_padding_column_is_not_found_there() -> None:
    case, upstream = make_case(1000, num_padding=24), random_upstream(6)
    found = run(replace(case, targets=torch.tensor([1000, 1001, 1023, 1024, -1, 2**40])), upstream)
    assert torch.equal(found.statistics[0].parts[:, 3], torch.zeros(1, 6))
    assert torch.equal(found.gradient[:, 1000:], torch.zeros(6, 24, dtype=torch.bfloat16))


def test_row_strides_are_respected() -> None:
    case, upstream = make_case(1001, num_padding=23), random_upstream(6)
    hidden, weight, out = (torch.full(s, torch.nan).bfloat16() for s in ((6, 60), (1024, 50), (6, 1100)))
    hidden[:, :40], weight[:, :40] = case.hidden, case.weight
    far = replace(case, hidden=hidden[:, :40], weight=weight[:, :40])
    found = run(far, upstream, out=out[:, :1024])
    wanted = run(case, upstream)
    assert torch.equal(found.merged.logprob, wanted.merged.logprob)
    assert torch.equal(found.gradient, wanted.gradient)
    assert bool(out[:, 1024:].isnan().all())


def test_a_row_does_not_depend_on_its_company() -> None:
    """Rows keep their places: numpy's product, which the interpreter uses, depends on them, hardware's does not."""
    case, upstream = make_case(4099, num_rows=12), random_upstream(12)
    assert upstream.d_entropy is not None
    whole = run(case, upstream)
    for num_rows, others in ((5, 0.0), (1, 0.0), (12, 50.0)):
        hidden = case.hidden[:num_rows].clone()
        hidden[1:] += others
        part = Upstream(upstream.d_logprob[:num_rows].clone(), upstream.d_entropy[:num_rows].clone())
        found = run(replace(case, hidden=hidden, targets=case.targets[:num_rows].clone()), part)
        same = 1 if others else num_rows
        assert torch.equal(found.merged.logprob[:same], whole.merged.logprob[:same])
        assert torch.equal(found.merged.entropy[:same], whole.merged.entropy[:same])
        assert torch.equal(found.gradient[:same], whole.gradient[:same])


@pytest.mark.parametrize("num_tiles", [1, 3, 70])
def test_tiles_are_merged_in_an_order_that_does_not_depend_on_the_rows(num_tiles: int) -> None:
    parts = torch.rand(num_tiles, 4, 40, generator=torch.Generator().manual_seed(0)) * 10
    parts[0, :, :5] = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])[:, None]
    statistics = merge_tiles(ExpStatistics(parts, 256))
    for rows in (slice(0, 1), slice(7, 40), slice(3, 36)):
        assert torch.equal(merge_tiles(ExpStatistics(parts[:, :, rows].contiguous(), 256)), statistics[:, rows])
    whole, wanted = merged(statistics[None]), merged(parts.double())
    some = slice(5 if num_tiles == 1 else 0, 40)
    torch.testing.assert_close(whole.logprob[some].double(), wanted.logprob[some], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(whole.entropy[some].double(), wanted.entropy[some], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("far", ["hidden", "weight", "out"])
def test_offsets_beyond_two_billion_do_not_wrap(tmp_path: Path, far: str) -> None:
    """In a sparse file of 2^32 numbers. Offsets from its middle on reach 2^31; wrapped, they would read its zeros."""
    numbers = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**32 + 2**26, dtype=torch.bfloat16)
    case, upstream = make_case(520), random_upstream(3)
    case = replace(case, hidden=case.hidden[:3], targets=case.targets[:3].clone())
    shape, stride = {"hidden": ((3, 40), 2**30), "weight": ((520, 40), 2**22), "out": ((3, 520), 2**30)}[far]
    view = numbers.as_strided(shape, (stride, 1), 2**31)
    wanted = run(case, upstream)
    if far != "out":
        view.copy_(getattr(case, far))
        case = replace(case, **{far: view})
    found = run(case, upstream, out=view if far == "out" else None)
    assert torch.equal(found.merged.logprob, wanted.merged.logprob)
    assert torch.equal(found.gradient, wanted.gradient)


def test_bad_operands_are_refused() -> None:
    case, upstream = make_case(256), random_upstream(6)
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16 of shape \(256, 40\) on cpu, but is torch.fl"):
        run(replace(case, weight=case.weight.float()), upstream)
    with pytest.raises(ValueError, match=r"weight must be .* of shape \(256, 39\)"):
        run(replace(case, hidden=case.hidden[:, :39]), upstream)
    with pytest.raises(ValueError, match=r"hidden has strides \(1, 6\): its rows must be contiguous"):
        run(replace(case, hidden=case.hidden.t().contiguous().t()), upstream)
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 of shape \(6, 256\)"):
        run(case, upstream, out=torch.empty(6, 255, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"targets must be torch.int64 of shape \(6,\)"):
        run(replace(case, targets=case.targets[:5]), upstream)
    with pytest.raises(ValueError, match=r"d_logprob must be torch.float32 of shape \(6,\)"):
        run(case, random_upstream(5))
    with pytest.raises(ValueError, match=r"d_entropy must be torch.float32 of shape \(6,\)"):
        run(case, Upstream(torch.ones(6), torch.ones(6).double()))
    with pytest.raises(ValueError, match="num_valid is -1 but this shard has 256 columns"):
        one = torch.empty(6, 256).bfloat16()
        exp_statistics(
            case.hidden, case.weight, case.targets, start=0, num_valid=-1, inv_temperature=INV_TEMPERATURE, out=one
        )


def test_statistics_of_other_rows_are_refused() -> None:
    case, v = make_case(256), torch.ones(5)
    found = run(case, random_upstream(6))
    where = {"start": 0, "num_valid": 256, "inv_temperature": INV_TEMPERATURE}
    with pytest.raises(ValueError, match=r"parts of shape \(1, 4, 6\), but exponentials of shape \(5, 256\) need"):
        exp_gradient(found.gradient[:5], found.statistics[0], case.targets[:5], v, v, v, v, v, None, **where)
