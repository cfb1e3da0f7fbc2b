"""What a Megatron checkpoint holds, read by torch's own converter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor, weights and optimizer, by its path."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(checkpoint, Path(scratch) / "all.pt")
        return dict(_flat("", torch.load(Path(scratch) / "all.pt", weights_only=False)))


def _flat(path: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [pair for key, part in value.items() for pair in _flat(f"{path}/{key}", part)]
    if isinstance(value, list):
        return [pair for i, part in enumerate(value) for pair in _flat(f"{path}/{i}", part)]
    return []
