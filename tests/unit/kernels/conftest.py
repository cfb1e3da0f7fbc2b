"""What tests of several kernels use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def huge_buffer() -> Tensor:
    """2^31 + 64 elements of float16. Only what is touched takes memory, where the system grants the addresses."""
    try:
        return torch.empty(2**31 + 64, dtype=torch.float16)
    except RuntimeError as refusal:
        pytest.skip(f"4 GiB of addresses are not to be had: {refusal}")
