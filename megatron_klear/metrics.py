"""Metrics that know how they are averaged. Pure numbers: merging over ranks is `parallel`'s work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Literal["token_mean", "sample_mean", "max", "sum"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number. For the two means `value` is the SUM over the `count` tokens or samples it covers."""

    value: float | Tensor
    reduce: Reduce
    count: float | Tensor = 1.0

    def merged(self, other: Metric) -> Metric:
        """This metric over both parts. Parts that are reduced differently are a programming error."""
        assert self.reduce == other.reduce, f"cannot merge a {self.reduce} with a {other.reduce}"
        if self.reduce == "max":
            # NaN compares false with everything; the largest of something and NaN is NaN, in either order.
            own_wins = bool(self.value != self.value) or bool(self.value >= other.value)
            return self if own_wins else other
        return Metric(self.value + other.value, self.reduce, self.count + other.count)

    def result(self) -> float:
        """The reduced number; NaN for a mean over nothing."""
        if self.reduce in ("max", "sum"):
            return float(self.value)
        return float(self.value) / float(self.count) if float(self.count) > 0 else float("nan")


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics of several micro-batches; a name may be missing from some of them."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merged(metric) if name in merged else metric
    return merged


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Reduced numbers by name."""
    return {name: metric.result() for name, metric in metrics.items()}
