"""SglangServer against a scripted HTTP server: what it sends, and what it makes of good and of nonsensical answers."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from megatron_klear.errors import EngineStale, EngineUnavailable, RequestRefused, RolloutError
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GenerationRequest, GroupAddress, Piece, ServerAddress, TensorSpec

LABELS = VersionLabels("run1")
LIMITS = ModelLimits(vocab_size=10, max_context=20)
REQUEST = GenerationRequest("r7", (4, 5), 3, temperature=0.7, stop_token_ids=(1,), seed=9)
GENERATED: dict[str, Any] = {
    "text": "",
    "output_ids": [6, 7, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "run1.4",
        "weight_versions": [{"version": "run1.3", "start": 0, "end": 2}, {"version": "run1.4", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 6, None], [-1, 7, None], [-0.25, 1, "x"]],
    },
}
INTERFACE: dict[str, Any] = {
    "paths": {
        "/begin_weight_update": {"post": {}},
        "/update_weights_from_tensor": {"post": {}},
        "/update_weights_from_distributed": {"post": {}},
        "/weights_checker": {"post": {}},
        "/release_memory_occupation": {"post": {}},
    },
    "components": {
        "schemas": {
            "PauseGenerationReqInput": {"properties": {"mode": {"enum": ["abort", "retract"]}}},
            "CheckWeightsReqInput": {"properties": {"action": {"default": "checksum"}}},
        }
    },
}
SUCCESS = {"success": True, "message": "Success"}
Result = TypeVar("Result")


class Script:
    """Answers each path with what it was given: a body, or (status, body); a list is used up one a call."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {f"/{path}": answer for path, answer in answers.items()}
        self.answers.setdefault("/openapi.json", INTERFACE)
        self.answers.setdefault("/server_info", {"version": "0.5.23", "tp_size": 1, "enable_memory_saver": True})
        self.answers.setdefault("/generate", GENERATED)
        self.calls: list[tuple[str, Any]] = []

    def sent(self, path: str) -> Any:
        """The body of the last call of a path."""
        return [body for called, body in self.calls if called == path][-1]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length) or b"null")
        path = head.split()[1]
        self.calls.append((path, body))
        answer = self.answers.get(path, (404, {"detail": "Not Found"}))
        if isinstance(answer, list):
            answer = answer.pop(0)
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        text = content if isinstance(content, str) else json.dumps(content)
        writer.write(f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    def run(self, body: Callable[[SglangServer], Awaitable[Result]]) -> Result:
        """Runs a test's body on a client of this server."""

        async def main() -> Result:
            listening = await asyncio.start_server(self.handle, "127.0.0.1", 0)
            port = listening.sockets[0].getsockname()[1]
            address = ServerAddress("engine3", f"http://127.0.0.1:{port}", "sglang")
            server = SglangServer(address, LABELS, timeout_s=10, max_connections=2, limits=LIMITS)
            try:
                return await body(server)
            finally:
                await server.close()
                listening.close()

        return asyncio.run(asyncio.wait_for(main(), 30))


def changed(**changes: Any) -> dict[str, Any]:
    """A good answer but for some fields; None takes one away."""
    answer = copy.deepcopy(GENERATED)
    for name, value in changes.items():
        holder = answer if name in answer else answer["meta_info"]
        holder[name] = value
        if value is None:
            del holder[name]
    return answer


def test_a_completion_keeps_tokens_logprobs_and_the_version_of_each_token() -> None:
    assert Script().run(lambda server: server.generate(REQUEST)) == Completion(
        "r7", (6, 7, 1), (-0.5, -1.0, -0.25), "stop", (Piece(2, 3, "engine3"), Piece(1, 4, "engine3"))
    )


def test_a_request_leaves_nothing_to_the_servers_defaults() -> None:
    script = Script()
    script.run(lambda server: server.generate(REQUEST))
    sent = script.sent("/generate")
    assert sent.pop("rid").endswith(".r7")
    assert sent == {
        "input_ids": [4, 5],
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 0.7,
            "stop_token_ids": [1],
            "ignore_eos": False,
            "sampling_seed": 9,
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
        },
    }


