"""One server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_klear.rollout.labels import VersionLabels
from servers.sglang.process import Bench, make_weights, serve


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("sglang")
    first, second = (make_weights(folder / name, seed) for name, seed in (("first", 1), ("second", 2)))
    with serve(first, folder / "server.log") as (process, address):
        yield Bench(process, address, VersionLabels(), first, second)
