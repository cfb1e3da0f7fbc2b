"""Exact integers: the answer must be the label, digit for digit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_klear.rewards.format import final_answer
from megatron_klear.types import RewardRequest, Score

# ASCII digits only; no plus sign, no leading zeros, no "-0": one number, one spelling, so comparing text is exact.
_CANONICAL = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)


def is_canonical_integer(text: str) -> bool:
    """True for `0`, `42`, `-7`; False for `007`, `+1`, `-0`, `1,000`, `1.0`."""
    return _CANONICAL.fullmatch(text) is not None


class ArithmeticReward:
    """Compares what follows `</think>` with an integer label. No parsing, so nothing to trick."""

    def __init__(self, *, correct: float, incorrect: float) -> None:
        self._correct = correct
        self._incorrect = incorrect

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order."""
        return [self._score(request.prompt.answer.strip(), final_answer(request.response)) for request in requests]

    def _score(self, gold: str, answer: str) -> Score:
        if not is_canonical_integer(gold):
            return Score(None, "bad_gold", failure="bad_gold")
        if not is_canonical_integer(answer):
            return Score(self._incorrect, "not_a_number")
        return Score(self._correct, "correct") if answer == gold else Score(self._incorrect, "wrong")

    def close(self) -> None:
        """Nothing to end."""
