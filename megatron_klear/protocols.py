"""The seams: what an engine, a weight sync, a reward, an advantage estimator and a policy loss must offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_klear.types import (
        Completion,
        GenerationRequest,
        GroupAddress,
        LossOutput,
        MicroBatch,
        PauseMode,
        Probe,
        RewardRequest,
        SampleGroup,
        Score,
        ServerAddress,
        ServerFacts,
        SyncReport,
        TensorSpec,
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


class LocalEngine(RolloutEngine, Protocol):
    """An engine in this process, which takes weights as tensors."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take a full set of weights under Hugging Face names. Raises if one is missing, unknown or misshapen."""
        ...


class EngineServer(Protocol):
    """One inference server, of any kind, over HTTP. Weight versions are the trainer's update counts.

    Raises everywhere: `EngineUnavailable` where the server did not answer or not sensibly (the request may succeed on
    another), `RequestRefused` where it answered that the request is wrong. Each names the server and the call.
    """

    @property
    def address(self) -> ServerAddress:
        """Name, URL and kind."""
        ...

    async def facts(self) -> ServerFacts:
        """What it can do; asked once."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Tokens and log-probs (after temperature). `stop_reason` abort keeps the tokens made so far.

        Raises `EngineStale` if a token is not of weights that this run has pushed.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of token_ids[1:], each given those before it."""
        ...

    async def weight_version(self) -> int | None:
        """Version it says it has; None if those weights are not of this run."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Let no token be drawn until `resume`; what happens to running requests is the mode."""
        ...

    async def resume(self) -> None:
        """Draw again."""
        ...

    async def abort_all(self) -> None:
        """End running requests; each answers with what it has."""
        ...

    async def flush_cache(self) -> None:
        """Forget cached prefixes. Raises `EngineUnavailable` if the server did not."""
        ...

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder that the server's host can read, and call it `version`."""
        ...

    async def begin_update(self) -> None:
        """Before updates from tensors or broadcasts, where `brackets_updates`."""
        ...

    async def end_update(self) -> None:
        """After them."""
        ...

    async def update_from_tensors(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load some weights, sent with the request."""
        ...

    async def join_group(self, group: GroupAddress) -> None:
        """Enter a process group; returns once everybody has."""
        ...

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        ...

    async def update_from_broadcast(self, bucket: Sequence[TensorSpec], group: str) -> None:
        """Receive the bucket's tensors in order from rank 0 of the group; returns once all have come."""
        ...

    async def set_version(self, version: int) -> None:
        """Call the weights that were sent `version`."""
        ...

    async def checksum(self) -> Mapping[str, str]:
        """Checksum of each of its weights, by name; only where `has_checksum`."""
        ...

    async def sleep(self) -> None:
        """Give its accelerator's memory to the trainer."""
        ...

    async def wake(self) -> None:
        """Take it back. The weights must be pushed again."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class PushControl(Protocol):
    """Who serves, as a push of weights must know it. Lives on rank 0."""

    def begin_push(self, version: int) -> list[ServerAddress]:
        """Give no new requests out, and list the servers to bring up to `version`. Raises if there is none."""
        ...

    def end_push(self, version: int, failed: Mapping[str, str]) -> None:
        """Let those serve that took the weights; those in `failed` (by name, with the reason) are taken out."""
        ...


class WeightSync(Protocol):
    """Brings the trainer's weights to every engine."""

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], version: int, probe: Probe | None = None) -> SyncReport:
        """Exhaust the iterator (it is a collective); return when every engine that will serve confirmed `version`.

        With a probe they must also give the trainer's log-probs of it.
        """
        ...

    def release(self, version: int) -> None:
        """Engines that share the trainer's GPUs give them to it, until the next push."""
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
