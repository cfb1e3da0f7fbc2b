"""Requests of the tests: ragged prompts, whole responses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GenerationRequest

NUM_NEW_TOKENS = 64


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids of the quickstart's vocabulary, without its four special ones."""
    draws = random.Random(f"{seed} {length}")
    return tuple(draws.randrange(4, 64) for _ in range(length))


def batch(
    temperatures: Sequence[float], stop_token_ids: tuple[int, ...] = (), *, num_new: int = NUM_NEW_TOKENS
) -> list[GenerationRequest]:
    """One request a temperature, with prompts of 1, 4, 7, ... tokens."""
    return [
        GenerationRequest(f"r{i}", prompt(1 + 3 * i), num_new, temperature, stop_token_ids, seed=i)
        for i, temperature in enumerate(temperatures)
    ]


async def draw(server: SglangServer, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """All at once, so that they share the server's batches."""
    return await asyncio.gather(*(server.generate(request) for request in requests))
