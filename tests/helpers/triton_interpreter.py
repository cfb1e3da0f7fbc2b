"""Import this before modules of Triton kernels: it skips a test file whose kernels could not run on CPU tensors."""

from __future__ import annotations

import pytest

import helpers.triton_installed  # noqa: F401
from megatron_klear_kernels.triton_support import interpreted

if not interpreted():
    pytest.skip("Triton's interpreter is off: on a CUDA machine tests/gpu runs the kernels", allow_module_level=True)
