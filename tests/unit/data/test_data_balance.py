"""The plan of an update: what it always keeps, and how good it is on lengths like a reasoning model's."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.data.balance import Limits, Plan, TokenCost, make_plan
from megatron_klear.data.packing import PackSpec

QWEN3_8B = Qwen3Shape(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=40960,
)
QWEN3_06B = QWEN3_8B.model_copy(
    update={
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }
)
COSTS = {"8B": TokenCost.of(QWEN3_8B), "0.6B": TokenCost.of(QWEN3_06B), "tokens": TokenCost()}
NUM_SEEDS = 20
LONGEST = 32768


def reasoning_lengths(seed: int, num: int = 512) -> list[int]:
    """Lognormal with median 5,000 and sigma 0.9, cut off at 32,768 (one in fifty is)."""
    numbers = random.Random(seed)
    return [max(16, min(LONGEST, int(numbers.lognormvariate(math.log(5000), 0.9)))) for _ in range(num)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Limits, TokenCost]:
    unit = draw(st.sampled_from([1, 2, 8]))
    budget = unit * draw(st.integers(4, 30))
    sizes = draw(st.lists(st.integers(1, budget), min_size=1, max_size=40))
    limits = Limits(draw(st.integers(1, 6)), budget, unit, draw(st.sampled_from([1, 2, 3])), draw(st.booleans()))
    return sizes, limits, draw(st.sampled_from([TokenCost(), TokenCost(1.0, 0.05), TokenCost(0.01, 1.0)]))


law = settings(deadline=None, max_examples=150)


def loads(sizes: Sequence[int], plan: Plan) -> list[list[int]]:
    return [[sum(sizes[i] for i in one) for one in rank] for rank in plan.ranks]


def rank_costs(sizes: Sequence[int], plan: Plan, cost: TokenCost) -> list[float]:
    return [sum(cost(sizes[i]) for one in rank for i in one) for rank in plan.ranks]


@law
@given(case=cases())
def test_what_every_plan_keeps(case: tuple[list[int], Limits, TokenCost]) -> None:
    sizes, limits, cost = case
    given_sizes = list(sizes)
    plan = make_plan(sizes, limits, cost)
    assert plan == make_plan(tuple(sizes), limits, cost) and sizes == given_sizes
    assert sorted(i for rank in plan.ranks for one in rank for i in one) == list(range(len(sizes)))
    assert all(one == sorted(one) for rank in plan.ranks for one in rank)
    assert len(plan.ranks) == limits.num_ranks
    (count,) = {len(rank) for rank in plan.ranks}
    assert count > 0 and count % limits.count_multiple == 0
    chain = itertools.chain.from_iterable
    flat = list(zip(chain(loads(sizes, plan)), chain(plan.positions), strict=True))
    assert all(load <= size <= limits.budget and size % limits.unit == 0 for load, size in flat)
    if limits.common_length:
        assert {size for _, size in flat} == {-(-max(load for load, _ in flat) // limits.unit) * limits.unit}
    else:
        assert all(size == max(limits.unit, -(-load // limits.unit) * limits.unit) for load, size in flat)
    assert plan.num_empty == max(0, count * limits.num_ranks - len(sizes))
    assert plan.useful_share == pytest.approx(sum(sizes) / sum(size for _, size in flat))
    costs = rank_costs(sizes, plan, cost)
    assert plan.imbalance == pytest.approx(max(costs) / (sum(costs) / len(costs)))
    for rank in plan.ranks:
        own = [sum(cost(sizes[i]) for i in one) for one in rank]
        assert own == sorted(own, reverse=True)


def greedy_count(sizes: Sequence[int], limits: Limits) -> int:
    """Micro-batches a rank if the longest sample always goes to the lightest micro-batch."""
    count = limits.count_multiple
    while True:
        lightest = [0] * (count * limits.num_ranks)
        for size in sorted(sizes, reverse=True):
            heapq.heapreplace(lightest, lightest[0] + size)
        if max(lightest) <= limits.budget:
            return count
        count += limits.count_multiple


@law
@given(case=cases())
def test_micro_batches_are_never_more_than_a_greedy_rule_needs(case: tuple[list[int], Limits, TokenCost]) -> None:
    sizes, limits, cost = case
    assert len(make_plan(sizes, limits, cost).ranks[0]) <= greedy_count(sizes, limits)


def test_a_tight_fit_is_found() -> None:
    """Longest into the lightest: 5 4 | 5 3, and the last 3 overflows."""
    sizes, limits = [5, 5, 4, 3, 3], Limits(1, 10)
    assert greedy_count(sizes, limits) == 3
    assert make_plan(sizes, limits, TokenCost()).ranks == [[[0, 1], [2, 3, 4]]]


def test_a_rank_with_a_long_sample_gets_fewer_tokens() -> None:
    """One of 8 costs 8 + 64 = 72, as much as 36 of 1: balanced by tokens it would cost four times the other's."""
    sizes, cost = [8, *[1] * 40], TokenCost(1.0, 1.0)
    plan = make_plan(sizes, Limits(2, 40, common_length=False), cost)
    assert loads(sizes, plan) == [[10], [38]]
    assert rank_costs(sizes, plan, cost) == [76, 76]


