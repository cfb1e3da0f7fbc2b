"""The push to an engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from megatron_klear.errors import WeightSyncError
from megatron_klear.types import Completion, GenerationRequest
from megatron_klear.weight_sync.inprocess import InProcessSync

TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


class ShelfEngine:
    """Keeps what it is given; `confirms` is the version it then reports, whatever was pushed."""

    def __init__(self, *, confirms: int | None = None) -> None:
        self.confirms = confirms
        self.version = -1
        self.tensors: dict[str, Tensor] = {}

    @property
    def weight_version(self) -> int:
        return self.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        raise NotImplementedError

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.tensors = dict(named_tensors)
        self.version = version if self.confirms is None else self.confirms


class RefusingEngine(ShelfEngine):
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise WeightSyncError("weight a is misshapen")


class Exported:
    """An iterator of tensors that says whether it came to its end, as a collective must on every rank."""

    def __init__(self) -> None:
        self.is_exhausted = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from TENSORS.items()
        self.is_exhausted = True


def test_a_push_reports_what_the_engine_got() -> None:
    engine, exported = ShelfEngine(), Exported()
    report = InProcessSync(engine).push(exported, 4)
    assert engine.tensors == TENSORS and engine.weight_version == 4
    assert (report.version, report.num_tensors, report.num_bytes) == (4, 2, 6 * 4 + 5 * 2)
    assert report.seconds >= 0 and exported.is_exhausted


def test_a_rank_without_an_engine_takes_part_in_the_collective() -> None:
    exported = Exported()
    report = InProcessSync(None).push(exported, 4)
    assert exported.is_exhausted
    assert (report.version, report.num_tensors) == (4, 2)


def test_an_engine_that_does_not_confirm_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="the engine reports weight version 3 after a push of 4"):
        InProcessSync(ShelfEngine(confirms=3)).push(Exported(), 4)


def test_an_engine_that_refuses_is_not_silenced() -> None:
    with pytest.raises(WeightSyncError, match="weight a is misshapen"):
        InProcessSync(RefusingEngine()).push(Exported(), 4)
