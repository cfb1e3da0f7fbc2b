"""vLLM 0.32 over HTTP: token ids in, token ids out, each with the weights that drew it.

The server must be started with

- VLLM_SERVER_DEV_MODE=1 in its environment: the calls that pause it, load weights and empty caches;
- --tokens-only, or --enable-scale-out where it serves text too: /inference/v1/generate, the one route that says which
  weights drew a token;
- --logprobs-mode processed_logprobs: without it, log-probs are those before temperature.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from megatron_klear.errors import EngineStale, EngineUnavailable, RequestRefused, RolloutError
from megatron_klear.rollout.http import HttpClient
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    GroupAddress,
    PauseMode,
    Piece,
    ServerAddress,
    ServerFacts,
    TensorSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

GENERATE = "/inference/v1/generate"
# vLLM raises a smaller one to this, so that log-probs would be those of another temperature.
LEAST_TEMPERATURE = 0.01
LOADING = "loading"
# keep holds running requests; emptying the cache then makes them start again from their tokens.
PAUSE_MODES: Mapping[PauseMode, str] = {"abort": "abort", "wait": "wait", "retract": "keep"}


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Drawn(BaseModel):
    token_id: int
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    content: list[_Drawn]


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Generated(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


class _Read(BaseModel):
    logprob: FiniteFloat


class _Scored(BaseModel):
    prompt_logprobs: list[dict[int, _Read] | None]


class _Release(BaseModel):
    version: str


class _ModelSettings(BaseModel):
    logprobs_mode: str
    enable_sleep_mode: bool


class _Settings(BaseModel):
    # pydantic keeps the name `model_config` for itself.
    model: _ModelSettings = Field(alias="model_config")


class _ServerInfo(BaseModel):
    vllm_config: _Settings


class _Label(BaseModel):
    weight_version: str


class _Reset(BaseModel):
    success: bool


Answer = TypeVar("Answer", bound=BaseModel)


class VllmServer:
    """An `EngineServer`, for one event loop.

    Args:
        address: the server.
        labels: what this run calls its weights.
        timeout_s: longest wait for an answer.
        max_connections: calls that are on their way at a time; further ones wait.
        limits: of the model it serves.
    """

    def __init__(
        self,
        address: ServerAddress,
        labels: VersionLabels,
        *,
        timeout_s: float,
        max_connections: int,
        limits: ModelLimits,
    ) -> None:
        self._address, self._labels, self._limits = address, labels, limits
        self._http = HttpClient(address, timeout_s=timeout_s, max_connections=max_connections)
        self._facts: ServerFacts | None = None
        self._asking = asyncio.Lock()

    @property
    def address(self) -> ServerAddress:
        """Name, URL and kind."""
        return self._address

    async def facts(self) -> ServerFacts:
        """What it can do. Raises RequestRefused if it was started in a way that cannot serve training."""
        async with self._asking:
            if self._facts is None:
                self._facts = await self._ask_facts()
        return self._facts

    async def generate(self, request: GenerationRequest) -> Completion:
        """Draw tokens. The end of text ends a response only where it is one of the request's stop tokens."""
        self._limits.check(request)
        if 0 < request.temperature < LEAST_TEMPERATURE:
            raise RolloutError(
                f"request {request.request_id}: temperature {request.temperature} would be raised to"
                f" {LEAST_TEMPERATURE} by vLLM; give 0 (greedy) or at least {LEAST_TEMPERATURE}"
            )
        await self.facts()
        answer = await self._http.post(GENERATE, _body(request, logprobs=0))
        (choice,) = self._read(_Generated, answer, GENERATE).choices
        self._check(request, choice)
        return Completion(
            request.request_id,
            tuple(choice.token_ids),
            tuple(drawn.logprob for drawn in choice.logprobs.content),
            choice.finish_reason,
            tuple(self._piece(request, span) for span in choice.weight_versions),
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of token_ids[1:]. Like any request, it waits while the server is paused."""
        request = GenerationRequest("score", tuple(token_ids), max_new_tokens=1, temperature=0.0)
        self._limits.check(request)
        answer = await self._http.post(GENERATE, _body(request, prompt_logprobs=0))
        rows = self._read(_Scored, answer, GENERATE).prompt_logprobs
        if len(rows) != len(token_ids):
            self._senseless(f"{GENERATE}: {len(rows)} rows of log-probs for a prompt of {len(token_ids)} tokens")
        # The first token has none.
        found = [row[token].logprob for token, row in zip(token_ids, rows, strict=True) if row and token in row]
        if len(found) != len(token_ids) - 1:
            self._senseless(f"{GENERATE}: log-probs of {len(found)} of the {len(token_ids) - 1} tokens to score")
        return found

    async def weight_version(self) -> int | None:
        """Version that its label says; None if the label is not of this run."""
        label = self._read(_Label, await self._http.get("/weight_info"), "/weight_info")
        return self._labels.number(label.weight_version)

    async def pause(self, mode: PauseMode) -> None:
        """Draw nothing until `resume`; new requests wait on the server."""
        if mode not in PAUSE_MODES:
            self._refuse(f"pause mode {mode}", " or ".join(PAUSE_MODES))
        await self._http.post(f"/pause?mode={PAUSE_MODES[mode]}")

    async def resume(self) -> None:
        """Draw again."""
        await self._http.post("/resume")

    async def abort_all(self) -> None:
        """End running requests; each answers with what it has."""
        await self._http.post("/abort_requests")

    async def flush_cache(self) -> None:
        """Forget cached prefixes, those of running requests too: these are prefilled again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not self._read(_Reset, await self._http.post(path), path).success:
            self._senseless(f"{path}: the server could not; something else than its requests holds prefixes")

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a Hugging Face folder. Until all of it is there, the weights are nobody's version."""
        await self._set_label(LOADING)
        await self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await self.set_version(version)

    async def begin_update(self) -> None:
        """Nothing to do: updates are not bracketed."""

    async def end_update(self) -> None:
        """Nothing to do: updates are not bracketed."""

    async def update_from_tensors(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Not offered."""
        self._refuse(f"{len(bucket)} tensors", "transport disk")

    async def join_group(self, group: GroupAddress) -> None:
        """Not offered."""
        self._refuse(f"process group {group.name}", "transport disk")

    async def leave_group(self, name: str) -> None:
        """Not offered."""
        self._refuse(f"process group {name}", "transport disk")

    async def update_from_broadcast(self, bucket: Sequence[TensorSpec], group: str) -> None:
        """Not offered."""
        self._refuse(f"{len(bucket)} tensors over {group}", "transport disk")

    async def set_version(self, version: int) -> None:
        """Call its weights `version`; tokens drawn from now on say so."""
        await self._set_label(self._labels.text(version))

    async def checksum(self) -> Mapping[str, str]:
        """Not offered: vLLM's covers nothing of weights that it has repacked, as it does on a CPU."""
        self._refuse("a checksum", "the probe of log-probs")

    async def sleep(self) -> None:
        """Move the weights to the host's memory and free the cache. Running requests end; new ones wait."""
        await self._http.post("/sleep?level=1")

    async def wake(self) -> None:
        """Take the memory back."""
        await self._http.post("/wake_up")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _ask_facts(self) -> ServerFacts:
        release = self._read(_Release, await self._http.get("/version"), "/version").version
        path = "/server_info?config_format=json"
        try:
            info = self._read(_ServerInfo, await self._http.get(path), path)
        except RequestRefused as error:
            raise RequestRefused(
                f"{error}; expected a vLLM started with VLLM_SERVER_DEV_MODE=1, which alone pauses and takes weights"
            ) from error
        config = info.vllm_config.model
        if config.logprobs_mode != "processed_logprobs":
            self._refuse(f"logprobs_mode {config.logprobs_mode}", "a server with --logprobs-mode processed_logprobs")
        return ServerFacts(
            release=release,
            transports=frozenset({"disk"}),
            pause_modes=frozenset(PAUSE_MODES),
            brackets_updates=False,
            stamps_tokens=True,
            has_checksum=False,
            sleeps=config.enable_sleep_mode,
        )

    async def _set_label(self, label: str) -> None:
        await self._http.post("/update_weight_version", {"new_version": label})

    def _check(self, request: GenerationRequest, choice: _Choice) -> None:
        """That the parts of an answer agree with each other and with the request."""
        num, ids = len(choice.token_ids), choice.token_ids
        ends = [span.end for span in choice.weight_versions]
        if ids != [drawn.token_id for drawn in choice.logprobs.content]:
            self._senseless(f"request {request.request_id}: {num} tokens, but log-probs of other ones")
        if [span.start for span in choice.weight_versions] + [num] != [0, *ends] and (num or ends):
            self._senseless(f"request {request.request_id}: {num} tokens, but weight versions that end at {ends}")
        if choice.finish_reason == "stop" and not set(ids[-1:]) & set(request.stop_token_ids):
            self._senseless(f"request {request.request_id}: stopped at {ids[-1:]}, expected {request.stop_token_ids}")
        if choice.finish_reason == "length" and num < request.max_new_tokens:
            self._refuse(
                f"a context that ends request {request.request_id} after {num} of {request.max_new_tokens} tokens",
                f"--max-model-len of at least {len(request.token_ids) + request.max_new_tokens}",
            )

    def _piece(self, request: GenerationRequest, span: _Span) -> Piece:
        version = self._labels.number(span.version)
        if version is None:
            raise EngineStale(
                f"{self._address.name} ({self._address.url}) drew tokens of request {request.request_id} from weights"
                f" labelled {span.version!r}, expected a label {self._labels.tag}.N: it was restarted, or another run"
                " has pushed to it; push the weights again"
            )
        return Piece(span.end - span.start, version, self._address.name)

    def _read(self, kind: type[Answer], answer: Any, path: str) -> Answer:
        try:
            return kind.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the answer"
            self._senseless(f"{path}: {where} is {str(first['input'])[:80]!r}: {first['msg']}", error)

    def _senseless(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise EngineUnavailable(f"{self._address.name} ({self._address.url}): {what}") from cause

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise RequestRefused(
            f"{self._address.name} ({self._address.url}): vLLM cannot serve training with {what}; use {instead}"
        )


def _body(request: GenerationRequest, **logprobs: int) -> dict[str, Any]:
    """The request on the wire. What would change the distribution is named, whatever the server's defaults are."""
    return {
        "token_ids": request.token_ids,
        "sampling_params": {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "detokenize": False,
            **logprobs,
        },
    }
