"""The engines' side of a broadcast of weights: a group that the trainer's rank 0 and all engines make together.

Real engines bring their own; this is the fake server's. The group is named and prefixed as SGLang does it
(`init_custom_process_group`), so that either end may be the real thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from megatron_klear.types import TensorSpec


class EngineMember:
    """One engine in a group. Lives in a process that has no other group.

    Args:
        host, port: where rank 0 keeps the store.
        rank: this engine's, 1 or more. (0 is the trainer's.)
        timeout_s: longest wait for the others to come, and for each tensor.
    """

    def __init__(
        self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        # Not torch's `rendezvous`: under torchrun, whose environment is inherited, that asks its agent for the store.
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        # Public functions make groups out of ranks of one world; this one spans two.
        make: Any = distributed_c10d._new_process_group_helper
        self.group, _ = make(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        # Ranks of this group are their own numbers: there is no world that they would be ranks of.
        distributed_c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}

    def receive(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Tensors as rank 0 broadcasts them, in order."""
        tensors = [torch.empty(spec.shape, dtype=torch.__dict__[spec.dtype]) for spec in specs]
        for work in [dist.broadcast(tensor, src=0, group=self.group, async_op=True) for tensor in tensors]:
            assert work is not None
            work.wait()
        return tensors

    def leave(self) -> None:
        """End the group on this side."""
        dist.destroy_process_group(self.group)
