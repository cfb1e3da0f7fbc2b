"""The reference policy of a KL penalty: a second set of this rank's weights, on the CPU, swapped in for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_klear.models.build import ModelStage


class Reference:
    """Weights of one rank's stage. Swapping is a copy in place: pointers, optimizer and buffers stay as they are."""

    def __init__(self, stage: ModelStage) -> None:
        self._weights = _snapshot(stage)

    def refresh(self, stage: ModelStage) -> None:
        """Make the stage's current weights the reference."""
        self._weights = _snapshot(stage)

    @contextlib.contextmanager
    def swapped_in(self, stage: ModelStage) -> Iterator[None]:
        """The stage holds the reference's weights inside, and bit for bit its own again after."""
        own = _snapshot(stage)
        _restore(stage, self._weights)
        try:
            yield
        finally:
            _restore(stage, own)

    @contextlib.contextmanager
    def through(self, stage: ModelStage) -> Iterator[None]:
        """As `swapped_in`; what the stage holds when the block ends becomes the reference."""
        with self.swapped_in(stage):
            yield
            self.refresh(stage)


def _snapshot(stage: ModelStage) -> dict[str, Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in stage.named_parameters()}


@torch.no_grad()
def _restore(stage: ModelStage, weights: dict[str, Tensor]) -> None:
    for name, parameter in stage.named_parameters():
        parameter.copy_(weights[name])
