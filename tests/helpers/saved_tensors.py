"""What autograd keeps of a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_klear.models.build import ModelStage


class SavedTensors:
    """Tensors saved for the backward, each storage once."""

    def __init__(self, stage: ModelStage) -> None:
        # Not by address: that of an emptied storage is used again.
        self._weights = {parameter.untyped_storage()._cdata for parameter in stage.core.parameters()}
        self._kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Remember a tensor that is no weight."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._weights:
            self._kept.setdefault(storage, tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        """Of all storages, as they are now: some are emptied after they were saved."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


@contextlib.contextmanager
def saved_tensors(stage: ModelStage) -> Iterator[SavedTensors]:
    """Counts what forward passes inside save."""
    saved = SavedTensors(stage)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved
