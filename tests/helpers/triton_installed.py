"""Import this before modules of Triton kernels: without Triton it skips a test file."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
