"""One model and its optimizer in Megatron's distributed format: planned by all ranks, then written by each alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer

from megatron_klear.checkpoint.inprocess import in_process_results, write_files
from megatron_klear.checkpoint.manifest import POLICY, FileEntry, ModelEntry
from megatron_klear.checkpoint.optimizer_state import load_keeping_settings, make_state, optimizer_form
from megatron_klear.checkpoint.stream import BlockSource, LateTensors, StoredWeights
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.topology import ParallelContext

# Optimizer state in a layout-free form.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}

# 0.19 would hand the files to another package's worker process unless told otherwise; 0.16 knows one way only.
_WRITER: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model that belongs into a checkpoint. A stage that holds its weights only at times has a `scope` for that.

    One on the device "meta" never does: it has a `source` that gives them while they are written.
    """

    stage: ModelStage
    optimizer: MegatronOptimizer | None = None
    version: int = 0
    name: str = POLICY
    scope: Callable[[], AbstractContextManager[None]] | None = None
    source: BlockSource | None = None

    def held(self) -> AbstractContextManager[None]:
        """Inside, the stage holds the part's weights."""
        return nullcontext() if self.scope is None else self.scope()

    @property
    def entry(self) -> ModelEntry:
        """What the manifest says of it."""
        form = None if self.optimizer is None else optimizer_form(self.optimizer)
        return ModelEntry(shape=self.stage.shape, version=self.version, optimizer=form)

    def folder(self, checkpoint: Path) -> Path:
        """Where its files lie in a checkpoint."""
        return checkpoint if self.name == POLICY else checkpoint / self.name


class WriteRequest:
    """What this rank has to write of one model: fixed when made, by a collective over all ranks."""

    def __init__(self, part: ModelPart, folder: Path, context: ParallelContext, *, copy: bool) -> None:
        """With `copy`, the values of this moment are written whatever happens to the model later."""
        self._context = context
        # What a stage holds only in a scope is gone when it comes to writing.
        copy = copy or part.scope is not None
        with part.held(), megatron_scope(context.device), in_process_results():
            request: Any = dist_checkpointing.save(
                _state(part, is_loading=False),
                str(folder),
                _strategy(context),
                async_sharded_save=True,
                content_metadata=_METADATA,
                **_WRITER,
            )
            if request.preload_fn is None:
                buckets = []
            elif part.source is not None:
                buckets = [_late(bucket, part.stage, part.source) for bucket in request.async_fn_args[1]]
            else:
                # On a GPU this copies to the host.
                buckets = request.preload_fn()
                if copy and context.device.kind == "cpu":
                    buckets = [_copied(bucket) for bucket in buckets]
        self._request, self._buckets = request, buckets

    def write(self) -> dict[Path, FileEntry]:
        """Write the files of this rank and wait for the disk; no collective, so any thread may. Their checksums.

        A failure is told by `finish`, on all ranks.
        """
        if self._request.async_fn is None:
            return {}
        written = write_files(self._request.async_fn.args[0], self._buckets)
        # The copies need not wait for the other ranks.
        self._buckets = []
        _, _, results = self._request.async_fn_args
        results.put(written.outcome)
        return written.entries

    def finish(self) -> None:
        """After every rank has written: collect the results and write Megatron's metadata. A collective."""
        with megatron_scope(self._context.device):
            for finalize in self._request.finalize_fns:
                finalize()


def load_part(part: ModelPart, checkpoint: Path, context: ParallelContext) -> None:
    """Load weights, and optimizer state where the part has an optimizer (that made no step yet). A collective."""
    with part.held(), megatron_scope(context.device):
        loaded: Any = dist_checkpointing.load(_state(part, is_loading=True), str(part.folder(checkpoint)))
        for i, chunk in enumerate(part.stage.chunks):
            chunk.core.load_state_dict(loaded["model"][str(i)])
        if part.optimizer is not None:
            load_keeping_settings(part.optimizer, loaded["optimizer"])


def stored_weights(part: ModelPart, checkpoint: Path) -> StoredWeights:
    """The part's weights of a checkpoint, read one by one; its stage is on the device "meta"."""
    return StoredWeights(_state(part, is_loading=True), part.stage, part.folder(checkpoint))


def _state(part: ModelPart, *, is_loading: bool) -> dict[str, Any]:
    # Keys of tensors name the layers by their global numbers, so it does not matter in which chunk they lie.
    model_state = {
        str(i): chunk.core.sharded_state_dict(metadata=_METADATA) for i, chunk in enumerate(part.stage.chunks)
    }
    state: dict[str, Any] = {"model": model_state}
    if part.optimizer is not None:
        make_state(part.optimizer)
        state["optimizer"] = part.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_METADATA)
    return state


def _strategy(context: ParallelContext) -> Any:
    """Megatron's own; of ranks that hold the same weights, each writes a share."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if context.groups.data.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, context.groups.data)


def _copied(bucket: Any) -> Any:
    path, key, (bytes_data, tensor_data) = bucket
    return path, key, (bytes_data, [(item, tensor.clone()) for item, tensor in tensor_data])


def _late(bucket: Any, stage: ModelStage, source: BlockSource) -> Any:
    path, key, (bytes_data, tensor_data) = bucket
    return path, key, (bytes_data, LateTensors(tensor_data, stage, source))
