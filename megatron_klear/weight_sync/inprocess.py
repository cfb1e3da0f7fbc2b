"""Weight sync to an engine that lives in rank 0's process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_klear.errors import WeightSyncError
from megatron_klear.protocols import LocalEngine
from megatron_klear.types import Probe, SyncReport


class InProcessSync:
    """Hands tensors to the engine one by one. Ranks without an engine only take part in the collective."""

    def __init__(self, engine: LocalEngine | None) -> None:
        self.engine = engine

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int, probe: Probe | None = None) -> SyncReport:
        """Exhaust the iterator, load, and check that the engine now says `version`."""
        assert probe is None, "tensors that were handed over need no probe"
        started = time.perf_counter()
        counted = _Counted(named_tensors)
        if self.engine is None:
            for _ in counted:
                pass
        else:
            self.engine.load_weights(counted, version)
            if self.engine.weight_version != version:
                raise WeightSyncError(
                    f"the engine reports weight version {self.engine.weight_version} after a push of {version}"
                )
        return SyncReport(version, counted.num_tensors, counted.num_bytes, time.perf_counter() - started)

    def release(self, version: int) -> None:
        """The engine holds no memory that the trainer wants."""


class _Counted:
    """An iterator of tensors that counts what went through."""

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.named_tensors = named_tensors
        self.num_tensors = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.named_tensors:
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
