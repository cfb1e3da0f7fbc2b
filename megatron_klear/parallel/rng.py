"""Random state of a rank: Python's, NumPy's, torch's and Megatron's.

Nothing of this project draws from these generators: weights, data order and sampling have seeds of their own. A reward
or loss of the user's may.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megatron_klear.parallel.device import Device


def seed_rank(seed: int, rank: int) -> None:
    """Start the generators of this rank; each rank gets numbers of its own."""
    own = (seed * 1_000_003 + rank) % 2**32
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def rng_state(device: Device) -> dict[str, Any]:
    """All of it, as plain values and tensors (so that `torch.load` reads it without running code)."""
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device.torch_device) if device.kind == "cuda" else None,
        "megatron": _tracker().get_states(),
    }


def restore_rng_state(state: dict[str, Any], device: Device) -> None:
    """Go on where `rng_state` was taken."""
    random.setstate(state["python"])
    inner = state["numpy"]["state"]
    np.random.set_state(state["numpy"] | {"state": inner | {"key": inner["key"].numpy().astype(np.uint32)}})
    torch.set_rng_state(state["torch"])
    if device.kind == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device.torch_device)
    _tracker().set_states(state["megatron"])


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "parallel_context seeds it"
    return tracker