def test_without_stop_tokens_the_models_own_are_ignored() -> None:
    script = Script(generate=changed(finish_reason={"type": "length", "length": 3}))
    request = GenerationRequest("r", (4,), 3)
    assert script.run(lambda server: server.generate(request)).stop_reason == "length"
    assert script.sent("/generate")["sampling_params"]["ignore_eos"] is True


def test_no_request_id_begins_with_another() -> None:
    """SGLang aborts by the beginning of an id."""
    script = Script()

    async def body(server: SglangServer) -> None:
        names = ("r1", "r10", "r1", "r")
        requests = [dataclasses.replace(REQUEST, request_id=name) for name in names for _ in range(3)]
        await asyncio.gather(*(server.generate(request) for request in requests))

    script.run(body)
    script.run(body)  # An instance of its own.
    rids = [body["rid"] for path, body in script.calls if path == "/generate"]
    assert len(set(rids)) == 24
    assert not any(a != b and a.startswith(b) for a in rids for b in rids)


@pytest.mark.parametrize("num_tokens", (0, 1, 2))
def test_an_aborted_request_keeps_what_it_has(num_tokens: int) -> None:
    answer = changed(
        output_ids=[6, 7][:num_tokens],
        output_token_logprobs=[[-0.5, 6, None], [-1.0, 7, None]][:num_tokens],
        finish_reason={"type": "abort", "message": "Aborted"},
        weight_versions=[{"version": "run1.3", "start": 0, "end": num_tokens}],
    )
    completion = Script(generate=answer).run(lambda server: server.generate(REQUEST))
    assert completion.token_ids == (6, 7)[:num_tokens]
    assert completion.stop_reason == "abort"
    assert completion.pieces == ((Piece(num_tokens, 3, "engine3"),) if num_tokens else ())


def test_a_release_without_spans_gives_one_piece() -> None:
    completion = Script(generate=changed(weight_versions=None)).run(lambda server: server.generate(REQUEST))
    assert completion.pieces == (Piece(3, 4, "engine3"),)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"output_ids": None}, "expected output_ids to be a list"),
        ({"output_ids": [6, 7]}, "3 output_token_logprobs for 2 tokens"),
        ({"output_token_logprobs": None}, "expected output_token_logprobs to be a list"),
        (
            {"output_token_logprobs": [[-0.5, 6], [-1.0, 8], [-0.25, 1]]},
            r"output_token_logprobs\[1\] is of token 8, but the token is 7",
        ),
        (
            {"output_token_logprobs": [[None, 6], [-1.0, 7], [-0.25, 1]]},
            r"output_token_logprobs\[0\] is \[None, 6\], expected \[finite log-prob, token id",
        ),
        (
            {"output_token_logprobs": [[float("-inf"), 6], [-1.0, 7], [-0.25, 1]]},
            r"output_token_logprobs\[0\] is \[-inf, 6\], expected \[finite",
        ),
        ({"finish_reason": None}, "expected finish_reason to be a dict"),
        ({"finish_reason": {"type": "tired"}}, "expected a type stop, length or abort"),
        ({"finish_reason": {"type": "stop", "matched": 2}}, r"stopped at token 2, but the tokens end with \[1\]"),
        ({"output_ids": [6], "output_token_logprobs": [[-0.5, 6]], "finish_reason": {"type": "length"}}, "1 tokens"),
        ({"output_ids": [6] * 4, "output_token_logprobs": [[-0.5, 6]] * 4}, "4 tokens and finish_reason stop, but 3"),
        ({"weight_versions": []}, "weight_versions covers 0 of 3 tokens"),
        ({"weight_versions": [{"version": "run1.3", "start": 0, "end": 2}]}, "covers 2 of 3 tokens"),
        ({"weight_versions": [{"version": "run1.3", "start": 1, "end": 3}]}, "where a span from 0 was expected"),
        ({"weight_versions": None, "weight_version": None}, "where a span from 0 was expected"),
        ({"meta_info": None}, "expected meta_info to be a dict"),
    ),
)
def test_an_answer_that_contradicts_itself_is_no_sample(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineUnavailable, match=f"engine3: /generate answered nonsense: .*{message}"):
        Script(generate=changed(**changes)).run(lambda server: server.generate(REQUEST))


