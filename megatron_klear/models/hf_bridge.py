"""Hugging Face names and shapes <-> Megatron shards. One table a model; four kinds of mapping.

A mapping ties one Megatron parameter to the Hugging Face tensors it is made of. It can cut the shard of a
tensor-parallel rank from full tensors, and join all shards back to full tensors; both copy values, so a round trip is
bit-equal. The tables (`models/*/hf_map.py`) list mappings and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_klear.config.model import padded_vocab_size
from megatron_klear.errors import CheckpointError
from megatron_klear.models.build import VALUE_HEAD, ModelStage
from megatron_klear.parallel.broadcast import gather_objects, gather_shards
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.types import Topology

TensorSource = Callable[[str], Tensor]
"""Gives the full tensor of a Hugging Face name; raises CheckpointError if there is none."""


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts behind each other; a single one is not copied."""
    return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Mapping(ABC):
    """One Megatron parameter. `layer` is its global layer number, or None outside the layers."""

    megatron_name: str
    hf_shapes: dict[str, tuple[int, ...]]
    layer: int | None = None
    on_last_stage: bool = False
    expert: int | None = None
    """The expert it belongs to. An expert is whole on each rank that holds it, however many tensor ranks there are."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors, in the order `cut` takes and `join` gives them."""
        return tuple(self.hf_shapes)

    @abstractmethod
    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:
        """The shard of one tensor-parallel rank."""

    def blocks(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> list[Tensor]:
        """The same in blocks of rows, which behind each other are the shard: what need not be copied is not."""
        return [self.cut(full, tensor_rank, tensor_size)]

    @abstractmethod
    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The full tensors from all shards in rank order."""


@dataclass(frozen=True)
class Replicated(Mapping):
    """The same tensor on every tensor-parallel rank (norm weights)."""

    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:  # noqa: D102  inherited
        return full[0]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:  # noqa: D102  inherited
        return [shards[0]]


@dataclass(frozen=True)
class ColumnSlices(Mapping):
    """Split along the input dimension (Megatron's row-parallel layers)."""

    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:  # noqa: D102  inherited
        return full[0].chunk(tensor_size, dim=1)[tensor_rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:  # noqa: D102  inherited
        return [_joined(shards, dim=1)]


@dataclass(frozen=True)
class GatedMlp(Mapping):
    """gate and up, each split along the output dimension; a rank holds [its gate rows; its up rows]."""

    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:  # noqa: D102  inherited
        return torch.cat(self.blocks(full, tensor_rank, tensor_size))

    def blocks(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> list[Tensor]:  # noqa: D102  inherited
        return [t.chunk(tensor_size)[tensor_rank] for t in full]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:  # noqa: D102  inherited
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[i] for half in halves]) for i in (0, 1)]


@dataclass(frozen=True)
class QueryKeyValue(Mapping):
    """q, k, v interleaved by KV group: [q heads of group 0, k 0, v 0, q heads of group 1, ...]; ranks split the rows.

    With more ranks than groups a rank's rows are a part of a group; Megatron gathers the activations then.
    """

    num_groups: int = 1
    head_dim: int = 1

    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:  # noqa: D102  inherited
        width = full[0].size(-1)
        grouped = [t.view(self.num_groups, -1, width) for t in full]
        return torch.cat(grouped, dim=1).reshape(-1, width).chunk(tensor_size)[tensor_rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:  # noqa: D102  inherited
        width = shards[0].size(-1)
        grouped = _joined(shards).view(self.num_groups, -1, width)
        q_rows = grouped.size(1) - 2 * self.head_dim
        return [t.reshape(-1, width) for t in grouped.split([q_rows, self.head_dim, self.head_dim], dim=1)]


@dataclass(frozen=True)
class VocabularyRows(Mapping):
    """Rows by token id, padded with zeros to split evenly; the padding is dropped on the way back."""

    vocab_size: int = 1

    def cut(self, full: Sequence[Tensor], tensor_rank: int, tensor_size: int) -> Tensor:  # noqa: D102  inherited
        padding = padded_vocab_size(self.vocab_size, tensor_size) - self.vocab_size
        # Padding copies, also by nothing.
        rows = torch.nn.functional.pad(full[0], (0, 0, 0, padding)) if padding else full[0]
        return rows.chunk(tensor_size)[tensor_rank]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:  # noqa: D102  inherited
        return [_joined(shards)[: self.vocab_size]]


def _stage_of(mapping: Mapping, stage: ModelStage) -> int:
    """Pipeline stage that owns a parameter."""
    topology = stage.topology
    if mapping.layer is not None:
        return stage.stage_of(mapping.layer)
    return topology.pipeline_size - 1 if mapping.on_last_stage else 0


def _expert_rank(mapping: Mapping, stage: ModelStage) -> int | None:
    """Expert-parallel rank that holds a parameter; None if every one does."""
    return None if mapping.expert is None else mapping.expert // stage.experts_per_rank


def _is_here(mapping: Mapping, stage: ModelStage) -> bool:
    topology = stage.topology
    if _stage_of(mapping, stage) != topology.pipeline_rank:
        return False
    return _expert_rank(mapping, stage) in (None, topology.expert_rank)


def _split(mapping: Mapping, topology: Topology) -> tuple[int, int]:
    """Rank and number of ranks among which the parameter is split."""
    return (topology.tensor_rank, topology.tensor_size) if mapping.expert is None else (0, 1)


def import_shards(
    stage: ModelStage, table: Sequence[Mapping], source: TensorSource
) -> dict[str, Callable[[], list[Tensor]]]:
    """For each of this rank's parameters what makes its value, in blocks of rows, from full Hugging Face tensors.

    Shapes must match. None is left out but a value head. A block that is one whole tensor shares the source's memory.
    """
    topology = stage.topology
    targets = {m.megatron_name: m for m in table if _is_here(m, stage)}
    if stage.shape.tie_word_embeddings and topology.is_last_stage and not topology.is_first_stage:
        # The last stage holds its own copy of the tied embedding; Megatron keeps the two equal from here on.
        targets["output_layer.weight"] = next(m for m in table if m.megatron_name == EMBEDDING)
    missing = {name for name, _ in stage.named_parameters()} - {VALUE_HEAD} - targets.keys()
    assert not missing, f"the mapping table fills no {sorted(missing)}"

    def make(mapping: Mapping) -> list[Tensor]:
        full = []
        for name, shape in mapping.hf_shapes.items():
            full.append(source(name))
            check_shape(name, full[-1].shape, shape)
        return mapping.blocks(full, *_split(mapping, topology))

    return {name: partial(make, mapping) for name, mapping in targets.items()}


def check_shape(name: str, found: Sequence[int], expected: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless a Hugging Face tensor has the shape that config.json asks for."""
    if tuple(found) != expected:
        raise CheckpointError(
            f"{name} has shape {tuple(found)}, but config.json asks for {expected}; the weights belong to another model"
        )


@torch.no_grad()
def import_weights(stage: ModelStage, table: Sequence[Mapping], source: TensorSource) -> None:
    """Fill this rank's parameters from full Hugging Face tensors. Every parameter must be filled, shapes must match."""
    parameters = dict(stage.named_parameters())
    for name, make in import_shards(stage, table, source).items():
        blocks = make()
        parts = parameters[name].split([len(block) for block in blocks])
        for part, block in zip(parts, blocks, strict=True):
            part.copy_(block)


EMBEDDING = "embedding.word_embeddings.weight"


@torch.no_grad()
def export_weights(
    stage: ModelStage,
    table: Sequence[Mapping],
    context: ParallelContext,
    values: Callable[[str], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under Hugging Face names, one mapping at a time, on rank 0. COLLECTIVE.

    Every rank must exhaust it: replica 0 gives what is not an expert's, but experts may live on ranks of any replica.
    Ranks other than 0 get nothing; at most one parameter is held in full at a time. The values are the stage's own, or
    for a stage on the device "meta" what `values` gives by name.
    """
    topology = stage.topology
    holders = _holders(gather_objects(topology))
    parameters = dict(stage.named_parameters())
    device = context.device.torch_device
    for mapping in table:
        sources = holders[_stage_of(mapping, stage), _expert_rank(mapping, stage)]
        local = None
        if topology.rank in sources:
            name = mapping.megatron_name
            local = parameters[name].detach() if values is None else values(name)
            if sources != [0]:
                # Between ranks only tensors of the backend's device travel.
                local = local.to(device)
        like = None
        if topology.rank == 0:
            zeros = [torch.empty(shape, device="meta") for shape in mapping.hf_shapes.values()]
            size = mapping.cut(zeros, 0, _split(mapping, topology)[1]).shape
            like = torch.empty(size, dtype=stage.core.config.params_dtype, device=device)
        shards = gather_shards(local, sources=sources, like=like)
        if shards is not None:
            yield from zip(mapping.hf_names, mapping.join(shards), strict=True)


def _holders(ranks: Sequence[Topology]) -> dict[tuple[int, int | None], list[int]]:
    """Ranks that give the shards of a parameter, in the order `join` takes them.

    By (pipeline stage, expert-parallel rank), the latter None for what is not an expert's.
    """
    holders: dict[tuple[int, int | None], list[int]] = {}
    for one in sorted(ranks, key=lambda one: (one.tensor_rank, one.rank)):
        if one.data_rank == one.context_rank == 0:
            holders.setdefault((one.pipeline_rank, None), []).append(one.rank)
        first = holders.setdefault((one.pipeline_rank, one.expert_rank), [one.rank])
        first[0] = min(first[0], one.rank)
    return holders
