"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Triton decides how its kernels run where they are defined, so this comes before any import of them: without a CUDA
# device only its interpreter can run them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of public benchmark files that lie beside this repository; without it the test is skipped."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the public benchmark files (../shared/data beside the repository) are not here")
    return folder