@pytest.mark.parametrize("answer", ("{half of an ans", [], "", [[]], 7))
def test_garbage_is_no_sample(answer: Any) -> None:
    script = Script(generate=[answer] if isinstance(answer, list) else answer)
    with pytest.raises(EngineUnavailable, match="engine3: /generate answered nonsense: expected meta_info"):
        script.run(lambda server: server.generate(REQUEST))


@pytest.mark.parametrize("label", ("default", "run2.3", "run1.x"))
def test_tokens_of_weights_that_this_run_did_not_push_are_stale(label: str) -> None:
    answer = changed(weight_versions=[{"version": label, "start": 0, "end": 3}])
    with pytest.raises(EngineStale, match=f"engine3: tokens drawn from weights called '{label}'.*only run1.N"):
        Script(generate=answer).run(lambda server: server.generate(REQUEST))


@pytest.mark.parametrize(
    ("status", "error"),
    ((400, RequestRefused), (404, RequestRefused), (500, EngineUnavailable), (503, EngineUnavailable)),
)
def test_a_status_says_whose_fault_it_is(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"engine3 \(http.*\): POST /generate: status {status}: .*why"):
        Script(generate=(status, {"error": "why"})).run(lambda server: server.generate(REQUEST))


def test_bad_requests_are_not_sent() -> None:
    script = Script()

    async def body(server: SglangServer) -> None:
        with pytest.raises(RolloutError, match="request r7 holds token id 10, expected ids from 0 to 9"):
            await server.generate(GenerationRequest("r7", (10,), 3))
        with pytest.raises(RolloutError, match=r"request r7: 2 prompt tokens \+ 19 new tokens = 21"):
            await server.generate(GenerationRequest("r7", (4, 5), 19))
        with pytest.raises(RolloutError, match="the sequence to score holds token id -1"):
            await server.score((4, -1))
        with pytest.raises(RolloutError, match="1 tokens to score; expected 2 to 20"):
            await server.score((4,))

    script.run(body)
    assert script.calls == []


def scored(*rows: Any) -> dict[str, Any]:
    return {"output_ids": [], "meta_info": {"input_token_logprobs": list(rows)}}


def test_scores_are_those_of_all_tokens_but_the_first() -> None:
    script = Script(generate=scored([None, 4, None], [-2.0, 5, None], [-3.0, 6, None]))
    assert script.run(lambda server: server.score((4, 5, 6))) == [-2.0, -3.0]
    sent = script.sent("/generate")
    assert sent["logprob_start_len"] == 0
    assert sent["sampling_params"]["temperature"] == 1.0 and sent["sampling_params"]["max_new_tokens"] == 0


def test_the_last_token_of_the_vocabulary_may_be_called_0_among_scores() -> None:
    script = Script(generate=scored([None, 4], [-2.0, 0], [-3.0, 9]))
    assert script.run(lambda server: server.score((4, 9, 9))) == [-2.0, -3.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    (
        (([None, 4], [-2.0, 5]), "2 input_token_logprobs for 3 tokens of input"),
        (([None, 4], [-2.0, 0], [-3.0, 6]), "is of token 0, but the token is 5"),
        (([None, 4], [None, 5], [-3.0, 6]), "expected .finite log-prob"),
        (([None, 4], 7, [-3.0, 6]), "expected .finite log-prob"),
    ),
)
def test_nonsensical_scores_are_an_error(rows: tuple[Any, ...], message: str) -> None:
    with pytest.raises(EngineUnavailable, match=f"engine3: /generate answered nonsense: .*{message}"):
        Script(generate=scored(*rows)).run(lambda server: server.score((4, 5, 6)))


