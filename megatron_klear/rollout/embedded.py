"""The embedded engine: batched generation in this process, for laptops, tests and small models.

Requests wait in a queue; at most `max_running_requests` run at a time, each in a slot of the decoder's cache. A
finished row makes room for the next waiting request at once, so ragged lengths do not leave rows idle.

Each request draws its uniform numbers from its own seed. So its tokens do not depend on what shares its batch, up to
float rounding of batched products.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import RolloutError
from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.types import Completion, GenerationRequest, StopReason


@dataclass(slots=True)
class _Running:
    """A request in a slot."""

    index: int
    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def stop_reason(self) -> StopReason | None:
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.max_new_tokens else None


class _SlotSettings:
    """Per-slot sampling settings as tensors, so that a step needs no loop over rows."""

    def __init__(self, num_slots: int, max_new_tokens: int, device: torch.device) -> None:
        self.uniforms = torch.zeros(num_slots, max_new_tokens, dtype=torch.float64, device=device)
        self.temperatures = torch.ones(num_slots, device=device)

    def fill(self, slots: Sequence[int], requests: Sequence[GenerationRequest]) -> None:
        """Take over the settings of requests that were just admitted."""
        for slot, request in zip(slots, requests, strict=True):
            self.temperatures[slot] = request.temperature
            if request.temperature > 0:
                generator = torch.Generator().manual_seed(request.seed)
                draws = torch.rand(request.max_new_tokens, dtype=torch.float64, generator=generator)
                self.uniforms[slot, : draws.numel()] = draws


class EmbeddedEngine:
    """A `RolloutEngine` in this process."""

    def __init__(self, shape: Qwen3Shape, *, max_running_requests: int = 256) -> None:
        self.shape = shape
        self.max_running_requests = max_running_requests
        self._decoder: Qwen3Decoder | None = None
        self._version = -1

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; -1 before the first load."""
        return self._version

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. The old ones stay in use if the new set is not complete."""
        self._decoder = Qwen3Decoder(self.shape, named_tensors, num_slots=self.max_running_requests)
        self._version = version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in order. Temperature 0 is greedy (its log-probs are those of temperature 1)."""
        if self._decoder is None:
            raise RolloutError("the embedded engine has no weights yet; call load_weights before generate")
        for request in requests:
            self._check(request)
        if not requests:
            return []
        return _Generation(self._decoder, requests, self._version).run()

    def _check(self, request: GenerationRequest) -> None:
        """A bad id would read outside the embedding; say which request it was instead."""
        total, limit = len(request.token_ids) + request.max_new_tokens, self.shape.max_position_embeddings
        if not request.token_ids or request.max_new_tokens < 1:
            raise RolloutError(f"request {request.request_id} needs at least one prompt token and one new token")
        if total > limit:
            raise RolloutError(
                f"request {request.request_id}: {len(request.token_ids)} prompt tokens + {request.max_new_tokens} new"
                f" tokens = {total}, but max_position_embeddings is {limit}; shorten the prompt or the response"
            )
        bad = [t for t in request.token_ids if not 0 <= t < self.shape.vocab_size]
        if bad:
            raise RolloutError(
                f"request {request.request_id} holds token id {bad[0]}, expected ids from 0 to"
                f" {self.shape.vocab_size - 1}"
            )


class _Generation:
    """One call of `generate`: slots, their requests, and the loop over decoding steps."""

    def __init__(self, decoder: Qwen3Decoder, requests: Sequence[GenerationRequest], version: int) -> None:
        self.decoder = decoder
        self.version = version
        self.device = decoder.embedding.device
        # Long prompts first: what runs at the end is short, so few rows are left over.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        self.waiting = deque(_Running(i, requests[i]) for i in order)
        self.free = list(range(decoder.num_slots))[::-1]
        self.running: dict[int, _Running] = {}
        self.done: list[Completion | None] = [None] * len(requests)
        self.settings = _SlotSettings(decoder.num_slots, max(r.max_new_tokens for r in requests), self.device)
        decoder.reserve(max(len(r.token_ids) + r.max_new_tokens for r in requests))

    def run(self) -> list[Completion]:
        """Decode until every request is done."""
        while self.waiting or self.running:
            self._admit()
            if self.running:
                self._advance()
        completions = [c for c in self.done if c is not None]
        assert len(completions) == len(self.done)
        return completions

    def _admit(self) -> None:
        """Prefill waiting requests into free slots. Small trickles wait, so that prefills stay batched."""
        room = min(len(self.free), len(self.waiting))
        if room == 0 or (self.running and room < min(self.decoder.num_slots // 8, len(self.waiting))):
            return
        slots = [self.free.pop() for _ in range(room)]
        rows = [self.waiting.popleft() for _ in range(room)]
        lengths = torch.tensor([len(r.request.token_ids) for r in rows])
        prompts = torch.zeros(room, int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            prompts[i, : lengths[i]] = torch.tensor(row.request.token_ids)
        index = torch.tensor(slots, device=self.device)
        logits = self.decoder.prefill(index, prompts.to(self.device), lengths.to(self.device))
        self.running.update(zip(slots, rows, strict=True))
        self.settings.fill(slots, [r.request for r in rows])
        self._take(slots, index, logits)

    def _advance(self) -> None:
        """One token for every running row."""
        slots = sorted(self.running)
        rows = [self.running[s] for s in slots]
        index = torch.tensor(slots, device=self.device)
        tokens = torch.tensor([r.token_ids[-1] for r in rows], device=self.device)
        longest = max(len(r.request.token_ids) + len(r.token_ids) for r in rows)
        self._take(slots, index, self.decoder.step(index, tokens, longest))

    def _take(self, slots: Sequence[int], index: Tensor, logits: Tensor) -> None:
        """Sample from logits [R, V], record, and free the slots of finished rows."""
        rows = [self.running[s] for s in slots]
        steps = torch.tensor([len(r.token_ids) for r in rows], device=self.device)
        tokens, logprobs = sample(logits, self.settings.temperatures[index], self.settings.uniforms[index, steps])
        for slot, row, token, logprob in zip(slots, rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            reason = row.stop_reason()
            if reason is not None:
                self.done[row.index] = Completion(
                    row.request.request_id, tuple(row.token_ids), tuple(row.logprobs), reason, self.version
                )
                del self.running[slot]
                self.free.append(slot)


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: [R, V] float32.
        temperatures: [R] float32; 0 takes the most likely token.
        uniforms: [R] float64 in [0, 1).

    Returns:
        token ids [R] int64 and their log-probs [R] float32 under softmax(logits / temperature).
    """
    greedy = temperatures == 0
    logprobs = (logits / temperatures.masked_fill(greedy, 1.0)[:, None]).log_softmax(dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    # Scaling by the total keeps a draw near 1 from pointing past the last token.
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn.clamp_(max=logits.size(-1) - 1))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
