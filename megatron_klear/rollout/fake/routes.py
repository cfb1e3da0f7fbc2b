"""SGLang's endpoints, as release 0.5.23 answers them, and the fake's own: /faults and /calls.

Not here: streaming, text prompts, n > 1, stop strings, top_p and top_k (accepted and not heeded, as are other sampling
settings that are not named in `_job`), LoRA, IPC handles, weights_checker's actions but checksum.
"""

from __future__ import annotations

import itertools
import json
import pickle
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from megatron_klear.errors import RolloutError, WeightSyncError
from megatron_klear.rollout.fake.engine import Engine, Outcome
from megatron_klear.rollout.fake.faults import WRONG_TAG, Faults, die
from megatron_klear.rollout.fake.group import Groups
from megatron_klear.rollout.fake.http import Answer, Call, Dropped
from megatron_klear.rollout.fake.jobs import Job
from megatron_klear.rollout.fake.script import number_of
from megatron_klear.rollout.fake.weights import RawTensor, checksums, overall, read_folder, read_serialized

OUTSIDE_SESSION = "{} must run between begin_weight_update() and end_weight_update()"
PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(slots=True)
class Identity:
    """What the server says of itself."""

    model_path: str
    release: str = "0.5.23"


class SglangRoutes:
    """Answers calls. Raises `Dropped` where the connection is to be cut."""

    def __init__(self, engine: Engine, faults: Faults, identity: Identity) -> None:
        self.engine, self.faults, self.identity = engine, faults, identity
        self.groups = Groups()
        self.calls: list[dict[str, Any]] = []
        self._ids = itertools.count()
        self._updating = Lock()
        self._table: dict[str, Callable[[Call], Answer]] = {
            "/generate": self._generate,
            "/health": lambda call: Answer(),
            "/health_generate": lambda call: Answer(),
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/flush_cache": self._flush_cache,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weights_from_disk": self._update_from_disk,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/init_weights_update_group": self._join,
            "/update_weights_from_distributed": self._update_from_broadcast,
            "/destroy_weights_update_group": self._leave,
            "/update_weight_version": self._rename,
            "/weights_checker": self._checksum,
            "/release_memory_occupation": self._sleep,
            "/resume_memory_occupation": self._wake,
            "/openapi.json": self._interface,
            "/faults": self._change_faults,
            "/calls": lambda call: Answer(self.calls),
        }
        if not engine.settings.brackets_updates:
            del self._table["/begin_weight_update"], self._table["/end_weight_update"]

    def answer(self, call: Call) -> Answer:
        """Look the path up; a body that lacks something, or is of a wrong type, is answered by 400 as SGLang does."""
        route = self._table.get(call.path)
        if route is None:
            return Answer({"detail": "Not Found"}, 404)
        if call.path not in ("/calls", "/faults"):
            self.calls.append({"path": call.path, "rid": call.body.get("rid"), "time": time.time()})
        try:
            return route(call)
        except (KeyError, TypeError, ValueError) as error:
            return Answer({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

    # Generation

    def _generate(self, call: Call) -> Answer:
        fallen = self.faults.for_generate()
        job = self._job(call.body)
        job.is_deadly = "die_after" in fallen
        total, limit = len(job.prompt) + job.max_new_tokens, self.engine.brain.context_length
        if not job.prompt or total > limit:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens."
                f" You requested a total of {total} tokens"
            )
        if "status_500" in fallen:
            return Answer("Internal Server Error", 500)
        if any(not 0 <= token < self.engine.brain.vocab_size for token in job.prompt):
            die("a token id outside the vocabulary (an IndexError in the embedding)")
        self._wait(call, self.faults.settings.slow_s, for_ever="hang" in fallen)
        if not self.engine.submit(job, call.is_gone) or "drop" in fallen:
            raise Dropped
        answer = self._generated(job, call.body)
        if "garbage" in fallen:
            text = json.dumps(answer)
            return Answer(text[: len(text) // 2])
        return Answer(answer)

    def _wait(self, call: Call, seconds: float, *, for_ever: bool) -> None:
        until = time.monotonic() + seconds
        while for_ever or time.monotonic() < until:
            if call.is_gone():
                raise Dropped
            time.sleep(0.01)

    def _job(self, body: dict[str, Any]) -> Job:
        sampling = body.get("sampling_params") or {}
        rid = str(body.get("rid") or f"fake-{next(self._ids)}")
        seed = sampling.get("sampling_seed")
        stops = () if sampling.get("ignore_eos") else tuple(sampling.get("stop_token_ids") or ())
        return Job(
            rid,
            tuple(map(int, body["input_ids"])),
            int(sampling.get("max_new_tokens", 128)),
            temperature=float(sampling.get("temperature", 1.0)),
            stop_token_ids=stops,
            seed=zlib.crc32(rid.encode()) if seed is None else int(seed),
            wants_scores=bool(body.get("return_logprob")) and body.get("logprob_start_len", -1) >= 0,
        )

    def _generated(self, job: Job, body: dict[str, Any]) -> dict[str, Any]:
        tokens = [one.token for one in job.drawn]
        spans = job.spans()
        meta: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": job.finish,
            "prompt_tokens": len(job.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": job.num_cached,
            "num_retractions": job.num_retractions,
            "weight_versions": [{**span, "version": self._shown(span["version"])} for span in spans],
            "weight_version": self._shown(spans[-1]["version"]),
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[one.logprob, one.token, None] for one in job.drawn]
            meta["input_token_logprobs"] = job.score_rows(body.get("logprob_start_len", -1))
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _shown(self, label: str) -> str:
        return f"{WRONG_TAG}.{number_of(label)}" if self.faults.settings.wrong_version else label

    def _pause(self, call: Call) -> Answer:
        mode = call.body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        self.engine.pause(mode)
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, call: Call) -> Answer:
        self.engine.resume()
        return Answer({"message": "Generation continued successfully.", "status": "ok"})

    def _abort(self, call: Call) -> Answer:
        """A rid names all requests that begin so."""
        rid = call.body.get("rid") or ""
        everything = bool(call.body.get("abort_all"))
        self.engine.abort(lambda job: everything or (bool(rid) and job.rid.startswith(rid)))
        return Answer()

    def _flush_cache(self, call: Call) -> Answer:
        return Answer("Cache flushed.\n") if self.engine.flush() else Answer("Flush cache failed.\n", 400)

    # What it says of itself

    def _model_info(self, call: Call) -> Answer:
        return Answer(
            {
                "model_path": self.identity.model_path,
                "served_model_name": self.identity.model_path,
                "tokenizer_path": self.identity.model_path,
                "is_generation": True,
                "weight_version": self._shown(self.engine.reported),
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
            }
        )

    def _server_info(self, call: Call) -> Answer:
        return Answer(
            {
                "version": self.identity.release,
                "model_path": self.identity.model_path,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "context_length": self.engine.brain.context_length,
                "max_running_requests": self.engine.settings.max_running_requests,
                "internal_states": [{}],
            }
        )

    def _interface(self, call: Call) -> Answer:
        """SGLang describes its own HTTP interface; of the bodies, only what a client has to look up."""
        pause = {"mode": {"type": "string", "enum": list(PAUSE_MODES), "default": "abort"}}
        check = {"action": {"type": "string", "default": "checksum"}}
        schemas = {"PauseGenerationReqInput": {"properties": pause}, "CheckWeightsReqInput": {"properties": check}}
        paths = {path: {"post": {}} for path in self._table}
        return Answer({"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}})

    def _checksum(self, call: Call) -> Answer:
        action = call.body.get("action", "checksum")
        if action != "checksum":
            return Answer({"success": False, "message": f"the fake server knows no {action=}, only checksum"}, 400)
        with self.engine.changed:
            parts = checksums(self.engine.weights)
        whole = overall(parts)
        rank = {"checksums": parts, "per_gpu_checksum": whole, "parallelism_info": [{"role": "target", "tp_rank": 0}]}
        return Answer({"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": whole})

    # Weights

    def _update(self, call: Call, read: Callable[[], dict[str, RawTensor]]) -> Answer:
        """Read tensors and take them; faults that befall any way of it."""
        settings = self.faults.settings
        if settings.die_in_push:
            die("die_in_push")
        if settings.hang_push:
            self._wait(call, 0, for_ever=True)
        if settings.refuse_push:
            return _told(Outcome(False, "refuse_push"))
        if call.body.get("abort_all_requests"):
            self.engine.abort(lambda job: True)
        with self._updating:
            try:
                tensors = read()
            except WeightSyncError as error:
                return _told(Outcome(False, str(error)))
            label = call.body.get("weight_version")
            outcome = self.engine.update(tensors, label, flush=call.body.get("flush_cache", True))
        return _told(outcome)

    def _update_from_disk(self, call: Call) -> Answer:
        folder = str(call.body["model_path"])
        answer = self._update(call, lambda: read_folder(folder))
        if answer.status == 200:
            self.identity.model_path = folder
        return Answer({**answer.body, "num_paused_requests": 0}, answer.status)

    def _update_from_tensor(self, call: Call) -> Answer:
        if refusal := self._outside_session("update_weights_from_tensor"):
            return refusal
        serialized, load_format = call.body["serialized_named_tensors"][0], call.body.get("load_format")

        def read() -> dict[str, RawTensor]:
            try:
                return read_serialized(serialized, load_format)
            except pickle.UnpicklingError as error:
                die(f"tensors that could not be unpickled: {error}")

        return self._update(call, read)

    def _update_from_broadcast(self, call: Call) -> Answer:
        if refusal := self._outside_session("update_weights_from_distributed"):
            return refusal
        body = call.body
        specs = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        return self._update(call, lambda: self.groups.receive(body.get("group_name", "weight_update_group"), specs))

    def _outside_session(self, name: str) -> Answer | None:
        if self.engine.is_session_open or not self.engine.settings.brackets_updates:
            return None
        return _told(Outcome(False, OUTSIDE_SESSION.format(name)))

    def _begin(self, call: Call) -> Answer:
        if self.engine.is_session_open:
            return _told(Outcome(False, "a weight-update session is already open; call end_weight_update() first"))
        self.engine.is_session_open = True
        return _told(Outcome(True, "Success"))

    def _end(self, call: Call) -> Answer:
        if not self.engine.is_session_open:
            return _told(Outcome(False, "no weight-update session is open; call begin_weight_update() first"))
        self.engine.is_session_open = False
        return _told(Outcome(True, "Success"))

    def _join(self, call: Call) -> Answer:
        body = call.body
        try:
            self.groups.join(
                body.get("group_name", "weight_update_group"),
                host=str(body["master_address"]),
                port=int(body["master_port"]),
                rank=int(body["rank_offset"]),
                world_size=int(body["world_size"]),
                backend=body.get("backend", "nccl"),
            )
        except WeightSyncError as error:
            return _told(Outcome(False, f"Failed to initialize custom process group: {error}"))
        return _told(Outcome(True, "Succeeded to initialize custom process group."))

    def _leave(self, call: Call) -> Answer:
        if not self.groups.leave(call.body.get("group_name", "weight_update_group")):
            return _told(Outcome(False, "The group to be destroyed does not exist."))
        return _told(Outcome(True, "Succeeded to destroy custom process group."))

    def _rename(self, call: Call) -> Answer:
        label = str(call.body["new_version"])
        if call.body.get("abort_all_requests", True):
            self.engine.abort(lambda job: True)
        self.engine.rename(label)
        return Answer({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    def _sleep(self, call: Call) -> Answer:
        self.engine.sleep(call.body.get("tags") or [])
        return Answer()

    def _wake(self, call: Call) -> Answer:
        self.engine.wake()
        return Answer()

    # The fake's own

    def _change_faults(self, call: Call) -> Answer:
        try:
            settings = self.faults.change(call.body)
        except RolloutError as error:
            return Answer({"error": {"message": str(error)}}, 400)
        return Answer(settings, then=(lambda: die("die")) if settings["die"] else None)


def _told(outcome: Outcome) -> Answer:
    return Answer({"success": outcome.success, "message": outcome.message}, 200 if outcome.success else 400)
