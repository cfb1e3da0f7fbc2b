"""Ranks on demand."""

from __future__ import annotations

import pytest

from dist.pool import Pool, shared_pool


@pytest.fixture(scope="session")
def pool() -> Pool:
    return shared_pool()
