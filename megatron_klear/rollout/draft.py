"""A response in the making: it may take several answers, of several servers and versions of the weights."""

from __future__ import annotations

import zlib
from dataclasses import replace

from megatron_klear.types import Completion, GenerationRequest, Piece, StopReason


class Draft:
    """The tokens that a request has so far. It is done once a server said why it stopped, other than by "abort"."""

    def __init__(self, request: GenerationRequest, started: Completion | None) -> None:
        self.request = request
        self.num_attempts = 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[Piece] = []
        self._stop_reason: StopReason = "abort"
        if started is not None:
            self.add(started)

    @property
    def num_tokens(self) -> int:
        """Tokens of the response so far."""
        return len(self._token_ids)

    @property
    def is_done(self) -> bool:
        """No token is missing."""
        return self._stop_reason != "abort"

    def rest(self) -> GenerationRequest:
        """A request for what is missing, under an id of its own: a server may still be busy with the last one."""
        self.num_attempts += 1
        request, seed = self.request, self.request.seed
        if self._token_ids:
            # With the seed of the first tokens a server could draw the same random numbers again.
            seed = zlib.crc32(f"{seed}/{self.num_tokens}".encode())
        return replace(
            request,
            request_id=f"{request.request_id}#{self.num_attempts}",
            token_ids=(*request.token_ids, *self._token_ids),
            max_new_tokens=request.max_new_tokens - self.num_tokens,
            seed=seed,
        )

    def add(self, answer: Completion) -> None:
        """Put an answer's tokens at the end."""
        self._token_ids.extend(answer.token_ids)
        self._logprobs.extend(answer.logprobs)
        self._pieces.extend(answer.pieces)
        self._stop_reason = answer.stop_reason
        if answer.stop_reason == "abort" and self.num_tokens >= self.request.max_new_tokens:
            self._stop_reason = "length"

    def completion(self) -> Completion:
        """What there is, under the request's own id."""
        return Completion(
            self.request.request_id,
            tuple(self._token_ids),
            tuple(self._logprobs),
            self._stop_reason,
            tuple(self._pieces),
        )
