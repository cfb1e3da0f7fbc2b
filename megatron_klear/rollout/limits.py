"""What a request may hold, checked before it is sent: one bad id ends a whole server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_klear.errors import RolloutError
from megatron_klear.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Sizes of the model that serves; `max_context` counts prompt and response together."""

    vocab_size: int
    max_context: int

    def check(self, request: GenerationRequest) -> None:
        """Raises RolloutError, naming the request, where an engine would fail or read outside the embedding."""
        total = len(request.token_ids) + request.max_new_tokens
        if not request.token_ids or request.max_new_tokens < 1:
            raise RolloutError(f"request {request.request_id} needs at least one prompt token and one new token")
        if total > self.max_context:
            raise RolloutError(
                f"request {request.request_id}: {len(request.token_ids)} prompt tokens + {request.max_new_tokens} new"
                f" tokens = {total}, but max_position_embeddings is {self.max_context}; shorten the prompt or the"
                " response"
            )
        self.check_ids(request.token_ids, f"request {request.request_id}")

    def check_ids(self, token_ids: Sequence[int], owner: str) -> None:
        """Raises RolloutError, naming the owner, where an id is outside the vocabulary."""
        bad = [t for t in token_ids if not 0 <= t < self.vocab_size]
        if bad:
            raise RolloutError(f"{owner} holds token id {bad[0]}, expected ids from 0 to {self.vocab_size - 1}")
