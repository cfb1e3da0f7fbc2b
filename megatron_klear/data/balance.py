"""The plan of an update: which sequence is in which micro-batch of which rank. A pure function of the lengths.

What is wanted, in this order: as few micro-batches as fit the budget, the same number on every rank; then the smallest
product of (positions / tokens) and (cost of the costliest rank / mean cost), which is what a step's time goes with.

How: sequences are spread longest first over all micro-batches, then the micro-batches are dealt to the ranks, then the
costliest rank exchanges micro-batches, or one or two sequences, with cheaper ones until it is close to the mean.

With a common number of positions T this is repeated for some T a little above the mean: little room wastes few
positions, more of it leaves more exchanges to choose from. Where T may vary the room is that of the budget.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_klear.config.model import Qwen3Shape

Bin = list[int]
"""Indices of the sequences of one micro-batch, ascending."""

# Room above the mean that is tried for a common T. Up to the third the best plan is taken, then the first that fits.
_ROOM = (0.001, 0.004, 0.008, 0.012, 0.018, 0.03, 0.06, 0.12, 0.25, 0.5)
_MAX_WASTED_ROOM = 0.018
_TOLERANCE = 0.003  # of the mean: ranks closer than this are left alone
_GOOD_IMBALANCE = 1.005
_MAX_EXCHANGES = 400  # tried per plan, and twice per rank; keeps planning far below the time of a step
_MAX_PAIRS = 1500  # on one rank; beyond, single sequences are fine-grained enough
_MAX_SINGLES = 512


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Cost of a sequence of n tokens, linear x n + quadratic x n^2, in any unit."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        assert self.linear > 0 and self.quadratic >= 0, f"a cost must rise with the length, not {self}"

    def __call__(self, length: int) -> float:
        """Cost of one sequence."""
        return self.linear * length + self.quadratic * length * length

    @classmethod
    def of(cls, shape: Qwen3Shape) -> TokenCost:
        """Floating-point operations of forward and backward.

        Six per weight that multiplies a token (the embedding is a look-up, the head is not), and six per query row and
        earlier token: two products over half of n^2, two operations each, three times with the backward.
        """
        q_rows, kv_rows = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        layer = shape.hidden_size * (2 * q_rows + 2 * kv_rows + 3 * shape.intermediate_size)
        weights = shape.num_hidden_layers * layer + shape.vocab_size * shape.hidden_size
        return cls(linear=6.0 * weights, quadratic=6.0 * shape.num_hidden_layers * q_rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """What every plan keeps. `budget`, the most positions of a micro-batch, is a multiple of `unit`."""

    num_ranks: int
    budget: int
    unit: int = 1
    """The number of positions is a multiple of it."""
    count_multiple: int = 1
    """The number of micro-batches of a rank is a multiple of it."""
    common_length: bool = True
    """All micro-batches have the same number of positions."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-batches by rank, costliest first, so that those which run at the same time are alike.

    An empty one holds padding alone; there is none unless there are fewer sequences than micro-batches.
    """

    ranks: list[list[Bin]]
    positions: list[list[int]]
    """How long each micro-batch is."""
    useful_share: float
    """Tokens of the sequences / positions of all micro-batches."""
    imbalance: float
    """Cost of the costliest rank / mean cost of a rank."""

    @property
    def num_empty(self) -> int:
        """Micro-batches without a sequence, over all ranks."""
        return sum(not one for rank in self.ranks for one in rank)


def make_plan(sizes: Sequence[int], limits: Limits, cost: TokenCost) -> Plan:
    """Plan of sequences with these `sizes` (positions, padding for context parallelism included, none above budget)."""
    assert sizes and max(sizes) <= limits.budget, "the caller refuses sequences that fit no micro-batch"
    planner = _Planner(sizes, limits, cost)
    step = limits.count_multiple
    fewest = -(-sum(sizes) // (limits.num_ranks * limits.budget))
    # Ends at the latest when each sequence has a micro-batch of its own.
    return next(filter(None, map(planner.best_of, itertools.count(-(-fewest // step) * step, step))))


class _Planner:
    """The sequences of one update, and what their plans are judged by."""

    def __init__(self, sizes: Sequence[int], limits: Limits, cost: TokenCost) -> None:
        self.sizes = list(sizes)
        self.limits = limits
        self.costs = [cost(size) for size in sizes]
        self.order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        self.longest, self.total = max(sizes), sum(sizes)

    def best_of(self, count: int) -> Plan | None:
        """The best plan with `count` micro-batches a rank, None if none was found."""
        best: Plan | None = None
        for cap, bins in self._spreads(count * self.limits.num_ranks):
            plan = self._dealt(bins, cap)
            if best is None or plan.imbalance / plan.useful_share < best.imbalance / best.useful_share:
                best = plan
            if best.imbalance <= _GOOD_IMBALANCE:
                break
        return best

    def _spreads(self, num_bins: int) -> Iterator[tuple[int, list[Bin]]]:
        """(most tokens allowed, bins): those worth a comparison, or the first that keep the budget."""
        budget, found = self.limits.budget, False
        lowest = max(self.longest, -(-self.total // num_bins))
        for room in _ROOM if self.limits.common_length else ():
            if found and room > _MAX_WASTED_ROOM:
                return
            cap = min(budget, int(lowest * (1 + room)))
            bins = self._spread(num_bins, cap, self.costs)
            if bins is not None:
                found = True
                yield cap, bins
        if not found:
            bins = (
                self._spread(num_bins, budget, self.costs)
                or self._spread(num_bins, budget, [float(size) for size in self.sizes])
                or self._best_fit(num_bins)
            )
            if bins is not None:
                yield budget, bins

    def _spread(self, num_bins: int, cap: int, keys: Sequence[float]) -> list[Bin] | None:
        """Longest sequence first, each to the bin with the least of `keys` that has room; None if none has."""
        bins: list[Bin] = [[] for _ in range(num_bins)]
        room = [cap] * num_bins
        least = [(0.0, number) for number in range(num_bins)]
        # Bins without room for this length, roomiest first: they come back when the lengths have sunk to their room.
        aside: list[tuple[int, float, int]] = []
        for index in self.order:
            size = self.sizes[index]
            while aside and -aside[0][0] >= size:
                _, load, number = heapq.heappop(aside)
                heapq.heappush(least, (load, number))
            while least and room[least[0][1]] < size:
                load, number = heapq.heappop(least)
                heapq.heappush(aside, (-room[number], load, number))
            if not least:
                return None
            load, number = least[0]
            bins[number].append(index)
            room[number] -= size
            heapq.heapreplace(least, (load + keys[index], number))
        return bins

    def _best_fit(self, num_bins: int) -> list[Bin] | None:
        """Longest sequence first, each to the fullest bin that has room; None if none has."""
        bins: list[Bin] = [[] for _ in range(num_bins)]
        room = np.full(num_bins, self.limits.budget)
        for index in self.order:
            left = room - self.sizes[index]
            number = int(np.where(left >= 0, left, self.limits.budget).argmin())
            if left[number] < 0:
                return None
            bins[number].append(index)
            room[number] = left[number]
        for empty in (one for one in bins if not one):
            crowded = max(bins, key=len)
            if len(crowded) > 1:
                empty.append(crowded.pop())
        return bins

    def _dealt(self, bins: list[Bin], cap: int) -> Plan:
        """Each rank gets its share of the bins, the cheapest rank the costliest of those left; then exchanges."""
        costs = [sum(self.costs[i] for i in one) for one in bins]
        order = sorted(range(len(bins)), key=lambda number: -costs[number])
        ranks: list[list[Bin]] = [[] for _ in range(self.limits.num_ranks)]
        totals = [0.0] * len(ranks)
        for start in range(0, len(order), len(ranks)):
            cheapest_first = sorted(range(len(ranks)), key=lambda rank: totals[rank])
            for number, rank in zip(order[start : start + len(ranks)], cheapest_first, strict=True):
                ranks[rank].append(bins[number])
                totals[rank] += costs[number]
        _Exchange(ranks, self.sizes, self.costs, cap).run()
        return self._plan(ranks)

    def _plan(self, ranks: list[list[Bin]]) -> Plan:
        unit = self.limits.unit
        by_cost = [sorted(rank, key=lambda one: -sum(self.costs[i] for i in one)) for rank in ranks]
        ranks = [[sorted(one) for one in rank] for rank in by_cost]
        # An empty micro-batch still has a position.
        loads = [[max(1, sum(self.sizes[i] for i in one)) for one in rank] for rank in ranks]
        positions = [[-(-load // unit) * unit for load in rank] for rank in loads]
        if self.limits.common_length:
            positions = [[max(map(max, positions))] * len(rank) for rank in positions]
        totals = [sum(self.costs[i] for one in rank for i in one) for rank in ranks]
        return Plan(
            ranks,
            positions,
            useful_share=self.total / sum(map(sum, positions)),
            imbalance=max(totals) * len(totals) / sum(totals),
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What one rank can give in an exchange: nothing, one or two sequences of one of its bins."""

    members: NDArray[np.int64]  # [parts, 2], -1 for none
    bins: NDArray[np.int64]  # [parts]
    sizes: NDArray[np.int64]  # [parts]
    costs: NDArray[np.float64]  # [parts]
    room: NDArray[np.int64]  # [parts], tokens that the part's bin can still take
    is_none: NDArray[np.bool_]  # [parts]
    is_all: NDArray[np.bool_]  # [parts], true where the bin holds nothing else