def test_facts_are_read_once() -> None:
    script = Script()

    async def body(server: SglangServer) -> bool:
        return await server.facts() is await server.facts()

    assert script.run(body)
    assert [path for path, _ in script.calls] == ["/openapi.json", "/server_info", "/generate"]


def test_facts_of_a_current_release() -> None:
    facts = Script(server_info={"version": "0.9", "tp_size": 4, "enable_memory_saver": True}).run(lambda s: s.facts())
    assert (facts.release, facts.num_ranks) == ("0.9", 4)
    assert facts.transports == {"disk", "tensor", "broadcast"}
    assert facts.pause_modes == {"abort", "retract"}
    assert facts.brackets_updates and facts.stamps_tokens and facts.has_checksum and facts.sleeps


def test_facts_of_an_old_release() -> None:
    interface = {"paths": {"/weights_checker": {}}, "components": {"schemas": {}}}
    script = Script(**{"openapi.json": interface}, generate=changed(weight_versions=None))
    facts = script.run(lambda server: server.facts())
    assert facts.transports == {"disk"}
    assert facts.pause_modes == {"abort"}
    assert not (facts.brackets_updates or facts.stamps_tokens or facts.has_checksum or facts.sleeps)


@pytest.mark.parametrize(
    ("settings", "transports", "sleeps"),
    (
        ({"dp_size": 2, "enable_memory_saver": False}, {"disk"}, False),
        ({"pp_size": 2, "enable_memory_saver": True}, {"disk", "tensor"}, True),
    ),
)
def test_facts_follow_the_servers_settings(settings: dict[str, Any], transports: set[str], sleeps: bool) -> None:
    facts = Script(server_info=settings).run(lambda server: server.facts())
    assert facts.transports == transports
    assert facts.sleeps is sleeps


def test_a_server_that_cannot_generate_has_no_facts() -> None:
    with pytest.raises(EngineUnavailable, match="POST /generate: status 500"):
        Script(generate=(500, "no")).run(lambda server: server.facts())


def test_a_server_that_hides_its_interface_is_told_so() -> None:
    with pytest.raises(RequestRefused, match=r"openapi.json: status 404.*start it without DISABLE_OPENAPI_DOC"):
        Script(**{"openapi.json": (404, {})}).run(lambda server: server.facts())


@pytest.mark.parametrize(("label", "number"), (("run1.5", 5), ("default", None), ("run2.5", None)))
def test_the_version_of_its_weights(label: str, number: int | None) -> None:
    assert Script(model_info={"weight_version": label}).run(lambda server: server.weight_version()) == number


@pytest.mark.parametrize("answer", ({}, "ready", {"weight_version": 5}))
def test_a_version_that_is_not_said_is_an_error(answer: Any) -> None:
    with pytest.raises(EngineUnavailable, match=r"engine3 .*/model_info: expected"):
        Script(model_info=answer).run(lambda server: server.weight_version())


def test_updates_say_what_they_mean() -> None:
    """No update flushes the cache by itself, and naming a version aborts nothing."""
    script = Script(
        update_weights_from_disk=SUCCESS,
        update_weights_from_distributed=SUCCESS,
        init_weights_update_group=SUCCESS,
        destroy_weights_update_group=SUCCESS,
        update_weight_version=SUCCESS,
    )

    async def body(server: SglangServer) -> None:
        await server.update_from_disk("/weights/5", 5)
        await server.join_group(GroupAddress("g", "host", 1234, world_size=5, rank_offset=3, backend="nccl"))
        await server.update_from_broadcast([TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (), "bfloat16")], "g")
        await server.leave_group("g")
        await server.set_version(5)

    script.run(body)
    assert script.calls == [
        ("/update_weights_from_disk", {"model_path": "/weights/5", "weight_version": "run1.5", "flush_cache": False}),
        (
            "/init_weights_update_group",
            {
                "master_address": "host",
                "master_port": 1234,
                "rank_offset": 3,
                "world_size": 5,
                "group_name": "g",
                "backend": "nccl",
            },
        ),
        (
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"],
                "dtypes": ["float32", "bfloat16"],
                "shapes": [[2, 3], []],
                "group_name": "g",
                "flush_cache": False,
            },
        ),
        ("/destroy_weights_update_group", {"group_name": "g"}),
        ("/update_weight_version", {"new_version": "run1.5", "abort_all_requests": False}),
    ]


