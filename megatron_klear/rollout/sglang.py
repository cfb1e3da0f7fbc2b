"""An SGLang server: token ids in, tokens with log-probs out, new weights by three ways.

Log-probs are after temperature. Greedy requests (temperature 0) have those of temperature 1, as everywhere here: SGLang
itself makes a greedy request one of temperature 1 that takes the likeliest token.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from megatron_klear.errors import EngineUnavailable, RequestRefused, RolloutError
from megatron_klear.rollout.flat_bucket import flatten, serialize
from megatron_klear.rollout.http import HttpClient
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang_answer import AnswerReader
from megatron_klear.types import (
    Completion,
    GenerationRequest,
    GroupAddress,
    PauseMode,
    ServerAddress,
    ServerFacts,
    TensorSpec,
    Transport,
)

if TYPE_CHECKING:
    from torch import Tensor

# Every setting that a server's own defaults (its model's generation_config) could fill in otherwise.
PLAIN_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "skip_special_tokens": False,
    "no_stop_trim": True,
}
# The cache is flushed by a call of its own: inside an update a refused flush would look like a failed update.
KEEP_CACHE = {"flush_cache": False}


class SglangServer:
    """An `EngineServer`.

    Args:
        address: the server itself, never a router: weights go to each server.
        labels: what this run calls its weights.
        timeout_s: longest wait for any answer.
        max_connections: generations on their way at a time; further ones wait. Other calls never wait for them.
        limits: sizes of the model; a bad token id would end the whole server.
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
        self._address = address
        self._labels = labels
        self._limits = limits
        self._reader = AnswerReader(address.name, labels, limits.vocab_size - 1)
        self._generation = HttpClient(address, timeout_s=timeout_s, max_connections=max_connections)
        self._control = HttpClient(address, timeout_s=timeout_s, max_connections=4)
        # Another instance may have requests of the same names on this server, also from before this one was made.
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._running: dict[str, str] = {}
        self._facts: ServerFacts | None = None

    @property
    def address(self) -> ServerAddress:
        """Name, URL and kind."""
        return self._address

    async def facts(self) -> ServerFacts:
        """What it says of its own interface, its settings, and one token drawn: so it raises until it can generate."""
        if self._facts is None:
            interface = await self._interface()
            settings = await self._object("/server_info")
            num_tensor, num_pipeline, num_data = (int(settings.get(f"{x}_size") or 1) for x in ("tp", "pp", "dp"))
            transports: set[Transport] = {"disk"}
            # SGLang refuses tensors to data-parallel replicas, and gives pipeline stages the same rank of a group.
            if num_data == 1 and interface.has("/update_weights_from_tensor"):
                transports.add("tensor")
            if num_data == num_pipeline == 1 and interface.has("/update_weights_from_distributed"):
                transports.add("broadcast")
            self._facts = ServerFacts(
                release=str(settings.get("version", "unknown")),
                transports=frozenset(transports),
                pause_modes=interface.pause_modes(),
                brackets_updates=interface.has("/begin_weight_update"),
                stamps_tokens=self._reader.stamps_tokens(await self._draw_one()),
                has_checksum=interface.has_checksum(),
                # Without its memory saver the calls exist and give nothing back.
                sleeps=interface.has("/release_memory_occupation") and settings.get("enable_memory_saver") is not False,
                num_ranks=num_tensor * num_pipeline,
            )
        return self._facts

    async def generate(self, request: GenerationRequest) -> Completion:
        """Tokens and log-probs. The server may also stop at an end-of-sequence token of its model's configuration."""
        self._limits.check(request)
        # Numbered, for a request may come again while its first attempt still runs. The number comes first, for SGLang
        # aborts every request whose id STARTS with the one that it is given ("r1" would end "r10").
        rid = f"{self._prefix}.{next(self._numbers)}.{request.request_id}"
        sampling = {
            **PLAIN_SAMPLING,
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            # Honoured only by servers that run with --enable-deterministic-inference; the others draw as they like.
            "sampling_seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
            # With it SGLang ignores the request's stop tokens as well as the model's.
            "ignore_eos": not request.stop_token_ids,
        }
        body = {"rid": rid, "input_ids": list(request.token_ids), "sampling_params": sampling, "return_logprob": True}
        self._running[request.request_id] = rid
        try:
            answer = await self._generation.post("/generate", body)
        finally:
            # A later attempt may have taken the entry over.
            if self._running.get(request.request_id) == rid:
                del self._running[request.request_id]
        return self._reader.completion(answer, request)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of token_ids[1:]. A paused server answers only after `resume`."""
        self._limits.check_ids(token_ids, "the sequence to score")
        if not 2 <= len(token_ids) <= self._limits.max_context:
            raise RolloutError(f"{len(token_ids)} tokens to score; expected 2 to {self._limits.max_context}")
        sampling = {**PLAIN_SAMPLING, "max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": list(token_ids), "sampling_params": sampling, "return_logprob": True}
        answer = await self._control.post("/generate", {**body, "logprob_start_len": 0})
        return self._reader.scores(answer, token_ids)

    async def weight_version(self) -> int | None:
        """Version it says it has; None if those weights are not of this run."""
        info = await self._object("/model_info")
        label = info.get("weight_version")
        if not isinstance(label, str):
            raise EngineUnavailable(f"{self._where('/model_info')}: expected a weight_version, got {str(info)[:200]!r}")
        return self._labels.number(label)

    async def pause(self, mode: PauseMode) -> None:
        """Let no token be drawn until `resume`. abort: returns when every running request has answered."""
        known = (await self.facts()).pause_modes
        if mode not in known:
            raise RequestRefused(
                f"{self._where('/pause_generation')}: this release pauses by {', '.join(sorted(known))}, not {mode};"
                " change rollout.servers.pause_mode"
            )
        await self._control.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Draw again."""
        await self._control.post("/continue_generation")

    async def abort(self, request_id: str) -> None:
        """End one running request of this instance; it answers with what it has. Nothing happens if it has ended."""
        rid = self._running.get(request_id)
        if rid is not None:
            await self._control.post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End running requests. Those that wait for a paused server are not among them."""
        await self._control.post("/abort_request", {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget cached prefixes. The server refuses while requests run, also if they are paused in_place."""
        try:
            await self._control.post("/flush_cache")
        except RequestRefused as error:
            raise EngineUnavailable(f"the prefix cache was not flushed: {error}") from error

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder. If that fails, the server keeps its old weights and their version."""
        body = {"model_path": folder, "weight_version": self._labels.text(version), **KEEP_CACHE}
        await self._update("/update_weights_from_disk", body)

    async def begin_update(self) -> None:
        """Open a session for updates; one that a broken push left open is closed first."""
        try:
            await self._update("/begin_weight_update")
        except RequestRefused:
            await self._update("/end_weight_update")
            await self._update("/begin_weight_update")

    async def end_update(self) -> None:
        """Close the session: the weights are ready to serve."""
        await self._update("/end_weight_update")

    async def update_from_tensors(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load some weights, sent with the request (CPU) or by handles of this process's memory (CUDA)."""
        num_ranks = (await self.facts()).num_ranks
        flat, table = flatten(bucket)
        # Each rank takes its own entry and cuts its shards out of the whole tensors. One handle of CUDA memory must
        # not be opened twice.
        payloads = [serialize(flat, table) for _ in range(num_ranks)]
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", **KEEP_CACHE}
        await self._update("/update_weights_from_tensor", body)

    async def join_group(self, group: GroupAddress) -> None:
        """Enter a process group; returns once everybody has."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._update("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Leave it."""
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def update_from_broadcast(self, bucket: Sequence[TensorSpec], group: str) -> None:
        """Receive the bucket's tensors in order from rank 0 of the group; returns once all have come."""
        body = {
            "names": [spec.name for spec in bucket],
            "dtypes": [spec.dtype for spec in bucket],
            "shapes": [list(spec.shape) for spec in bucket],
            "group_name": group,
            **KEEP_CACHE,
        }
        await self._update("/update_weights_from_distributed", body)

    async def set_version(self, version: int) -> None:
        """Call the weights that were sent `version`. Running requests stay: their later tokens are of that version."""
        body = {"new_version": self._labels.text(version), "abort_all_requests": False}
        await self._update("/update_weight_version", body)

    async def checksum(self) -> Mapping[str, str]:
        """Checksum of each of its weights as it holds them: fused (qkv_proj, gate_up_proj), those of further ranks as
        rank1.NAME.

        On CPU the first 16 digits of the SHA-256 of the bytes; on CUDA one of SGLang's own, equal for equal weights.
        """
        answer = await self._control.post("/weights_checker", {"action": "checksum"})
        ranks: list[Any] = answer.get("ranks") or [] if isinstance(answer, dict) else []
        found: dict[str, str] = {}
        for number, rank in enumerate(ranks):
            table: Any = rank.get("checksums") if isinstance(rank, dict) else None
            if not isinstance(table, dict):
                break
            found |= {f"rank{number}.{name}" if number else name: str(value) for name, value in table.items()}
        else:
            if found:
                return found
        raise EngineUnavailable(f"{self._where('/weights_checker')}: no checksums in {str(answer)[:200]!r}")

    async def sleep(self) -> None:
        """Give its accelerator's memory to the trainer. Only a paused server without running requests survives it."""
        await self._control.post("/release_memory_occupation")

    async def wake(self) -> None:
        """Take it back. The weights must be pushed again."""
        await self._control.post("/resume_memory_occupation")

    async def close(self) -> None:
        """Close the connections."""
        await self._generation.close()
        await self._control.close()

    async def _update(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        answer = await self._control.post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineUnavailable(f"{self._where(path)}: expected success, got {str(answer)[:300]!r}")

    async def _interface(self) -> _Interface:
        try:
            return _Interface(await self._object("/openapi.json"))
        except RequestRefused as error:
            raise RequestRefused(
                f"{error}; what this release can do is read there: start it without DISABLE_OPENAPI_DOC"
            ) from error

    async def _draw_one(self) -> Any:
        sampling = {**PLAIN_SAMPLING, "max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        return await self._control.post("/generate", {"input_ids": [0], "sampling_params": sampling})

    async def _object(self, path: str) -> dict[str, Any]:
        answer = await self._control.get(path)
        if not isinstance(answer, dict):
            raise EngineUnavailable(f"{self._where(path)}: expected an object, got {str(answer)[:200]!r}")
        return answer

    def _where(self, path: str) -> str:
        return f"{self._address.name} ({self._address.url}): {path}"


class _Interface:
    """The server's description of its own HTTP interface (OpenAPI): looked up, so that nothing has to be tried."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._paths = document.get("paths", {})
        self._schemas = document.get("components", {}).get("schemas", {})

    def has(self, path: str) -> bool:
        """True if there is such a call."""
        return path in self._paths

    def pause_modes(self) -> frozenset[PauseMode]:
        """Modes by name; a release that does not name them can only abort."""
        named = self._property("PauseGenerationReqInput", "mode").get("enum", ["abort"])
        return frozenset(mode for mode in get_args(PauseMode) if mode in named)

    def has_checksum(self) -> bool:
        """True if checksums are what the weights checker makes by default; other releases may not know them."""
        action = self._property("CheckWeightsReqInput", "action")
        return self.has("/weights_checker") and action.get("default") == "checksum"

    def _property(self, schema: str, name: str) -> Mapping[str, Any]:
        return self._schemas.get(schema, {}).get("properties", {}).get(name, {})
