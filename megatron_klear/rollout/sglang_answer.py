"""What SGLang answers to /generate, read with suspicion: nothing that contradicts itself becomes a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_klear.errors import EngineStale, EngineUnavailable
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.types import Completion, GenerationRequest, Piece, StopReason

STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class AnswerReader:
    """Reads the answers of one server.

    Args:
        engine: name of the server, for errors and pieces.
        labels: what this run calls its weights.
        last_id: the vocabulary's last token.

    Raises everywhere `EngineUnavailable`, naming the server and what is wrong with its answer.
    """

    def __init__(self, engine: str, labels: VersionLabels, last_id: int) -> None:
        self.engine = engine
        self.labels = labels
        self.last_id = last_id

    def completion(self, answer: Any, request: GenerationRequest) -> Completion:
        """Tokens, log-probs, pieces and the reason of the end. Raises `EngineStale` for weights of somebody else."""
        meta = self._field(answer, "meta_info", dict)
        ids = tuple(self._field(answer, "output_ids", list))
        logprobs = self._logprobs(self._field(meta, "output_token_logprobs", list), ids, "output_token_logprobs")
        reason = self._stop_reason(self._field(meta, "finish_reason", dict), ids, request)
        return Completion(request.request_id, ids, logprobs, reason, self._pieces(meta, len(ids)))

    def scores(self, answer: Any, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of token_ids[1:]; the first token's is null, for nothing comes before it."""
        rows = self._field(self._field(answer, "meta_info", dict), "input_token_logprobs", list)
        if len(rows) != len(token_ids):
            raise self._wrong(f"{len(rows)} input_token_logprobs for {len(token_ids)} tokens of input")
        # SGLang calls the vocabulary's last token 0 in this list (found with 0.5.23); its log-prob is the right one.
        ids = [
            0 if token_id == self.last_id and isinstance(row, list) and row[1:2] == [0] else token_id
            for row, token_id in zip(rows, token_ids, strict=True)
        ]
        return list(self._logprobs(rows[1:], ids[1:], "input_token_logprobs"))

    def stamps_tokens(self, answer: Any) -> bool:
        """True if a generation's answer says which weights drew which token."""
        return "weight_versions" in self._field(answer, "meta_info", dict)

    def _logprobs(self, rows: Sequence[Any], ids: Sequence[Any], what: str) -> tuple[float, ...]:
        if len(rows) != len(ids):
            raise self._wrong(f"{len(rows)} {what} for {len(ids)} tokens")
        logprobs = []
        for place, (row, token_id) in enumerate(zip(rows, ids, strict=True)):
            match row:
                case [int() | float() as logprob, int() as row_id, *_] if math.isfinite(logprob):
                    if row_id != token_id:
                        raise self._wrong(f"{what}[{place}] is of token {row_id}, but the token is {token_id!r}")
                    logprobs.append(float(logprob))
                case _:
                    raise self._wrong(f"{what}[{place}] is {row!r}, expected [finite log-prob, token id, ...]")
        return tuple(logprobs)

    def _stop_reason(self, finish: dict[str, Any], ids: Sequence[int], request: GenerationRequest) -> StopReason:
        reason = STOP_REASONS.get(finish.get("type", ""))
        if reason is None:
            raise self._wrong(f"finish_reason is {finish!r}, expected a type stop, length or abort")
        num, limit = len(ids), request.max_new_tokens
        if num > limit or (reason == "length" and num < limit):
            raise self._wrong(f"{num} tokens and finish_reason {reason}, but {limit} were asked for")
        # The token itself must be there: it is part of what the policy chose, and is trained on.
        if reason == "stop" and (not ids or finish.get("matched", ids[-1]) != ids[-1]):
            raise self._wrong(f"it stopped at token {finish.get('matched')}, but the tokens end with {list(ids[-1:])}")
        return reason

    def _pieces(self, meta: dict[str, Any], num_tokens: int) -> tuple[Piece, ...]:
        if num_tokens == 0:
            return ()
        spans = meta.get("weight_versions")
        if spans is None:
            # Older releases know the last version alone; their requests must not span an update.
            spans = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
        pieces, end = [], 0
        for span in self._field({"weight_versions": spans}, "weight_versions", list):
            match span:
                case {"version": str(label), "start": int(start), "end": int(next_end)} if start == end < next_end:
                    pieces.append(Piece(next_end - start, self._version(label), self.engine))
                    end = next_end
                case _:
                    raise self._wrong(f"weight_versions holds {span!r} where a span from {end} was expected")
        if end != num_tokens:
            raise self._wrong(f"weight_versions covers {end} of {num_tokens} tokens")
        return tuple(pieces)

    def _version(self, label: str) -> int:
        version = self.labels.number(label)
        if version is None:
            raise EngineStale(
                f"{self.engine}: tokens drawn from weights called {label!r}, but this run pushed only"
                f" {self.labels.tag}.N; the server was restarted, or another run pushes to it"
            )
        return version

    def _field(self, holder: Any, name: str, kind: type) -> Any:
        value = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(value, kind):
            raise self._wrong(f"expected {name} to be a {kind.__name__}, got {str(holder)[:200]!r}")
        return value

    def _wrong(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(f"{self.engine}: /generate answered nonsense: {what}")
