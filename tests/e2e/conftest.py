"""A finished SFT run and a finished RL run from its weights, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist.pool import Pool, shared_pool
from e2e.runs import Bench, make_bench


@pytest.fixture(scope="session")
def pool() -> Pool:
    return shared_pool()


@pytest.fixture(scope="session")
def bench(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(pool, tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def held_out(bench: Bench) -> Path:
    return bench.folder / "data" / "eval.jsonl"


@pytest.fixture(scope="session")
def sft(bench: Bench, held_out: Path) -> Bench:
    """With the run `sft`: 4 updates, an evaluation before and after."""
    changes = {"eval.prompt_data": str(held_out), "eval.max_response_len": 8, "reward.type": "arithmetic"}
    bench.succeed("sft", bench.recipe("sft", "sft", changes))
    return bench


@pytest.fixture(scope="session")
def rl(sft: Bench) -> Bench:
    """With the run `rl`: 3 steps from the weights of `sft`."""
    sft.succeed("rl", sft.recipe("rl", "rl"))
    return sft