@pytest.mark.parametrize("answer", ({"success": False, "message": "no"}, {}, "done", None))
def test_an_update_that_was_not_confirmed_is_an_error(answer: Any) -> None:
    with pytest.raises(EngineUnavailable, match=r"engine3 .*/update_weight_version: expected success"):
        Script(update_weight_version=answer).run(lambda server: server.set_version(5))


def test_an_open_session_is_closed_before_another() -> None:
    script = Script(begin_weight_update=[(400, {"message": "already open"}), SUCCESS], end_weight_update=SUCCESS)
    script.run(lambda server: server.begin_update())
    assert [path for path, _ in script.calls] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_pausing_is_only_asked_for_in_a_mode_that_is_known() -> None:
    script = Script(pause_generation={"status": "ok"})
    script.run(lambda server: server.pause("retract"))
    assert script.sent("/pause_generation") == {"mode": "retract"}
    with pytest.raises(RequestRefused, match=r"pauses by abort, retract, not in_place; change rollout"):
        script.run(lambda server: server.pause("in_place"))


def test_a_cache_that_was_not_flushed_is_an_error() -> None:
    with pytest.raises(EngineUnavailable, match=r"cache was not flushed: engine3 .*status 400: requests run"):
        Script(flush_cache=(400, "requests run")).run(lambda server: server.flush_cache())


def test_checksums_of_all_ranks() -> None:
    ranks = [{"checksums": {"a": "01", "b": "02"}}, {"checksums": {"a": "03"}}]
    found = Script(weights_checker={"success": True, "ranks": ranks}).run(lambda server: server.checksum())
    assert found == {"a": "01", "b": "02", "rank1.a": "03"}


@pytest.mark.parametrize("answer", ({"success": True}, {"ranks": []}, {"ranks": [{}]}, {"ranks": [7]}, "x"))
def test_missing_checksums_are_an_error(answer: Any) -> None:
    with pytest.raises(EngineUnavailable, match=r"engine3 .*/weights_checker: no checksums in"):
        Script(weights_checker=answer).run(lambda server: server.checksum())


def test_control_calls_do_not_wait_for_generations() -> None:
    """All connections for generations are taken; an abort must come through, for it is what frees them."""
    script = Script(abort_request="")
    release = asyncio.Event()
    handle = script.handle

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not release.is_set() and not aborting:
            await release.wait()
        await handle(reader, writer)

    script.handle = slow  # type: ignore[method-assign]
    aborting: list[bool] = []

    async def body(server: SglangServer) -> None:
        running = [asyncio.create_task(server.generate(REQUEST)) for _ in range(4)]
        await asyncio.sleep(0.1)
        aborting.append(True)
        await server.abort_all()
        assert not any(task.done() for task in running)
        release.set()
        await asyncio.gather(*running)

    script.run(body)
    assert script.calls[0] == ("/abort_request", {"abort_all": True})


def test_one_request_is_aborted_by_the_id_it_was_sent_under() -> None:
    script = Script(abort_request="")

    async def body(server: SglangServer) -> None:
        running = asyncio.create_task(server.generate(REQUEST))
        await asyncio.sleep(0)
        await server.abort("r7")
        await running
        await server.abort("r7")

    script.run(body)
    assert [path for path, _ in script.calls].count("/abort_request") == 1
    assert script.sent("/abort_request") == {"rid": script.sent("/generate")["rid"]}


def test_importing_it_does_not_load_torch() -> None:
    """The process that only generates has no use for it."""
    code = "import sys, megatron_klear.rollout.sglang; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"
