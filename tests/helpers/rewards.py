"""Reward functions that a recipe can name."""

from __future__ import annotations

import time
import zlib

from megatron_klear.types import RewardRequest


def length_reward(request: RewardRequest) -> float:
    """Short responses are better: even a random model's differ, so there is always something to learn."""
    return -len(request.response) / 10


def equal_reward(request: RewardRequest) -> float:
    """Nothing to learn."""
    return 0.5


def lottery_of_failures(request: RewardRequest) -> float:
    """Fails on every second length."""
    if len(request.response) % 2:
        raise ValueError("odd length")
    return length_reward(request)


def half_of_the_prompts(request: RewardRequest) -> float:
    """Something to learn only where the answer is odd."""
    return length_reward(request) if int(request.prompt.answer) % 2 else equal_reward(request)


def checksum_reward(request: RewardRequest) -> float:
    """Another one for every text."""
    return zlib.crc32(request.response.encode()) / 2**32


def slow_equal_reward(request: RewardRequest) -> float:
    """Nothing to learn, and not soon."""
    time.sleep(0.05)
    return equal_reward(request)


def wrong_type(request: RewardRequest) -> str:
    """Not a number."""
    return "7"
