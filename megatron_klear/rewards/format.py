"""What every reward agrees on: where the answer of a response stands, and that a cut-off or malformed one is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from megatron_klear.protocols import RewardFn
from megatron_klear.types import RewardRequest, Score

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

FormatFault = Literal["", "no_think_open", "no_think_close", "no_answer"]


@dataclass(frozen=True, slots=True)
class ThinkParts:
    """A response taken apart. `reason` says why it is not `ok`; then both texts are empty."""

    reason: FormatFault
    thinking: str = ""
    answer: str = ""

    @property
    def ok(self) -> bool:
        """True where the response is `<think>...</think>answer`."""
        return not self.reason


def split_think(response: str) -> ThinkParts:
    """Take `<think>thinking</think>answer` apart at the LAST `</think>`; whitespace around the parts is dropped.

    There must be one `<think>` only, and it must come first: a second one could hide the answer in its thoughts.
    """
    body = response.strip()
    if not body.startswith(THINK_OPEN) or body.count(THINK_OPEN) > 1:
        return ThinkParts("no_think_open")
    thinking, close, answer = body.removeprefix(THINK_OPEN).rpartition(THINK_CLOSE)
    if not close:
        return ThinkParts("no_think_close")
    if not answer.strip():
        return ThinkParts("no_answer")
    return ThinkParts("", thinking.strip(), answer.strip())


def final_answer(response: str) -> str:
    """The text that is judged, whatever the format: what follows the last `</think>`, or all of it if nobody thought.

    Empty where the thinking never ends: a right number inside unfinished thoughts is no answer.
    """
    if THINK_CLOSE in response:
        return response.rpartition(THINK_CLOSE)[2].strip()
    return "" if THINK_OPEN in response else response.strip()


class FormatGate:
    """A reward function behind the format: only responses that are complete and well-formed reach `inner`."""

    def __init__(self, inner: RewardFn, *, think: bool, incorrect: float) -> None:
        self._inner = inner
        self._think = think
        self._incorrect = incorrect

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order."""
        faults = [self._fault(request) for request in requests]
        judged = iter(self._inner([request for request, fault in zip(requests, faults, strict=True) if not fault]))
        return [Score(self._incorrect, fault) if fault else next(judged) for fault in faults]

    def _fault(self, request: RewardRequest) -> str:
        if request.truncated:
            return "truncated"
        return split_think(request.response).reason if self._think else ""

    def close(self) -> None:
        """End worker processes, if there are any."""
        self._inner.close()

    def __enter__(self) -> FormatGate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
