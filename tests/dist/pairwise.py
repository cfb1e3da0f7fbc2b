"""Few rows in which every two values of every two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
# Candidates looked at for each row; more give a few rows less.
CANDIDATES = 200


def pairs(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    return itertools.combinations(row.items(), 2)


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, seed: int) -> list[Row]:
    """Rows, all allowed, in which every pair of values occurs that any allowed row has. Values must be hashable."""
    rng = random.Random(seed)
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    possible = [row for row in every if allowed(row)]
    missing = {pair for row in possible for pair in pairs(row)}
    rows: list[Row] = []
    while missing:
        # One that surely helps, and others that may help more.
        (name, value), (other, second) = min(missing, key=repr)
        helpful = [row for row in possible if row[name] == value and row[other] == second]
        tried = rng.sample(helpful, min(CANDIDATES, len(helpful)))
        best = max(tried, key=lambda row: sum(pair in missing for pair in pairs(row)))
        rows.append(best)
        missing -= set(pairs(best))
    return rows
