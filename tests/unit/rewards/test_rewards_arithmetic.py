"""Exact integers."""

from __future__ import annotations

import pytest

from megatron_klear.rewards.arithmetic import ArithmeticReward, is_canonical_integer
from megatron_klear.types import Prompt, RewardRequest, Score

REWARD = ArithmeticReward(correct=1.0, incorrect=-1.0)
HUGE = "9" * 6000  # more digits than int() takes


@pytest.mark.parametrize("text", ["0", "7", "42", "-7", "1000000", HUGE])
def test_one_spelling_of_an_integer(text: str) -> None:
    assert is_canonical_integer(text)


NOT_CANONICAL = ["", " ", "007", "+1", "-0", "1,000", "1.0", "1e3", "--1", "1 2", "1\n", "\uff15", "\u0665", "5²", "5."]


@pytest.mark.parametrize("text", NOT_CANONICAL)
def test_no_other_spelling(text: str) -> None:
    assert not is_canonical_integer(text)


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("42", "<think>x</think>42", Score(1.0, "correct")),
        (" 42\n", "<think>x</think>\n 42 \n", Score(1.0, "correct")),
        ("42", "42", Score(1.0, "correct")),
        ("-3", "<think>x</think>-3", Score(1.0, "correct")),
        (HUGE, f"<think>x</think>{HUGE}", Score(1.0, "correct")),
        ("42", "<think>x</think>43", Score(-1.0, "wrong")),
        ("42", "<think>x</think>-42", Score(-1.0, "wrong")),
        ("42", "<think>42</think>", Score(-1.0, "not_a_number")),
        ("42", "<think>42", Score(-1.0, "not_a_number")),
        ("42", "<think>x</think>42 43", Score(-1.0, "not_a_number")),
        ("42", "<think>x</think>042", Score(-1.0, "not_a_number")),
        ("42", "<think>x</think>The answer is 42", Score(-1.0, "not_a_number")),
        ("042", "<think>x</think>42", Score(None, "bad_gold", failure="bad_gold")),
        ("", "<think>x</think>42", Score(None, "bad_gold", failure="bad_gold")),
    ],
)
def test_scores(gold: str, response: str, score: Score) -> None:
    assert REWARD([RewardRequest(Prompt("p", (), answer=gold), response)]) == [score]
