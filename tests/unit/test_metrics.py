"""Metrics and how they merge."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_klear.metrics import Metric, Reduce, merge, results


def test_means_weigh_their_parts_by_count() -> None:
    """Three tokens of mean 2 and one of mean 10: 4, not 6."""
    parts = [{"m": Metric(6.0, "token_mean", 3.0)}, {"m": Metric(10.0, "token_mean", 1.0)}]
    assert results(merge(parts)) == {"m": 4.0}


@pytest.mark.parametrize(("reduce", "expected"), [("max", 5.0), ("sum", 4.0), ("sample_mean", 2.0)])
def test_each_reduction(reduce: Reduce, expected: float) -> None:
    assert results(merge([{"m": Metric(-1.0, reduce)}, {"m": Metric(5.0, reduce)}])) == {"m": expected}


def test_a_name_may_be_missing_from_some_parts() -> None:
    merged = merge([{"a": Metric(1.0, "sum")}, {"b": Metric(2.0, "max")}, {"a": Metric(3.0, "sum")}, {}])
    assert results(merged) == {"a": 4.0, "b": 2.0}
    assert merge([]) == {}


def test_a_mean_over_nothing_is_nan() -> None:
    assert math.isnan(Metric(0.0, "token_mean", 0.0).result())
    assert math.isnan(Metric(torch.tensor(0.0), "sample_mean", torch.tensor(0)).result())


def test_an_empty_part_does_not_change_a_mean() -> None:
    parts = [{"m": Metric(0.0, "token_mean", 0.0)}, {"m": Metric(6.0, "token_mean", 3.0)}]
    assert results(merge(parts)) == {"m": 2.0}


def test_tensors_and_numbers_merge_to_plain_floats() -> None:
    parts = [
        {"mean": Metric(torch.tensor(6.0), "token_mean", torch.tensor(3)), "max": Metric(torch.tensor(2.0), "max")},
        {"mean": Metric(2.0, "token_mean", 1.0), "max": Metric(torch.tensor(7.0), "max")},
    ]
    found = results(merge(parts))
    assert found == {"mean": 2.0, "max": 7.0}
    assert all(type(value) is float for value in found.values())


def test_metrics_that_are_reduced_differently_do_not_merge() -> None:
    with pytest.raises(AssertionError, match="cannot merge a sum with a max"):
        Metric(1.0, "sum").merged(Metric(1.0, "max"))


def test_merging_leaves_the_parts_alone() -> None:
    part = {"m": Metric(1.0, "sum")}
    merge([part, part])
    assert part == {"m": Metric(1.0, "sum")}


def test_the_largest_of_a_number_and_nan_is_nan_in_either_order() -> None:
    for values in ((0.5, float("nan")), (float("nan"), 0.5)):
        first, second = (Metric(value, "max") for value in values)
        assert math.isnan(first.merged(second).result())
