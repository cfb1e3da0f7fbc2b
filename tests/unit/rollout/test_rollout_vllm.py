"""The vLLM client against scripted answers, which vLLM 0.32.0 gave (shortened)."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeVar

import pytest

from megatron_klear.errors import EngineStale, EngineUnavailable, RequestRefused, RolloutError
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.vllm import VllmServer
from megatron_klear.types import Completion, GenerationRequest, GroupAddress, PauseMode, Piece, ServerAddress

Result = TypeVar("Result")
GENERATE = "/inference/v1/generate"
INFO = "/server_info?config_format=json"
REQUEST = GenerationRequest("r1", (5, 6, 7), 5, 0.7, (3, 9), 11)
LOGPROBS = [-0.17830254137516022, -0.3351432681083679, -1.7, -0.25, -4.558194637298584]
GENERATED = {
    "request_id": "generate-tokens-9f4eeb36e7ca69fa",
    "model": "models/w1",
    "created": 1796079827,
    "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
    "prompt_logprobs": None,
    "output_mode": "tokens",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 3,
            "token_ids": [42, 42, 41, 50, 3],
            "weight_versions": [{"version": "run.4", "start": 0, "end": 5}],
            "logprobs": {
                "content": [
                    {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                    for token, logprob in zip([42, 42, 41, 50, 3], LOGPROBS, strict=True)
                ]
            },
        }
    ],
}
SCORED = {
    "prompt_logprobs": [
        None,
        {"6": {"logprob": -2.520221710205078, "rank": 5, "decoded_token": None}},
        # The token itself, and the most likely one where it was asked for.
        {"7": {"logprob": -7.132885456085205, "rank": 43}, "42": {"logprob": -0.1, "rank": 1}},
    ],
    "choices": [{"index": 0, "finish_reason": "length", "token_ids": [42], "logprobs": None}],
}
SERVER_INFO = {
    "vllm_config": {
        "model_config": {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "enable_sleep_mode": True}
    },
    "vllm_env": {},
}
ANSWERS: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    INFO: SERVER_INFO,
    GENERATE: GENERATED,
    "/weight_info": {"weight_version": "run.4"},
    "/update_weight_version": {"success": True, "new_version": "run.4"},
    "/collective_rpc": {"results": [None]},
    "/reset_prefix_cache?reset_running_requests=true": {"success": True},
    "/pause?mode=abort": {"status": "paused"},
    "/pause?mode=wait": {"status": "paused"},
    "/pause?mode=keep": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/abort_requests": {"status": "aborted", "aborted": 1},
    "/sleep?level=1": {"status": "sleeping", "level": 1},
    "/wake_up": {"status": "awake", "tags": None},
}


@dataclass
class Script:
    """What the server answers by path, as JSON or as (status, JSON), and what it was asked."""

    answers: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(ANSWERS))
    asked: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    def talk(self, talk: Callable[[VllmServer], Awaitable[Result]]) -> Result:
        async def whole() -> Result:
            address = ServerAddress("vllm-0", self.url, "vllm")
            limits = ModelLimits(vocab_size=64, max_context=32)
            server = VllmServer(address, VersionLabels("run"), timeout_s=10, max_connections=8, limits=limits)
            try:
                return await asyncio.wait_for(talk(server), 20)
            finally:
                await server.close()

        return asyncio.run(whole())

    def generate(self, request: GenerationRequest = REQUEST) -> Completion:
        return self.talk(lambda server: server.generate(request))

    @property
    def choice(self) -> dict[str, Any]:
        return self.answers[GENERATE]["choices"][0]

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def handler_of(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            script.asked.append((self.path, json.loads(body) if body else None))
            found = script.answers.get(self.path, (404, {"detail": "Not Found"}))
            status, content = found if isinstance(found, tuple) else (200, found)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(script))
    script.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()


def test_a_completion_holds_tokens_logprobs_and_their_weights(script: Script) -> None:
    assert script.generate() == Completion("r1", (42, 42, 41, 50, 3), tuple(LOGPROBS), "stop", (Piece(5, 4, "vllm-0"),))


def test_the_request_names_all_that_would_change_the_distribution(script: Script) -> None:
    script.generate()
    assert script.asked[-1] == (
        GENERATE,
        {
            "token_ids": [5, 6, 7],
            "sampling_params": {
                "max_tokens": 5,
                "temperature": 0.7,
                "seed": 11,
                "stop_token_ids": [3, 9],
                "ignore_eos": True,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "detokenize": False,
                "logprobs": 0,
            },
        },
    )


def test_an_abort_may_leave_tokens_of_several_versions_or_none(script: Script) -> None:
    spans = [{"version": "run.3", "start": 0, "end": 2}, {"version": "run.4", "start": 2, "end": 5}]
    script.choice.update(finish_reason="abort", weight_versions=spans)
    answer = script.generate()
    assert answer.stop_reason == "abort" and answer.pieces == (Piece(2, 3, "vllm-0"), Piece(3, 4, "vllm-0"))
    script.choice.update(token_ids=[], weight_versions=[], logprobs={"content": []})
    assert script.generate() == Completion("r1", (), (), "abort", ())


@pytest.mark.parametrize("label", ["default", "other.4", "loading", "run.", "run.x"])
def test_tokens_of_weights_that_are_not_ours_are_stale(script: Script, label: str) -> None:
    script.choice["weight_versions"].insert(0, {"version": label, "start": 0, "end": 1})
    script.choice["weight_versions"][1]["start"] = 1
    with pytest.raises(
        EngineStale, match=rf"vllm-0 .*request r1 from weights labelled '{label}', expected a label run\.N"
    ):
        script.generate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [42, 42, 41, 50]}, "4 tokens, but log-probs of other ones"),
        ({"token_ids": [42, 41, 42, 50, 3]}, "5 tokens, but log-probs of other ones"),
        ({"weight_versions": [{"version": "run.4", "start": 0, "end": 4}]}, r"5 tokens, but weight versions .*\[4\]"),
        ({"weight_versions": [{"version": "run.4", "start": 1, "end": 5}]}, r"5 tokens, but weight versions .*\[5\]"),
        ({"weight_versions": []}, r"5 tokens, but weight versions that end at \[\]"),
        ({"weight_versions": None}, "choices.0.weight_versions is 'None'"),
        ({"finish_reason": "repetition"}, "choices.0.finish_reason is 'repetition': Input should be 'stop'"),
        ({"logprobs": None}, "choices.0.logprobs is 'None'"),
    ],
)
def test_an_answer_that_contradicts_itself_is_not_used(script: Script, change: dict[str, Any], message: str) -> None:
    script.choice.update(change)
    with pytest.raises(EngineUnavailable, match=rf"^vllm-0 \(http.*{message}"):
        script.generate()


@pytest.mark.parametrize("answer", [None, [], "text", {}, {"choices": []}, {"choices": [{}, {}]}])
def test_garbage_is_named(script: Script, answer: Any) -> None:
    script.answers[GENERATE] = answer
    with pytest.raises(EngineUnavailable, match=r"vllm-0 .*/inference/v1/generate: "):
        script.generate()


def test_a_logprob_that_is_not_a_number_is_named(script: Script) -> None:
    script.choice["logprobs"]["content"][2]["logprob"] = float("nan")
    with pytest.raises(EngineUnavailable, match=r"content\.2\.logprob is 'nan'"):
        script.generate()


def test_a_stop_that_was_not_asked_for_is_named(script: Script) -> None:
    request = GenerationRequest("r1", (5, 6, 7), 5, 0.7, (9,), 11)
    with pytest.raises(EngineUnavailable, match=r"request r1: stopped at \[3\], expected \(9,\)"):
        script.generate(request)


def test_a_context_shorter_than_the_request_is_named(script: Script) -> None:
    script.choice.update(finish_reason="length")
    request = GenerationRequest("r1", (5, 6, 7), 6, 0.7, (9,), 11)
    with pytest.raises(RequestRefused, match=r"ends request r1 after 5 of 6 tokens; use --max-model-len of at least 9"):
        script.generate(request)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest("r1", (5, 64), 5), "request r1 holds token id 64, expected ids from 0 to 63"),
        (GenerationRequest("r1", (5, 6), 31), "2 prompt tokens . 31 new tokens = 33"),
        (GenerationRequest("r1", (5, 6), 5, 0.005), "request r1: temperature 0.005 would be raised to 0.01"),
    ],
)
def test_what_the_server_cannot_take_is_never_sent(script: Script, request_: GenerationRequest, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        script.generate(request_)
    assert script.asked == []


def test_a_server_that_fails_and_one_that_refuses_are_told_apart(script: Script) -> None:
    script.answers[GENERATE] = 500, {"error": {"message": "EngineCore encountered an issue."}}
    with pytest.raises(EngineUnavailable, match=r"POST /inference/v1/generate: status 500: .*EngineCore"):
        script.generate()
    script.answers[GENERATE] = 403, {"error": {"message": "Restart vllm serve with --enable-scale-out"}}
    with pytest.raises(RequestRefused, match=r"status 403: .*Restart vllm serve with --enable-scale-out"):
        script.generate()


def test_facts_are_asked_once(script: Script) -> None:
    async def talk(server: VllmServer) -> None:
        await asyncio.gather(*(server.generate(REQUEST) for _ in range(6)))
        facts = await server.facts()
        assert facts.release == "0.32.0" and facts.sleeps and facts.stamps_tokens
        assert not facts.has_checksum and not facts.brackets_updates
        assert facts.transports == {"disk"} and facts.pause_modes == {"abort", "wait", "retract"}

    script.talk(talk)
    assert script.paths.count("/version") == script.paths.count(INFO) == 1


def test_logprobs_before_temperature_are_refused_before_anything_is_drawn(script: Script) -> None:
    script.answers[INFO]["vllm_config"]["model_config"].update(logprobs_mode="raw_logprobs", enable_sleep_mode=False)
    with pytest.raises(RequestRefused, match=r"logprobs_mode raw_logprobs; use .*--logprobs-mode processed_logprobs"):
        script.generate()
    assert GENERATE not in script.paths


def test_a_server_without_its_development_calls_is_refused(script: Script) -> None:
    script.answers[INFO] = 404, {"detail": "Not Found"}
    with pytest.raises(RequestRefused, match=r"status 404.*started with VLLM_SERVER_DEV_MODE=1"):
        script.generate()


def test_a_score_is_that_of_each_token_after_the_first(script: Script) -> None:
    script.answers[GENERATE] = SCORED
    assert script.talk(lambda server: server.score([5, 6, 7])) == [-2.520221710205078, -7.132885456085205]
    sent = script.asked[-1][1]["sampling_params"]
    assert (sent["prompt_logprobs"], sent["max_tokens"], "logprobs" in sent) == (0, 1, False)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((5, 6, 8), "log-probs of 1 of the 2 tokens to score"),
        ((5, 6), "3 rows of log-probs for a prompt of 2 tokens"),
        ((5, 6, 7, 8), "3 rows of log-probs for a prompt of 4 tokens"),
    ],
)
def test_a_score_of_other_tokens_is_named(script: Script, token_ids: tuple[int, ...], message: str) -> None:
    script.answers[GENERATE] = SCORED
    with pytest.raises(EngineUnavailable, match=rf"vllm-0 .*{message}"):
        script.talk(lambda server: server.score(token_ids))


@pytest.mark.parametrize(("label", "version"), [("run.4", 4), ("run.12", 12), ("default", None), ("other.4", None)])
def test_a_version_is_ours_or_none(script: Script, label: str, version: int | None) -> None:
    script.answers["/weight_info"] = {"weight_version": label}
    assert script.talk(lambda server: server.weight_version()) == version


def test_weights_are_nobodys_version_until_all_are_there(script: Script) -> None:
    script.talk(lambda server: server.update_from_disk("weights/v5", 5))
    load = {"method": "reload_weights", "kwargs": {"weights_path": "weights/v5"}}
    assert script.asked == [
        ("/update_weight_version", {"new_version": "loading"}),
        ("/collective_rpc", load),
        ("/update_weight_version", {"new_version": "run.5"}),
    ]
    script.asked.clear()
    script.answers["/collective_rpc"] = 500, {"error": {"message": "Worker failed"}}
    with pytest.raises(EngineUnavailable, match=r"/collective_rpc: status 500.*Worker failed"):
        script.talk(lambda server: server.update_from_disk("weights/v6", 6))
    assert script.asked[-1] == ("/collective_rpc", {**load, "kwargs": {"weights_path": "weights/v6"}})


@pytest.mark.parametrize(("mode", "word"), [("abort", "abort"), ("wait", "wait"), ("retract", "keep")])
def test_a_pause_is_asked_for_in_vllms_words(script: Script, mode: PauseMode, word: str) -> None:
    async def talk(server: VllmServer) -> None:
        await server.pause(mode)
        await server.flush_cache()
        await server.resume()

    script.talk(talk)
    assert script.paths == [f"/pause?mode={word}", "/reset_prefix_cache?reset_running_requests=true", "/resume"]


def test_a_cache_that_was_not_flushed_is_an_error(script: Script) -> None:
    script.answers["/reset_prefix_cache?reset_running_requests=true"] = {"success": False}
    with pytest.raises(EngineUnavailable, match=r"vllm-0 .*/reset_prefix_cache.*the server could not"):
        script.talk(lambda server: server.flush_cache())


def test_plain_calls_reach_their_routes(script: Script) -> None:
    async def talk(server: VllmServer) -> None:
        await server.abort_all()
        await server.begin_update()
        await server.set_version(7)
        await server.end_update()
        await server.sleep()
        await server.wake()

    script.talk(talk)
    assert script.paths == ["/abort_requests", "/update_weight_version", "/sleep?level=1", "/wake_up"]
    assert script.asked[1][1] == {"new_version": "run.7"}


GROUP = GroupAddress("g", "127.0.0.1", 29600, 2, 1, "gloo")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda server: server.pause("in_place"), "pause mode in_place; use abort or wait or retract"),
        (lambda server: server.update_from_tensors([]), "0 tensors; use transport disk"),
        (lambda server: server.join_group(GROUP), "process group g; use transport disk"),
        (lambda server: server.leave_group("g"), "process group g; use transport disk"),
        (lambda server: server.update_from_broadcast([], "g"), "0 tensors over g; use transport disk"),
        (lambda server: server.checksum(), "a checksum; use the probe of log-probs"),
    ],
)
def test_what_vllm_does_not_offer_is_refused(
    script: Script, call: Callable[[VllmServer], Awaitable[object]], message: str
) -> None:
    with pytest.raises(RequestRefused, match=rf"vllm-0 .*vLLM cannot serve training with {message}"):
        script.talk(call)
    assert script.asked == []


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(EngineUnavailable, match=r"vllm-0 \(http://127.0.0.1:9\): GET /version: ConnectError"):
        Script(url="http://127.0.0.1:9").generate()