# Data-parallel ranks, budget, options of the spec.
FREE = {"common_length": False}
SPREADS: list[tuple[int, int, dict[str, Any]]] = [
    *((ranks, budget, FREE) for ranks in (8, 32) for budget in (32768, 65536)),
    *((ranks, 65536, {"common_length": True}) for ranks in (8, 32)),
    (8, 16384, {"common_length": True, "context_parallel_size": 4, "multiple_of": 4, "num_micro_batches_multiple": 2}),
    (32, 8192, FREE | {"context_parallel_size": 4, "multiple_of": 4}),
]


@pytest.mark.parametrize("model", COSTS)
@pytest.mark.parametrize(("ranks", "budget", "options"), SPREADS, ids=str)
def test_reasoning_lengths_waste_at_most_2_percent(
    ranks: int, budget: int, options: dict[str, Any], model: str
) -> None:
    """Of positions to padding, and of time to ranks that wait, at the worst of the seeds."""
    useful, imbalance = [], []
    for seed in range(NUM_SEEDS):
        lengths = reasoning_lengths(seed)
        plan = PackSpec(ranks, budget, cost=COSTS[model], **options).plan(lengths)
        costs = rank_costs(lengths, plan, COSTS[model])
        useful.append(sum(lengths) / sum(map(sum, plan.positions)))
        imbalance.append(max(costs) / (sum(costs) / ranks))
    print(f"dp {ranks:2}, {budget} tokens a GPU, {options}, {model}: {NUM_SEEDS} seeds of 512 samples:", end=" ")
    print(f"useful >= {min(useful):.4f}, costliest rank <= {max(imbalance):.4f} of the mean")
    assert min(useful) >= 0.98
    assert max(imbalance) <= 1.02


@pytest.mark.parametrize("ranks", [8, 32])
def test_where_the_longest_sample_fixes_the_length_nothing_else_is_wasted(ranks: int) -> None:
    """A common length of at least 32,768 within a budget of 32,768 leaves only the count of micro-batches to choose."""
    for seed in range(NUM_SEEDS):
        lengths = reasoning_lengths(seed)
        assert max(lengths) == LONGEST
        plan = make_plan(lengths, Limits(ranks, LONGEST), COSTS["8B"])
        fewest = -(-sum(lengths) // (ranks * LONGEST))
        # One more than the tokens need only where they would have to fill all but 1% of every position.
        spare = fewest * ranks * LONGEST / sum(lengths) - 1
        assert len(plan.ranks[0]) == fewest or (len(plan.ranks[0]) == fewest + 1 and spare < 0.01)
        assert plan.imbalance <= 1.02


@pytest.mark.parametrize("common_length", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 256])
def test_4096_samples_are_planned_in_half_a_second(ranks: int, common_length: bool) -> None:
    lengths = reasoning_lengths(0, num=4096)
    started = time.process_time()
    make_plan(lengths, Limits(ranks, 65536, common_length=common_length), COSTS["0.6B"])
    assert time.process_time() - started < 0.5


def test_a_model_costs_what_its_products_cost() -> None:
    for tied in (True, False):
        shape = tiny_shape(tied)
        tensors = shape.tensor_shapes()
        weights = sum(math.prod(dims) for name, dims in tensors.items() if len(dims) == 2 and "embed" not in name)
        weights += shape.vocab_size * shape.hidden_size if tied else 0
        cost = TokenCost.of(shape)
        assert cost.linear == 6 * weights
        num_tokens = 2000
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 3 * 2 * 2 * pairs * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
        assert cost.quadratic * num_tokens**2 == pytest.approx(attention, rel=1e-3)
        assert cost(num_tokens) == cost.linear * num_tokens + cost.quadratic * num_tokens**2


def test_a_cost_that_falls_with_the_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="a cost must rise with the length"):
        TokenCost(linear=0.0)


def test_what_fits_nowhere_is_for_the_caller_to_refuse() -> None:
    with pytest.raises(AssertionError, match="the caller refuses"):
        make_plan([5], Limits(1, 4), TokenCost())
