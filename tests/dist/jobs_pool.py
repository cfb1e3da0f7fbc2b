"""Jobs on the pool itself."""

from __future__ import annotations

import time

import torch.distributed as dist

from dist.world import Layout, world


def add(rank: int, world_size: int, number: int) -> int:
    return rank + number


def sleep(rank: int, world_size: int) -> None:
    time.sleep(30)


def fail_on_rank_1(rank: int, world_size: int) -> None:
    with world(Layout(dp=2)):
        if rank == 1:
            raise ValueError("expected one of rank 1")
        dist.barrier()
