"""Moving tensors between ranks: scatter to replicas, gather shards to the owner, agree on numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_klear.errors import KlearError
from megatron_klear.metrics import Metric
from megatron_klear.parallel.topology import ParallelContext


def _move(tensor: Tensor, context: ParallelContext) -> Tensor:
    return tensor.to(context.device.torch_device).contiguous()


def scatter_to_replicas(tensors: Sequence[Tensor] | None, dtype: torch.dtype, context: ParallelContext) -> Tensor:
    """Rank 0 hands tensor i (1-D, any lengths) to every rank of data-parallel replica i.

    First a scatter over the replicas' first ranks, padded to the longest, then a broadcast inside each replica:
    each byte leaves rank 0 once. Other ranks pass None.
    """
    topology, groups, device = context.topology, context.groups, context.device.torch_device
    leads = topology.tensor_rank == topology.pipeline_rank == topology.context_rank == 0
    sizes = torch.zeros(topology.data_size, dtype=torch.int64, device=device)
    if context.is_main:
        assert tensors is not None and len(tensors) == topology.data_size
        sizes = torch.tensor([t.numel() for t in tensors], dtype=torch.int64, device=device)
    dist.broadcast(sizes, src=0)
    longest, own = int(sizes.max()), int(sizes[topology.data_rank])
    buffer = torch.zeros(longest, dtype=dtype, device=device)
    if leads:
        padded = None
        if context.is_main and tensors is not None:
            padded = [torch.nn.functional.pad(_move(t, context), (0, longest - t.numel())) for t in tensors]
        dist.scatter(buffer, padded, src=dist.get_process_group_ranks(groups.replicas)[0], group=groups.replicas)
    dist.broadcast(buffer, src=dist.get_process_group_ranks(groups.replica)[0], group=groups.replica)
    return buffer[:own]


def all_ranks(flag: bool, context: ParallelContext) -> bool:
    """True on every rank if it is true on every rank."""
    tensor = torch.tensor([int(flag)], device=context.device.torch_device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor.item())


def largest(number: int, context: ParallelContext) -> int:
    """The largest of all ranks' numbers, on every rank."""
    tensor = torch.tensor([number], device=context.device.torch_device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def sum_over_ranks(number: float | Tensor, context: ParallelContext) -> float:
    """The sum of all ranks' numbers, on every rank."""
    tensor = torch.as_tensor(number, dtype=torch.float64, device=context.device.torch_device).clone()
    dist.all_reduce(tensor)
    return float(tensor.item())


def gather_objects(value: Any) -> list[Any]:
    """Every rank's small value (it is pickled), by rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """What rank 0 does in the block may fail with an error of ours; then every rank raises it, and none waits."""
    failure: KlearError | None = None
    try:
        yield
    except KlearError as error:
        failure = error
    holder = [failure]
    dist.broadcast_object_list(holder, src=0)
    if failure is not None:
        raise failure
    if holder[0] is not None:
        raise holder[0]


def broadcast_number(value: float, context: ParallelContext) -> float:
    """Rank 0's number on every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=context.device.torch_device)
    dist.broadcast(tensor, src=0)
    return float(tensor.item())


def gather_shards(shard: Tensor | None, *, sources: Sequence[int], like: Tensor | None) -> list[Tensor] | None:
    """Bring the shards that the ranks `sources` hold to rank 0, in their order.

    `like` gives shape and dtype on rank 0 where it does not hold a shard itself. Other ranks do nothing.
    """
    rank = dist.get_rank()
    if rank != 0:
        if rank in sources:
            assert shard is not None
            dist.send(shard.contiguous(), dst=0)
        return None
    shards = []
    for source in sources:
        if source == 0:
            assert shard is not None
            shards.append(shard)
        else:
            assert like is not None
            received = torch.empty_like(like)
            dist.recv(received, src=source)
            shards.append(received)
    return shards


def all_gather_columns(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, V/n] of each rank of `group` as [T, V] on all of them, in rank order."""
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def sum_over_replicas(vector: Tensor | None, size: int, context: ParallelContext) -> Tensor:
    """Sum of the last stages' float32 vectors of `size` over all replicas, on every rank; earlier stages pass None."""
    if vector is not None:
        vector = vector.clone()
        dist.all_reduce(vector, group=context.groups.data)
    return from_last_stage(vector, (size,), context)


def broadcast_vector(vector: Tensor | None, size: int, context: ParallelContext) -> Tensor:
    """Rank 0's float32 vector of `size` on every rank; others pass None."""
    device = context.device.torch_device
    tensor = torch.empty(size, device=device) if vector is None else vector.to(device)
    dist.broadcast(tensor, src=0)
    return tensor


def from_last_stage(tensor: Tensor | None, shape: Sequence[int], context: ParallelContext) -> Tensor:
    """The last stage's float32 tensor of `shape` on every stage; earlier stages pass None."""
    if tensor is None:
        tensor = torch.empty(tuple(shape), dtype=torch.float32, device=context.device.torch_device)
    tensor = tensor.contiguous()
    last = dist.get_process_group_ranks(context.groups.pipeline)[-1]
    dist.broadcast(tensor, src=last, group=context.groups.pipeline)
    return tensor


def reduce_metrics(metrics: Mapping[str, Metric], context: ParallelContext) -> dict[str, float]:
    """Merge the last stage's metrics over the replicas and give every rank the results. Earlier stages pass none."""
    if not context.topology.is_last_stage:
        return _from_last_stage({}, context)
    names = sorted(metrics)
    rows = [metrics[name] for name in names]
    device = context.device.torch_device
    parts = torch.zeros(3, len(rows), dtype=torch.float64, device=device)
    for i, metric in enumerate(rows):
        parts[0, i], parts[1, i] = torch.as_tensor(metric.value), torch.as_tensor(metric.count)
    parts[2] = parts[0]
    dist.all_reduce(parts[:2], group=context.groups.data)
    dist.all_reduce(parts[2], op=dist.ReduceOp.MAX, group=context.groups.data)
    totals, counts, peaks = parts.tolist()
    merged = {
        name: Metric(peaks[i] if row.reduce == "max" else totals[i], row.reduce, counts[i]).result()
        for i, (name, row) in enumerate(zip(names, rows, strict=True))
    }
    return _from_last_stage(merged, context)


def _from_last_stage(results: dict[str, float], context: ParallelContext) -> dict[str, float]:
    """The last stage's dictionary on every stage. A dozen named numbers: pickling them is no cost."""
    holder = [results]
    last = dist.get_process_group_ranks(context.groups.pipeline)[-1]
    dist.broadcast_object_list(holder, src=last, group=context.groups.pipeline)
    return holder[0]
