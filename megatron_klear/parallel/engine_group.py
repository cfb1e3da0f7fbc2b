"""A process group of the trainer's first rank and the ranks of inference servers, apart from the trainer's own.

SGLang makes its side with torch's internal helper, a TCP store of ours and a prefix from the group's name. Both sides
must name the keys of the store alike, so this side uses the same helper (private, but the one there is).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from megatron_klear.errors import WeightSyncError

_POLL_S = 0.001


class EngineStore:
    """The key-value store through which groups come together, on the trainer's first rank. It may serve many groups.

    Nothing is asked of `env://` or torchrun: under torchrun a rendezvous would expect its agent to hold the store.

    Raises:
        WeightSyncError: the port cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        try:
            self.tcp: Any = TCPStore(host, port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise WeightSyncError(
                f"cannot listen on {host}:{port} for the servers' process group ({_first_line(error)}):"
                " broadcast_host must be an address of the trainer's first rank, broadcast_port free there"
            ) from error

    def close(self) -> None:
        """Who still waits for a group to come together gets an error. The port is free once its groups are gone."""
        self.tcp = None


class EngineGroup:
    """Rank 0 of a group. The servers may begin to join once it is constructed; `connect` waits for them."""

    def __init__(
        self, store: EngineStore, name: str, *, world_size: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.backend = backend
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._is_closed = threading.Event()
        self._group: Any = None

    def absent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have not shown up in the store. Only gloo's ranks do before the first broadcast."""
        return [rank for rank in ranks if not self._store.tcp.check([f"{self.name}/{self.name}//cpu//0/{rank}"])]

    def connect(self) -> None:
        """Wait for all ranks. Blocks. Raises `WeightSyncError` at the timeout."""
        options: dict[str, Any] = {"backend_options": None, "timeout": self._timeout, "group_name": self.name}
        store = self._store.tcp
        store.set_timeout(self._timeout)
        try:
            group, _ = c10d._new_process_group_helper(
                self.world_size, 0, [], dist.Backend(self.backend), c10d.PrefixStore(self.name, store), **options
            )
        except RuntimeError as error:
            raise WeightSyncError(
                f"the process group {self.name} did not come together: {_first_line(error)}"
            ) from error
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        self._group = group

    def broadcast(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """Send tensors, in order, to all ranks. Blocks until all are sent, at most until `close`.

        Raises:
            WeightSyncError: a rank is gone, does not receive in time, or the group was closed.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=timeout_s)
        group = self._group
        assert group is not None
        try:
            # A thread starts on device 0, whatever the trainer's is.
            with torch.cuda.device(tensors[0].device if tensors[0].is_cuda else -1):
                works = [group.broadcast([tensor.contiguous()], options) for tensor in tensors]
                # Polled, for a wait could not be ended by `close`.
                while not all(work.is_completed() for work in works):
                    if self._is_closed.wait(_POLL_S):
                        raise WeightSyncError(f"the group {self.name} was closed during a broadcast")
                for work in works:
                    work.wait()
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"the broadcast in group {self.name} broke: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave. Who waits for this rank in a broadcast gets an error."""
        self._is_closed.set()
        if self._group is not None:
            self._group.abort()
            dist.destroy_process_group(self._group)
        self._group = None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
