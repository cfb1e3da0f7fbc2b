"""Triton path A under Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import helpers.triton_interpreter  # noqa: F401  skips this file
from helpers.logit_rows import Merged, Upstream, WrittenOut, cuts, merged, random_upstream, written_out
from megatron_klear_kernels.linear_policy_loss import triton_rows
from megatron_klear_kernels.linear_policy_loss.triton_rows import (
    gradient_view,
    logit_gradient,
    row_statistics,
    scale_,
)

# numpy computes the lanes that a mask or a `where` throws away, too.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
INV_TEMPERATURE = 1 / 0.7
ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Case:
    logits: Tensor  # [C, num_valid + padding]
    targets: Tensor
    num_valid: int
    inv_temperature: float = INV_TEMPERATURE

    @property
    def tolerance(self) -> float:
        """A row's peak and its target's z are rounded multiples of logits, if there is a temperature."""
        largest = float(self.logits[:, : self.num_valid].float().abs().max()) * self.inv_temperature
        return 3e-6 + (4 * ROUNDING * largest if self.inv_temperature != 1 else 0)


def make_case(
    num_valid: int,
    num_rows: int = 8,
    *,
    num_padding: int = 0,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
    padding: float = 123.0,
) -> Case:
    """The first targets are the ends of the vocabulary, and one of four equal logits that are the row's largest."""
    generator = torch.Generator().manual_seed(num_valid + num_rows)
    logits = torch.randn(num_rows, num_valid + num_padding, generator=generator) * 3 + offset
    targets = torch.randint(num_valid, (num_rows,), generator=generator)
    targets[:2] = torch.tensor([0, num_valid - 1])
    logits[2, targets[:4]] = offset + 20.0
    targets[2] = targets[1]
    logits[:, num_valid:] = padding
    return Case(logits.to(dtype), targets, num_valid)


@dataclass(frozen=True)
class Found:
    merged: Merged
    gradient: Tensor  # [C, V] float32


def run(case: Case, upstream: Upstream, *, num_shards: int = 1, outs: Sequence[Tensor] | None = None) -> Found:
    """Every shard's statistics, merged, then every shard's gradient (into `outs`, else into float32 of its own)."""
    shards = cuts(case.logits.size(1), num_shards)
    local = [case.logits[:, shard] for shard in shards]
    where = [
        {
            "start": shard.start,
            "num_valid": min(max(case.num_valid - shard.start, 0), shard.stop - shard.start),
            "inv_temperature": case.inv_temperature,
        }
        for shard in shards
    ]
    parts = [row_statistics(x, case.targets, **kw) for x, kw in zip(local, where, strict=True)]
    row = merged(torch.stack(parts))
    outs = outs or [torch.full(x.shape, torch.nan) for x in local]
    for x, kw, out in zip(local, where, outs, strict=True):
        vectors = (row.peak, row.log_sum, row.entropy, upstream.d_logprob, upstream.d_entropy)
        logit_gradient(x, case.targets, *vectors, out=out, **kw)
    return Found(row, torch.cat([out.float() for out in outs], dim=1))


def reference(case: Case, upstream: Upstream) -> WrittenOut:
    return written_out(case.logits[:, : case.num_valid], case.targets, upstream, case.inv_temperature)


