"""A request inside the server, and what a brain must offer to draw its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

from megatron_klear.rollout.fake.weights import RawTensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token and its log-prob."""

    token: int
    logprob: float


@dataclass(eq=False, slots=True)
class Job:
    """A request with what it has so far."""

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    wants_scores: bool = False
    """Log-probs of the prompt's own tokens are asked for."""
    is_deadly: bool = False
    """The process dies as soon as this has a token."""
    scores: list[float] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    state: int = 0
    """The script's, of all ids but the last drawn."""
    label: str = ""
    """The newest version label that this has met. Not the server's: that may change before the answer is written."""
    versions_left: list[tuple[str, int]] = field(default_factory=list)
    """Labels that went while this was in the server, and how many tokens it had then."""
    num_cached: int = 0
    num_retractions: int = 0
    finish: dict[str, Any] = field(default_factory=dict)
    done: Event = field(default_factory=Event)

    def end(self, **reason: Any) -> None:
        """No more tokens."""
        self.finish = reason
        self.done.set()

    def extend(self, drawn: Sequence[Drawn]) -> None:
        """Take tokens up to the first that ends this."""
        for one in drawn:
            if self.done.is_set():
                return
            self.drawn.append(one)
            if one.token in self.stop_token_ids:
                self.end(type="stop", matched=one.token)
            elif len(self.drawn) >= self.max_new_tokens:
                self.end(type="length", length=self.max_new_tokens)

    def score_rows(self, start: int) -> list[list[Any]]:
        """`input_token_logprobs` from position `start` on: the first has no score. Empty where none were made."""
        if not self.wants_scores or not self.scores[start:]:
            return []
        rows = zip(self.scores[start:], self.prompt[start + 1 :], strict=True)
        return [[None, self.prompt[start], None], *([score, token, None] for score, token in rows)]

    def spans(self) -> list[dict[str, Any]]:
        """`weight_versions` of the answer. As in SGLang, the first span may be empty."""
        spans: list[dict[str, Any]] = []
        total = len(self.drawn)
        for version, end in [*self.versions_left, (self.label, total)]:
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and version == spans[-1]["version"]:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


class Brain(Protocol):
    """Draws tokens and scores prompts. Called by one thread at a time."""

    vocab_size: int
    context_length: int

    def load(self, weights: Mapping[str, RawTensor]) -> None:
        """Take the full set of weights. Raises `WeightSyncError` if it cannot."""
        ...

    def draw(self, jobs: Sequence[Job], version: int | None) -> list[list[Drawn]]:
        """At least one further token for each job. `version` is the true number of the weights."""
        ...

    def score(self, prompt: Sequence[int], version: int | None) -> list[float]:
        """Log-probs at temperature 1 of prompt[1:]."""
        ...
