"""One call of the embedded engine: which requests run in which rows, and what they have produced.

Bookkeeping is done on the host, in tensors over all rows, between bursts of a few steps; a burst leaves the device
alone. A row that ends within a burst runs to its end, and what it drew too much is not looked at.

Shape letters: R rows, B steps of a burst, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.rollout.draws import sample, seed_tensor, uniforms
from megatron_klear.types import Completion, GenerationRequest, Piece

BURST = 4


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the cache: index of the request [R], tokens it has [R] (host), the last of them [R] (device)."""

    request: Tensor
    count: Tensor
    token: Tensor

    def take(self, order: Tensor) -> _Rows:
        return _Rows(self.request[order], self.count[order], self.token[order.to(self.token.device)])

    def __add__(self, other: _Rows) -> _Rows:
        pairs = ((self.request, other.request), (self.count, other.count), (self.token, other.token))
        return _Rows(*(torch.cat(pair) for pair in pairs))


class _Ledger:
    """Settings of all requests, and their tokens as they come. On the host."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.limits = torch.tensor([r.max_new_tokens for r in requests])
        self.seeds = seed_tensor([r.seed for r in requests])
        self.temperatures = torch.tensor([r.temperature for r in requests], dtype=torch.float32)
        widest = max(len(r.stop_token_ids) for r in requests)
        self.stops = torch.tensor(
            [[*r.stop_token_ids, *[-1] * (widest - len(r.stop_token_ids))] for r in requests], dtype=torch.int64
        )
        # Not filled: pages that no token comes to are never taken from the system.
        size = len(requests), int(self.limits.max()) + BURST
        self.tokens = torch.empty(size, dtype=torch.int64)
        self.logprobs = torch.empty(size)
        self.lengths = torch.zeros(len(requests), dtype=torch.int64)
        self.stopped = torch.zeros(len(requests), dtype=torch.bool)

    def enter(self, rows: _Rows, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Write a burst [R, B] to the requests of `rows`; which rows go on [R] bool."""
        at = rows.count[:, None] + torch.arange(tokens.size(1))
        self.tokens[rows.request[:, None], at] = tokens
        self.logprobs[rows.request[:, None], at] = logprobs
        stops = (tokens[:, :, None] == self.stops[rows.request][:, None]).any(-1)
        ends = stops | (at + 1 >= self.limits[rows.request][:, None])
        ended = ends.any(1)
        done, first = rows.request[ended], ends[ended].int().argmax(1, keepdim=True)
        self.lengths[done] = at[ended].gather(1, first)[:, 0] + 1
        self.stopped[done] = stops[ended].gather(1, first)[:, 0]
        return ~ended

    def completions(self, version: int) -> list[Completion]:
        """Of all requests, which have all ended."""
        assert self.lengths.min() > 0
        return [
            Completion(
                request.request_id,
                tuple(self.tokens[i, :length].tolist()),
                tuple(self.logprobs[i, :length].tolist()),
                "stop" if stopped else "length",
                (Piece(length, version),),
            )
            for i, (request, length, stopped) in enumerate(
                zip(self.requests, self.lengths.tolist(), self.stopped.tolist(), strict=True)
            )
        ]


class Generation:
    """Requests on their way through a decoder."""

    def __init__(
        self, decoder: Qwen3Decoder, requests: Sequence[GenerationRequest], version: int, max_running: int
    ) -> None:
        self.decoder, self.version = decoder, version
        self.device = decoder.device
        self.ledger = _Ledger(requests)
        # Long prompts first: prompts that are prefilled together need little padding. The same ones stay together.
        self.waiting = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        self.max_rows = min(max_running, len(requests))
        # A row may run on to the end of the burst it ends in.
        decoder.reset(max(len(r.token_ids) + r.max_new_tokens for r in requests) + BURST)
        nothing = torch.zeros(0, dtype=torch.int64)
        self.rows = _Rows(nothing, nothing, nothing.to(self.device))

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """Until every request has ended."""
        while self.waiting or self.rows.count.numel():
            self._admit()
            if self.rows.count.numel():
                self._burst()
        return self.ledger.completions(self.version)

    def _admit(self) -> None:
        """Prefill waiting requests into free rows. Small trickles wait, so that prefills stay batched."""
        running = self.rows.count.numel()
        room = min(self.max_rows - running, len(self.waiting))
        if room == 0 or (running and room < min(self.max_rows // 8, len(self.waiting))):
            return
        admitted, self.waiting = self.waiting[:room], self.waiting[room:]
        first: dict[tuple[int, ...], int] = {}
        # Requests of a group share their prompt: it goes through the model once.
        leaders, followers, copies = [], [], []
        for index in admitted:
            prompt = self.ledger.requests[index].token_ids
            if prompt in first:
                followers.append(index)
                copies.append(first[prompt])
            else:
                first[prompt] = len(leaders)
                leaders.append(index)
        lengths = torch.tensor([len(prompt) for prompt in first])
        width = int(lengths.max())
        prompts = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in first])
        prompt_of = torch.tensor([*range(len(leaders)), *copies])
        logits = self.decoder.prefill(prompts.to(self.device), lengths, prompt_of[len(leaders) :])
        request = torch.tensor([*leaders, *followers])
        count = torch.zeros_like(request)
        draw = _Draw(self.ledger, request, count, 1, self.device)
        tokens, logprobs = draw(logits[prompt_of.to(self.device)], 0)
        new = _Rows(request, count, tokens)
        going = self.ledger.enter(new, tokens[:, None].cpu(), logprobs[:, None].cpu())
        self.rows += _Rows(request, count + 1, tokens)
        self._keep(torch.cat([torch.ones(running, dtype=torch.bool), going]))

    def _burst(self) -> None:
        """A few tokens for every row."""
        rows = self.rows
        steps = min(BURST, int((self.ledger.limits[rows.request] - rows.count).max()))
        draw = _Draw(self.ledger, rows.request, rows.count, steps, self.device)
        token, drawn = rows.token, []
        for i in range(steps):
            token, logprobs = draw(self.decoder.step(token), i)
            drawn.append((token, logprobs))
        tokens, logprobs = (torch.stack(column, dim=1).cpu() for column in zip(*drawn, strict=True))
        going = self.ledger.enter(rows, tokens, logprobs)
        self.rows = _Rows(rows.request, rows.count + steps, token)
        self._keep(going)

    def _keep(self, going: Tensor) -> None:
        """Let the rows that ended go [R] bool: rows from the end take their places."""
        if going.all():
            return
        num = int(going.sum())
        order = torch.arange(num)
        order[~going[:num]] = torch.nonzero(going[num:])[:, 0] + num
        self.decoder.cache.take(order)
        self.rows = self.rows.take(order)


class _Draw:
    """Sampling settings of the rows for a burst of `steps`, on the device."""

    def __init__(self, ledger: _Ledger, request: Tensor, count: Tensor, steps: int, device: torch.device) -> None:
        temperatures = ledger.temperatures[request]
        self.any_greedy = bool((temperatures == 0).any())
        self.temperatures = temperatures.to(device)
        indices = count[:, None] + torch.arange(steps)
        self.numbers = uniforms(ledger.seeds[request][:, None], indices).to(device)

    def __call__(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return sample(logits, self.temperatures, self.numbers[:, step], any_greedy=self.any_greedy)
