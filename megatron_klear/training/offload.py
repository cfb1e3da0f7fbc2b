"""An optimizer whose main weights and moments wait in host memory while the model runs.

They come to the device for an update, when no activations are held, and leave it again. Megatron's own ways do not fit:
its hybrid optimizer keeps a second copy of the main weights and steps on the host, and its `offload_to_cpu` also moves
main weights that are the model's weights themselves (float32), which then are never updated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_klear.checkpoint.optimizer_state import optimizer_parts
from megatron_klear.parallel.device import Device


@dataclass(frozen=True, slots=True)
class Offload:
    """How a tensor gets to the host and back. Each gives a tensor of its own: one being saved must not change."""

    to_host: Callable[[Tensor], Tensor]
    to_device: Callable[[Tensor], Tensor]
    arrived: Callable[[], None]
    """Waits until what went to the host can be read there."""

    def park(self, optimizer: MegatronOptimizer, model: Iterable[Tensor]) -> None:
        """Main weights and moments to the host. `model` are the parameters, which stay where they are."""
        for main in _move(optimizer, model, self.to_host):
            # A view of the gradient buffer, on the device.
            main.grad = None
        self.arrived()

    @contextlib.contextmanager
    def at_work(self, optimizer: MegatronOptimizer, model: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the optimizer can make an update."""
        parameters = list(model)
        _move(optimizer, parameters, self.to_device)
        yield
        self.park(optimizer, parameters)


def offload_to_host(device: Device) -> Offload:
    """Through pinned memory, which torch takes for copies that do not wait."""
    return Offload(
        to_host=lambda tensor: tensor.to("cpu", non_blocking=True),
        to_device=lambda tensor: tensor.to(device.torch_device, non_blocking=True),
        arrived=torch.cuda.synchronize,
    )


def _move(optimizer: MegatronOptimizer, model: Iterable[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Move what the optimizer holds of its own; gives the main weights among it."""
    # Main weights in float32 are the model's weights, or parts of them.
    of_model = {parameter.untyped_storage().data_ptr() for parameter in model}
    mains = []
    for part in optimizer_parts(optimizer):
        for main in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            if main.untyped_storage().data_ptr() not in of_model:
                main.data = move(main.data)
                mains.append(main)
        for state in part.optimizer.state.values():
            state.update({name: move(value) for name, value in state.items() if isinstance(value, Tensor)})
    return mains
