"""The format gate: what counts as a complete response."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_klear.rewards.format import FormatGate, ThinkParts, final_answer, split_think
from megatron_klear.types import Prompt, RewardRequest, Score


class Recorder:
    """A reward that notes what reaches it and pays 0.5."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.closed = False

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        self.seen += [request.response for request in requests]
        return [Score(0.5, request.response[-1]) for request in requests]

    def close(self) -> None:
        self.closed = True


def request(response: str, truncated: bool = False) -> RewardRequest:
    return RewardRequest(Prompt("p", ()), response, truncated)


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        ("<think>a</think>b", ThinkParts("", "a", "b")),
        ("\n<think>\na\n</think>\n\nb\n", ThinkParts("", "a", "b")),
        ("<think></think>b", ThinkParts("", "", "b")),
        ("<think>a</think>b</think>c", ThinkParts("", "a</think>b", "c")),
        ("a</think>b", ThinkParts("no_think_open")),
        ("b", ThinkParts("no_think_open")),
        ("", ThinkParts("no_think_open")),
        ("x<think>a</think>b", ThinkParts("no_think_open")),
        ("<think>a</think>b<think>c</think>d", ThinkParts("no_think_open")),
        ("<think><think>a</think>b", ThinkParts("no_think_open")),
        ("<think>a", ThinkParts("no_think_close")),
        ("<think>a</think>", ThinkParts("no_answer")),
        ("<think>a</think> \n", ThinkParts("no_answer")),
        (r"<think>a</think>b</think>", ThinkParts("no_answer")),
    ],
)
def test_a_response_is_split_at_the_last_close(response: str, parts: ThinkParts) -> None:
    assert split_think(response) == parts
    assert parts.ok == (parts.reason == "")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>1</think> 2 ", "2"),
        ("<think>1</think>2</think>3", "3"),
        (" 5 ", "5"),
        ("<think>the answer is 5", ""),
        ("5 <think> or 6", ""),
    ],
)
def test_the_final_answer_never_comes_from_unfinished_thoughts(response: str, answer: str) -> None:
    assert final_answer(response) == answer


def test_only_complete_responses_reach_the_reward_and_the_order_is_kept() -> None:
    inner = Recorder()
    gate = FormatGate(inner, think=True, incorrect=-1.0)
    scores = gate(
        [request("<think>a</think>b"), request("b"), request("<think>a</think>c", True), request("<think>a</think>d")]
    )
    assert scores == [Score(0.5, "b"), Score(-1.0, "no_think_open"), Score(-1.0, "truncated"), Score(0.5, "d")]
    assert inner.seen == ["<think>a</think>b", "<think>a</think>d"]


def test_without_a_format_only_truncation_is_judged() -> None:
    inner = Recorder()
    scores = FormatGate(inner, think=False, incorrect=-2.0)([request("plain"), request("cut off", truncated=True)])
    assert scores == [Score(0.5, "n"), Score(-2.0, "truncated")]


def test_the_gate_closes_what_stands_behind_it() -> None:
    inner = Recorder()
    with FormatGate(inner, think=True, incorrect=0.0):
        assert not inner.closed
    assert inner.closed
