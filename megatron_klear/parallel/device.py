"""cuda or cpu, and what it takes to run Megatron-Core on a CPU.

Megatron writes device="cuda" literally and asks torch.cuda for the current device. On a CPU host `megatron_scope` makes
those few calls mean the CPU, for as long as it is entered, and puts everything back. It costs a microsecond or two per
small operation, so it is entered only around Megatron's own build, schedule, optimizer and checkpoint calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

# The versions whose sources were read for device literals; a newer one must be read again before it is added.
SUPPORTED_MEGATRON = ("0.16.", "0.17.", "0.18.", "0.19.")


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors of this rank live."""

    kind: Literal["cuda", "cpu"]
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """For tensor factories."""
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """Backend of the process groups."""
        return "nccl" if self.kind == "cuda" else "gloo"


# Parameters of glibc's mallopt, and what they are set to: all of its range, and the largest that it takes.
_KEPT_MEMORY = {-1: 2**31 - 1, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def keep_freed_memory() -> bool:
    """Ask the C library to keep what tensors give back, up to 32 MiB each; whether it does (glibc alone can).

    Without it a training step asks the system for most of its activations again, page by page. The peak is the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all(mallopt(parameter, value) for parameter, value in _KEPT_MEMORY.items())


def pick_device(local_rank: int) -> Device:
    """CUDA where there is one, else the CPU, where memory that tensors give back is kept."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        return Device("cpu")
    torch.cuda.set_device(local_rank)
    return Device("cuda", local_rank)


class _CudaMeansCpu(TorchFunctionMode):
    """Turns device="cuda" into "cpu", and drops pin_memory, which needs a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not kwargs:
            # Megatron groups parameters by Tensor.type() and compares with the names of CUDA tensor types.
            if func is torch.Tensor.type and len(args) == 1:
                # An outer scope's mode is still active here and has added the prefix already.
                return "torch.cuda." + func(*args).removeprefix("torch.").removeprefix("cuda.")
            return func(*args)
        kwargs, device = dict(kwargs), kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _Stream:
    """Stands for torch.cuda.Stream: on a CPU everything is done when the call returns."""

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_ONE_STREAM = _Stream()


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron makes numbers of the all-to-all's split sizes only where they come from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _patches() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, stand-in) of every call that Megatron makes on torch.cuda without a device argument."""
    return [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_args, **_kwargs: None),
        (torch.Tensor, "cuda", lambda self, *_args, **_kwargs: self),
        # Megatron forks a tracked random state around the embedding under sequence parallelism.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_args, **_kwargs: torch.get_rng_state()),
        (megatron_random, "_get_cuda_rng_state", lambda *_args, **_kwargs: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_args, **_kwargs: torch.set_rng_state(state)),
        # The all-to-all dispatcher of experts copies sizes to the host on a stream of its own.
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", lambda *_args, **_kwargs: _ONE_STREAM),
        (torch.cuda, "stream", contextlib.nullcontext),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_host),
    ]


@functools.cache
def _check_version() -> None:
    found = version("megatron-core")
    if not found.startswith(SUPPORTED_MEGATRON):
        supported = ", ".join(f"{v}x" for v in SUPPORTED_MEGATRON)
        raise RuntimeError(
            f"megatron-core {found} is installed; running it on CPU was made for {supported}."
            " Install one of these, or run on CUDA, where nothing is patched."
        )


@contextlib.contextmanager
def megatron_scope(device: Device) -> Iterator[None]:
    """Let Megatron's CUDA calls mean `device`. Nothing is touched on CUDA; everything is undone on exit."""
    if device.kind == "cuda":
        yield
        return
    _check_version()
    with contextlib.ExitStack() as undo:
        for owner, name, stand_in in _patches():
            # An attribute that is inherited (Tensor.cuda) is undone by deleting the stand-in, not by storing a copy.
            if name in vars(owner):
                undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, stand_in)
        with _CudaMeansCpu():
            yield
