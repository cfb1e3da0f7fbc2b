"""The seams: what an engine, a weight sync, a reward, an advantage estimator and a policy loss must offer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_klear.types import (
        Completion,
        GenerationRequest,
        LossOutput,
        MicroBatch,
        RewardRequest,
        SampleGroup,
        Score,
        SyncReport,
        TokenStats,
    )


class RolloutEngine(Protocol):
    """Generates from token ids. Lives on one process; knows nothing of ranks."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next generation will use; -1 before the first load."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in the order of the requests."""
        ...

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take a full set of weights under Hugging Face names. Raises if one is missing, unknown or misshapen."""
        ...


class WeightSync(Protocol):
    """Brings the trainer's weights to every engine."""

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Exhaust the iterator (it is a collective) and return only when every engine confirmed `version`."""
        ...


class RewardFn(Protocol):
    """Scores responses. An infrastructure failure is a `Score` with `failure` set, never a silent 0 or -1."""

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order."""
        ...

    def close(self) -> None:
        """End worker processes, if there are any."""
        ...


class AdvantageFn(Protocol):
    """Turns the rewards of a step into one advantage a sample."""

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """One advantage a sample, in the order of groups and samples. Every reward must be set."""
        ...


class PolicyLoss(Protocol):
    """A policy loss as a plain sum: every division already sits in `token_scale` and `nll_scale`."""

    def __call__(self, stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        """Summed loss over the micro-batch's positions, and its metrics."""
        ...