def check(case: Case, upstream: Upstream, found: Found, *, gradient_rtol: float = 0.0) -> None:
    wanted = reference(case, upstream)
    tolerance = case.tolerance
    torch.testing.assert_close(found.merged.logprob.double(), wanted.logprob, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.merged.entropy.double(), wanted.entropy, atol=tolerance, rtol=0)
    assert float(found.merged.logprob.max()) <= tolerance
    gradient, padding = found.gradient.split([case.num_valid, found.gradient.size(1) - case.num_valid], dim=1)
    tolerance *= 1 + float(upstream.d_logprob.abs().max())
    torch.testing.assert_close(gradient.double(), wanted.gradient, atol=tolerance, rtol=gradient_rtol)
    assert torch.equal(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_valid", [1000, 1001, 4099, 8192])
def test_statistics_and_gradient_are_those_of_float64(num_valid: int, num_shards: int) -> None:
    case = make_case(num_valid)
    for with_entropy in (True, False):
        upstream = random_upstream(8, with_entropy=with_entropy)
        check(case, upstream, run(case, upstream, num_shards=num_shards))


def test_the_whole_vocabulary_of_qwen3() -> None:
    case, upstream = make_case(151_669, 3, num_padding=267), random_upstream(3)
    check(case, upstream, run(case, upstream, num_shards=2))


@pytest.mark.parametrize("offset", [100.0, 1000.0, -1000.0])
def test_a_common_offset_of_the_logits_costs_no_more_than_their_rounding(offset: float) -> None:
    upstream = random_upstream(8)
    for inv_temperature in (1.0, INV_TEMPERATURE):
        case = replace(make_case(4099, offset=offset), inv_temperature=inv_temperature)
        check(case, upstream, run(case, upstream, num_shards=2))


@pytest.mark.parametrize("padding", [123.0, torch.inf, torch.nan])
@pytest.mark.parametrize(("num_padding", "num_shards"), [(23, 1), (600, 4)])
def test_padding_never_counts(num_padding: int, num_shards: int, padding: float) -> None:
    """With 600 of 1600 columns on 4 shards, the last one is all padding and the third has 200 columns of it."""
    case, upstream = make_case(1000, num_padding=num_padding, padding=padding), random_upstream(8)
    check(case, upstream, run(case, upstream, num_shards=num_shards))


def test_a_target_that_equals_a_padding_column_is_not_found_there() -> None:
    case, upstream = make_case(1000, num_padding=24), random_upstream(8)
    foreign = torch.tensor([1000, 1001, 1010, 1023, 1024, 5000, -1, 2**40])
    where = {"start": 0, "num_valid": 1000, "inv_temperature": INV_TEMPERATURE}
    statistics = row_statistics(case.logits, foreign, **where)
    assert torch.equal(statistics[3], torch.zeros(8))
    row, out = merged(statistics[None]), torch.full((8, 1024), torch.nan)
    logit_gradient(case.logits, foreign, row.peak, row.log_sum, row.entropy, upstream.d_logprob, None, out=out, **where)
    p = (case.logits[:, :1000].double() * INV_TEMPERATURE).softmax(-1)
    wanted = -p * upstream.d_logprob[:, None] * INV_TEMPERATURE
    torch.testing.assert_close(out[:, :1000].double(), wanted, atol=1e-5, rtol=0)
    assert torch.equal(out[:, 1000:], torch.zeros(8, 24))


def test_a_shard_without_tokens_has_empty_statistics_and_no_gradient() -> None:
    case, one = make_case(256), torch.ones(8)
    where = {"start": 256, "num_valid": 0, "inv_temperature": 1.0}
    statistics = row_statistics(case.logits, case.targets, **where)
    assert torch.equal(statistics, torch.tensor([-torch.inf, 0.0, 0.0, 0.0])[:, None].expand(4, 8))
    out = torch.full((8, 256), torch.nan)
    logit_gradient(case.logits, case.targets, one, one, one, one, one, out=out, **where)
    assert torch.equal(out, torch.zeros(8, 256))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_byte_logits(dtype: torch.dtype) -> None:
    case, upstream = make_case(4099, dtype=dtype), random_upstream(8)
    check(case, upstream, run(case, upstream))


def strided(values: Tensor) -> dict[str, Tensor]:
    """The same [C, V] with other strides."""
    num_rows, num_columns = values.shape
    wide = values.new_full((num_rows, num_columns + 77), torch.nan)
    sparse = values.new_full((num_rows, 2 * num_columns), torch.nan)
    views = {"wide rows": wide[:, :num_columns], "every other column": sparse[:, ::2]}
    views["transposed"] = values.new_empty(num_columns, num_rows).t()
    for view in views.values():
        view.copy_(values)
    return views


@pytest.mark.parametrize("strides", ["wide rows", "every other column", "transposed"])
def test_any_strides(strides: str) -> None:
    case, upstream = make_case(1001), random_upstream(8)
    view = strided(case.logits)[strides]
    out = strided(torch.zeros(8, 1001))[strides]
    check(Case(view, case.targets, 1001), upstream, run(Case(view, case.targets, 1001), upstream, outs=[out]))
    run(Case(view, case.targets, 1001), upstream, outs=[view])
    assert torch.equal(view, out)


def test_certain_and_impossible_tokens_give_no_nan() -> None:
    """Rows: certain of the target, certain of another, all others -inf, and half of the logits -inf."""
    logits = torch.zeros(4, 1001)
    targets = torch.tensor([7, 8, 7, 7])
    logits[:2, 7] = 500.0
    logits[2] = -torch.inf
    logits[2:, 7] = 0.0
    logits[3, 500:] = -torch.inf
    case, upstream = Case(logits, targets, 1001), random_upstream(4)
    found = run(case, upstream, num_shards=2)
    wanted = reference(case, upstream)
    torch.testing.assert_close(found.merged.logprob.double(), wanted.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.merged.entropy.double(), wanted.entropy, atol=3e-6, rtol=0)
    # Autograd's own entropy gradient is NaN where the logit is -inf: those columns are stated.
    impossible = logits == -torch.inf
    assert torch.equal(found.gradient[impossible], torch.zeros(int(impossible.sum())))
    torch.testing.assert_close(found.gradient[:2].double(), wanted.gradient[:2], atol=1e-5, rtol=0)
    assert bool(found.gradient.isfinite().all())
    assert torch.equal(found.gradient[2], torch.zeros(1001))


def test_a_nan_among_the_logits_is_not_hidden() -> None:
    case = make_case(8192)
    case.logits[3, 5000] = torch.nan
    row = run(case, random_upstream(8)).merged
    assert row.logprob.isnan().tolist() == [i == 3 for i in range(8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_may_take_the_place_of_the_logits(dtype: torch.dtype) -> None:
    """Several blocks a row, so that narrow gradients land on logits of blocks before theirs."""
    case, upstream = make_case(9000, num_padding=8), random_upstream(8)
    apart = torch.empty(case.logits.shape, dtype=dtype)
    run(case, upstream, outs=[apart])
    view = gradient_view(case.logits, dtype)
    assert view.data_ptr() == case.logits.data_ptr()
    assert view.stride() == (9008 * 4 // dtype.itemsize, 1)
    run(case, upstream, outs=[view])
    assert torch.equal(view, apart)


def test_two_byte_gradients_are_rounded_once() -> None:
    case, upstream = make_case(4099), random_upstream(8)
    for dtype, precision in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        out = torch.empty(8, 4099, dtype=dtype)
        check(case, upstream, run(case, upstream, outs=[out]), gradient_rtol=precision)


def test_a_row_does_not_depend_on_its_company() -> None:
    case, upstream = make_case(8192, 12), random_upstream(12)
    whole = run(case, upstream)
    for rows in (slice(5, 6), slice(3, 12), slice(11, None)):
        part = Upstream(upstream.d_logprob[rows].clone(), random_upstream(12).d_entropy[rows].clone())  # type: ignore[index]
        alone = run(Case(case.logits[rows], case.targets[rows].clone(), 8192), part)
        assert torch.equal(alone.merged.logprob, whole.merged.logprob[rows])
        assert torch.equal(alone.merged.entropy, whole.merged.entropy[rows])
        assert torch.equal(alone.gradient, whole.gradient[rows])


@pytest.mark.parametrize(
    ("size", "strides"), [((3, 1001), (2**30, 1)), ((3, 520), (1, 2**22))], ids=["rows", "columns"]
)
def test_offsets_beyond_two_billion_do_not_wrap(
    tmp_path: Path, size: tuple[int, int], strides: tuple[int, int]
) -> None:
    """In a sparse file of 2^32 numbers. Offsets from its middle on reach 2^31; wrapped, they would read its zeros."""
    middle, num_numbers = 2**31, 2**32 + 2**26
    numbers = torch.from_file(str(tmp_path / "sparse"), shared=True, size=num_numbers, dtype=torch.bfloat16)
    view = numbers.as_strided(size, strides, middle)
    case, upstream = make_case(size[1], size[0], dtype=torch.bfloat16), random_upstream(size[0])
    view.copy_(case.logits)
    far = Case(view, case.targets, case.num_valid)
    wanted = run(case, upstream, outs=[torch.empty_like(case.logits)])
    found = run(far, upstream, outs=[view])
    assert torch.equal(found.merged.logprob, wanted.merged.logprob)
    assert torch.equal(found.gradient, wanted.gradient)


def test_scaling_by_a_number_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_rows, "SCALE_PROGRAMS", 3)  # each then has several blocks
    values = torch.randn(30_001, generator=torch.Generator().manual_seed(0))
    for factor in (torch.tensor(0.5), torch.tensor(-4.0, dtype=torch.float64), torch.tensor(1.0)):
        scaled = values.clone()
        scale_(scaled, factor)
        assert torch.equal(scaled, values * factor.float())
    narrow = values.bfloat16().view(1, -1)
    scale_(narrow, torch.tensor([2.0], dtype=torch.bfloat16))
    assert torch.equal(narrow[0], values.bfloat16() * 2)
    scale_(values, torch.tensor(torch.nan))
    assert bool(values.isnan().all())


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a contiguous tensor and one number on its device cpu, got strides"):
        scale_(torch.zeros(4, 4).t()[:, :2], torch.tensor(2.0))
    with pytest.raises(ValueError, match="and 2 numbers on cpu"):
        scale_(torch.zeros(4), torch.ones(2))


def test_bad_vectors_are_refused() -> None:
    case = make_case(128)
    with pytest.raises(ValueError, match=r"targets must be torch.int64 of shape \(8,\) on cpu.* but is torch.int32"):
        row_statistics(case.logits, case.targets.int(), start=0, num_valid=128, inv_temperature=1.0)
    with pytest.raises(ValueError, match=r"targets has stride \(2,\): hand over a contiguous copy"):
        row_statistics(case.logits[:4], case.targets[::2], start=0, num_valid=128, inv_temperature=1.0)
    with pytest.raises(ValueError, match="num_valid is 129 but this shard has 128 columns"):
        row_statistics(case.logits, case.targets, start=0, num_valid=129, inv_temperature=1.0)
    upstream = random_upstream(7)
    with pytest.raises(ValueError, match=r"d_logprob must be torch.float32 of shape \(8,\)"):
        run(case, upstream)
    with pytest.raises(ValueError, match=r"d_entropy must be torch.float32 of shape \(8,\)"):
        run(case, Upstream(torch.ones(8), upstream.d_entropy))


def test_unsafe_places_for_the_gradient_are_refused() -> None:
    case, upstream = make_case(128), random_upstream(8)
    packed = case.logits.view(torch.bfloat16).view(-1)[: 8 * 128].view(8, 128)  # rows on top of other rows
    shifted = torch.zeros(8 * 128 + 1)
    low = case.logits.bfloat16()
    wider = low.view(torch.float32)  # [8, 64]: each gradient would cover two logits
    with pytest.raises(ValueError, match="overlaps the logits"):
        run(case, upstream, outs=[packed])
    with pytest.raises(ValueError, match="overlaps the logits"):
        run(Case(shifted[1:].view(8, 128), case.targets, 128), upstream, outs=[shifted[:-1].view(8, 128)])
    with pytest.raises(ValueError, match="overlaps the logits"):
        run(Case(low[:, :64], case.targets % 64, 64), upstream, outs=[wider])
    with pytest.raises(ValueError, match=r"out must have the shape \(8, 128\)"):
        run(case, upstream, outs=[torch.empty(8, 127)])
    with pytest.raises(ValueError, match=r"expected contiguous float32 logits, got torch.float32 with strides"):
        gradient_view(case.logits.t(), torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected contiguous float32 logits, got torch.bfloat16"):
        gradient_view(low, torch.bfloat16)


def test_an_empty_chunk_has_empty_statistics() -> None:
    none = torch.empty(0, dtype=torch.int64)
    statistics = row_statistics(torch.empty(0, 128), none, start=0, num_valid=128, inv_temperature=1.0)
    assert statistics.shape == (4, 0)
