"""Jobs on parallel/: what moves between ranks."""

from __future__ import annotations

import torch

from dist.world import Layout, world
from megatron_klear.errors import ConfigError
from megatron_klear.metrics import Metric
from megatron_klear.parallel.broadcast import (
    all_gather_columns,
    broadcast_number,
    from_last_stage,
    gather_shards,
    reduce_metrics,
    scatter_to_replicas,
    sum_over_ranks,
)
from megatron_klear.types import Topology


def topology(rank: int, world_size: int, layout: Layout) -> Topology:
    with world(layout) as here:
        return here.context.topology


def scatter(
    rank: int, world_size: int, layout: Layout, rows: list[list[int]], dtype: torch.dtype
) -> tuple[int, list[float], str]:
    """(replica, what it got, its dtype)."""
    with world(layout) as here:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows] if rank == 0 else None
        got = scatter_to_replicas(tensors, dtype, here.context)
        return here.context.topology.data_rank, got.tolist(), str(got.dtype)


def gather(rank: int, world_size: int, layout: Layout, sources: list[int]) -> list[list[float]] | None:
    """Every source holds its own number."""
    with world(layout):
        shard = torch.full((2,), float(rank)) if rank in sources else None
        shards = gather_shards(shard, sources=sources, like=torch.zeros(2))
        return None if shards is None else [shard.tolist() for shard in shards]


def columns(rank: int, world_size: int, layout: Layout) -> list[list[float]]:
    with world(layout) as here:
        local = torch.full((2, 1), float(here.context.topology.tensor_rank))
        return all_gather_columns(local, here.context.groups.tensor).tolist()


def number(rank: int, world_size: int, layout: Layout) -> float:
    with world(layout) as here:
        return broadcast_number(rank + 0.1, here.context)


def summed(rank: int, world_size: int, layout: Layout) -> tuple[float, float]:
    """A number and a tensor; both must stay as they are."""
    with world(layout) as here:
        tensor = torch.tensor(0.5 * rank, dtype=torch.float64)
        total = sum_over_ranks(tensor, here.context)
        assert tensor.item() == 0.5 * rank
        return sum_over_ranks(rank + 1, here.context), total


def last_stage(rank: int, world_size: int, layout: Layout) -> list[list[float]]:
    with world(layout) as here:
        is_last = here.context.topology.is_last_stage
        # Not contiguous, as a transposed result may be.
        tensor = torch.arange(6.0).view(3, 2).t() + rank if is_last else None
        return from_last_stage(tensor, (2, 3), here.context).tolist()


def metrics(rank: int, world_size: int, layout: Layout) -> dict[str, float]:
    """Replica r has r + 1 tokens of value 10 r, and a mean that covers nothing."""
    with world(layout) as here:
        topology = here.context.topology
        if not topology.is_last_stage:
            return reduce_metrics({}, here.context)
        replica = topology.data_rank
        own = {
            "mean": Metric(10.0 * replica * (replica + 1), "token_mean", float(replica + 1)),
            "sum": Metric(torch.tensor(replica + 0.5), "sum"),
            "max": Metric(torch.tensor(-1.0 - replica), "max"),
            "nothing": Metric(0.0, "token_mean", 0.0),
        }
        # The order in which a rank met its metrics must not matter.
        return reduce_metrics(own if replica == 0 else dict(reversed(own.items())), here.context)


def wrong_world(rank: int, world_size: int, layout: Layout) -> str:
    try:
        with world(layout):
            return "no error"
    except ConfigError as error:
        return str(error)
