"""The scripted brain: tokens by a rule, log-probs that say which weights drew them. Needs no torch.

Its rules, on which tests may build:
- A token is a function of all ids before it and of the request's `sampling_seed` alone. So a response that was cut
  goes on from prompt + tokens exactly as it would have, here or on another server. (SGLang heeds `sampling_seed` only
  with --enable-deterministic-inference; a request without one is seeded by its rid here.)
- A response ends by itself at a place that the same function fixes, by the first of the request's stop tokens, after
  `mean_length` tokens in the mean.
- A log-prob is -(n + 2) / 4096, n being the number of the weights that truly drew the token, whatever the server says
  of its version: the digits at the end of the label they were given. `version_of` turns it back. Such numbers are exact
  in float32. Weights that were loaded but never named show as `UNNAMED`; those the server started with have -1 unless
  its --weight-version ends in digits.
- A prompt's scores say which weights scored them, in the same way; if the prompt is in the prefix cache, those that
  filled it. (Real servers recompute a prompt that is scored from its start; `cached_tokens` is like theirs.)
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

UNNAMED = -1 / 8192
STEP = 4096


def logprob_of(version: int | None) -> float:
    """The log-prob that weights of this number give; None: they have no name yet."""
    return UNNAMED if version is None else -(version + 2) / STEP


def version_of(logprob: float) -> int | None:
    """Number of the weights that drew a token; None if they had no name. Raises `ValueError` for other log-probs."""
    if logprob == UNNAMED:
        return None
    version = -logprob * STEP - 2
    if version != int(version) or version < -1:
        raise ValueError(f"{logprob} is no log-prob of the scripted brain; expected -(version + 2) / {STEP}")
    return int(version)


def number_of(label: str) -> int:
    """Digits at the end of a version label, as a number; -1 where there are none ("default")."""
    digits = label[len(label.rstrip("0123456789")) :]
    return int(digits) if digits else -1


@dataclass(frozen=True, slots=True)
class Script:
    """The rule. All fields are settings of the server (command.py)."""

    vocab_size: int = 1024
    mean_length: float = 32.0

    def next_token(self, state: int, seed: int, stop_token_ids: Sequence[int]) -> int:
        """The token that follows ids of this `state`."""
        if stop_token_ids and _number(state, seed, 0) * self.mean_length < 2**32:
            return stop_token_ids[0]
        token = _number(state, seed, 1) % self.vocab_size
        return self.vocab_size - 1 - token if token in stop_token_ids else token

    def response(
        self, prompt: Sequence[int], seed: int, max_new_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> list[int]:
        """What a server answers if nothing comes between."""
        tokens: list[int] = []
        state = state_of(prompt)
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_token_ids):
            tokens.append(self.next_token(state, seed, stop_token_ids))
            state = state_of(tokens[-1:], state)
        return tokens


def state_of(token_ids: Sequence[int], state: int = 0) -> int:
    """All that the rule knows of ids, those of an earlier `state` before them."""
    return zlib.crc32(",".join(map(str, [*token_ids, ""])).encode(), state)


def _number(state: int, seed: int, index: int) -> int:
    """0 to 2^32 - 1."""
    return zlib.crc32(f"{seed}/{state}/{index}".encode())