class _Exchange:
    """Brings the costs of ranks together in place. No bin grows above `cap`, none that holds something is emptied."""

    def __init__(self, ranks: list[list[Bin]], sizes: Sequence[int], costs: Sequence[float], cap: int) -> None:
        self.ranks, self.cap = ranks, cap
        # The 0 at the end is what member -1 of a part adds.
        self.sizes, self.costs = np.array([*sizes, 0]), np.array([*costs, 0.0])
        self.bin_costs = np.array([[sum(costs[i] for i in one) for one in rank] for rank in ranks])
        self.parts: dict[int, _Parts] = {}

    def run(self) -> None:
        """Exchange until the costliest rank is close to the mean, or finds no rank to give to."""
        totals = self.bin_costs.sum(1)
        enough = totals.mean() * (1 + _TOLERANCE)
        num_tried = 0
        while num_tried < _MAX_EXCHANGES + 2 * len(self.ranks) and totals.max() > enough:
            costly = int(totals.argmax())
            for cheap in np.argsort(totals, kind="stable").tolist():
                num_tried += 1
                if totals[cheap] < totals[costly] and self._bring_together(costly, cheap):
                    self.parts.pop(costly, None)
                    self.parts.pop(cheap, None)
                    break
            else:
                return
            totals = self.bin_costs.sum(1)

    def _bring_together(self, costly: int, cheap: int) -> bool:
        """Exchange what closes the gap best; False if nothing does."""
        wanted = float(self.bin_costs[costly].sum() - self.bin_costs[cheap].sum()) / 2
        off = np.abs(self.bin_costs[costly][:, None] - self.bin_costs[cheap][None] - wanted)
        give, take = np.unravel_index(int(off.argmin()), off.shape)
        if off[give, take] < wanted / 4:
            self._exchange_bins((costly, int(give)), (cheap, int(take)))
            return True
        gives, takes = self._parts_of(costly), self._parts_of(cheap)
        grows = gives.sizes[:, None] - takes.sizes[None]
        fits = (grows <= takes.room[None]) & (-grows <= gives.room[:, None])
        fits &= ~(gives.is_all[:, None] & takes.is_none[None]) & ~(gives.is_none[:, None] & takes.is_all[None])
        off = np.where(fits, np.abs(gives.costs[:, None] - takes.costs[None] - wanted), np.inf)
        give, take = np.unravel_index(int(off.argmin()), off.shape)
        # The gap afterwards is twice `off`: an exchange that hardly closes it would only cost time.
        if off[give, take] > 0.95 * wanted:
            return False
        a, b = (costly, int(gives.bins[give])), (cheap, int(takes.bins[take]))
        self._move(gives.members[give], a, b)
        self._move(takes.members[take], b, a)
        return True

    def _exchange_bins(self, a: tuple[int, int], b: tuple[int, int]) -> None:
        (rank_a, bin_a), (rank_b, bin_b) = a, b
        bins = self.ranks[rank_a][bin_a], self.ranks[rank_b][bin_b]
        self.ranks[rank_b][bin_b], self.ranks[rank_a][bin_a] = bins
        self.bin_costs[a], self.bin_costs[b] = self.bin_costs[b], self.bin_costs[a]

    def _move(self, members: NDArray[np.int64], source: tuple[int, int], target: tuple[int, int]) -> None:
        for index in members[members >= 0].tolist():
            self.ranks[source[0]][source[1]].remove(index)
            self.ranks[target[0]][target[1]].append(index)
            self.bin_costs[source] -= self.costs[index]
            self.bin_costs[target] += self.costs[index]

    def _parts_of(self, rank: int) -> _Parts:
        if rank not in self.parts:
            self.parts[rank] = self._make_parts(self.ranks[rank])
        return self.parts[rank]

    def _make_parts(self, bins: Sequence[Bin]) -> _Parts:
        with_pairs = sum(math.comb(len(one), 2) for one in bins) <= _MAX_PAIRS
        step = 1 + sum(map(len, bins)) // _MAX_SINGLES
        found: list[list[tuple[int, int]]] = []
        for one in bins:
            pairs = itertools.combinations(one, 2) if with_pairs else ()
            found.append([(-1, -1), *((index, -1) for index in one[::step]), *pairs])
        members = np.array([part for parts in found for part in parts])
        counts = [len(parts) for parts in found]
        num_held = np.repeat([len(one) for one in bins], counts)
        num_members = (members >= 0).sum(1)
        return _Parts(
            members,
            bins=np.repeat(np.arange(len(bins)), counts),
            sizes=self.sizes[members].sum(1),
            costs=self.costs[members].sum(1),
            room=np.repeat([self.cap - int(self.sizes[one].sum()) for one in bins], counts),
            is_none=num_members == 0,
            is_all=num_members == num_held,
        )
