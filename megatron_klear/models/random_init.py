"""Random starting weights that do not depend on the layout: each tensor is seeded by its name."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_klear.models.hf_bridge import Mapping, TensorSource


def random_source(table: Sequence[Mapping], *, seed: int, std: float) -> TensorSource:
    """Full tensors by Hugging Face name: normal with `std` for matrices, ones for norm weights."""
    shapes = {name: shape for mapping in table for name, shape in mapping.hf_shapes.items()}

    def get(name: str) -> Tensor:
        if len(shapes[name]) == 1:
            return torch.ones(shapes[name])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        return torch.randn(shapes[name], generator=generator) * std

    return get
