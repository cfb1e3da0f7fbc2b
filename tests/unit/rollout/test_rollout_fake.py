"""The fake server over its HTTP: each endpoint of the scripted brain, pauses and versions, each fault."""

from __future__ import annotations

import base64
import http.client
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.fake_servers import FakeServer, Reply, fake_servers
from megatron_klear.rollout.fake.script import UNNAMED, Script, logprob_of, number_of, version_of

NO_ANSWER = (OSError, http.client.HTTPException)
TOKEN_S = 0.005
LENGTH = 300


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    """One server for tests that leave it as they found it, but for its weights and their version."""
    with fake_servers(1, token_seconds=TOKEN_S, vocab_size=100, context_length=400, mean_length=8) as servers:
        yield servers[0]


@pytest.fixture
def server(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.post("/abort_request", abort_all=True)
    shared.post("/continue_generation")
    shared.post("/end_weight_update")
    quiet = shared.faults().body
    shared.faults(**{name: value.__class__() for name, value in quiet.items()})


@pytest.fixture
def own() -> Iterator[FakeServer]:
    """For tests after which it is not the same."""
    with fake_servers(1, token_seconds=TOKEN_S) as servers:
        yield servers[0]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as pool:
        yield pool


def folder(path: Path, value: float) -> str:
    path.mkdir(exist_ok=True)
    save_file({"a": torch.full((2, 3), value), "b": torch.full((4,), value).bfloat16()}, path / "model.safetensors")
    return str(path)


def bucket(**tensors: torch.Tensor) -> list[str]:
    """As SGLang wants flattened tensors, by value."""
    metadata, parts, at = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.contiguous().flatten().view(torch.uint8)
        entry = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "start_idx": at, "end_idx": at + len(part)}
        metadata.append(SimpleNamespace(**entry, numel=len(part)))
        parts.append(part)
        at += len(part)
    content = {"flattened_tensor": torch.cat(parts), "metadata": metadata}
    return [base64.b64encode(pickle.dumps(content)).decode()]


def versions(reply: Reply) -> list[int | None]:
    return [version_of(row[0]) for row in reply.body["meta_info"]["output_token_logprobs"]]


def checksums(server: FakeServer) -> dict[str, str]:
    return server.post("/weights_checker", action="checksum").body["ranks"][0]["checksums"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 10 s"
        time.sleep(0.005)


def in_flight(server: FakeServer, pool: ThreadPoolExecutor, num: int = 1, length: int = LENGTH) -> list[Future[Reply]]:
    """Requests that have drawn some tokens and have far to go."""
    futures = [pool.submit(server.generate, [5, i], length, rid=f"flight-{i}") for i in range(num)]
    time.sleep(30 * TOKEN_S)
    assert not any(future.done() for future in futures)
    return futures


# The script


@pytest.mark.parametrize("version", [-1, 0, 1, 4095, 10**6])
def test_a_logprob_holds_its_version_exactly_in_float32(version: int) -> None:
    logprob = logprob_of(version)
    assert version_of(float(torch.tensor(logprob, dtype=torch.float32))) == version


def test_other_logprobs_hold_no_version() -> None:
    assert version_of(UNNAMED) is None
    for logprob in (-0.3, 0.0, 1.0):
        with pytest.raises(ValueError, match="no log-prob of the scripted brain"):
            version_of(logprob)


def test_the_number_of_a_label_is_its_last_digits() -> None:
    assert [number_of(label) for label in ("default", "a1.07", "12", "")] == [-1, 7, 12, -1]


def test_a_cut_response_goes_on_from_its_tokens() -> None:
    script = Script(vocab_size=50, mean_length=20)
    for seed in range(20):
        whole = script.response([1, 2], seed, 60, (3,))
        cut = script.response([1, 2], seed, 5, (3,))
        assert cut == whole[:5]
        if len(whole) > 5:
            assert [*cut, *script.response([1, 2, *cut], seed, 55, (3,))] == whole
    assert len({tuple(script.response([1, 2], seed, 8)) for seed in range(20)}) == 20


def test_responses_end_after_the_mean_length_and_hold_the_stop_token_last() -> None:
    script = Script(vocab_size=50, mean_length=10)
    responses = [script.response([1], seed, 1000, (3, 4)) for seed in range(400)]
    assert 8.5 < sum(map(len, responses)) / 400 < 11.5
    assert all(r[-1] == 3 and not {3, 4} & set(r[:-1]) for r in responses)


# Generation


def test_tokens_are_the_scripts(server: FakeServer) -> None:
    script = Script(vocab_size=100, mean_length=8)
    for seed in (0, 7):
        reply = server.generate([1, 2, 3], 40, sampling_seed=seed, stop_token_ids=[9])
        expected = script.response([1, 2, 3], seed, 40, (9,))
        meta = reply.body["meta_info"]
        assert reply.body["output_ids"] == expected == [row[1] for row in meta["output_token_logprobs"]]
        assert all(row[2] is None for row in meta["output_token_logprobs"])
        assert meta["finish_reason"] == {"type": "stop", "matched": 9}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(expected))


def test_without_a_stop_token_the_limit_ends_it(server: FakeServer) -> None:
    for extra in ({}, {"stop_token_ids": [9], "ignore_eos": True}):
        meta = server.generate([1], 12, sampling_seed=1, **extra).body["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert meta["completion_tokens"] == 12


def test_without_a_seed_the_rid_is_one(server: FakeServer) -> None:
    first, again, other = (server.generate([1], 8, rid=rid).body["output_ids"] for rid in ("a", "a", "b"))
    assert first == again != other


def test_prompts_are_scored_from_logprob_start_len(own: FakeServer) -> None:
    for start, expected in ((0, [None, -1, -1]), (1, [None, -1]), (-1, [])):
        meta = own.generate([4, 5, 6], 0, logprob_start_len=start).body["meta_info"]
        rows = meta["input_token_logprobs"]
        assert [None if row[0] is None else version_of(row[0]) for row in rows] == expected
        assert [row[1] for row in rows] == [4, 5, 6][3 - len(expected) :]
        assert meta["completion_tokens"] == 0
    without = own.generate([4], 1, return_logprob=False).body["meta_info"]
    assert "output_token_logprobs" not in without


def test_requests_run_together(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    start = time.monotonic()
    replies = list(pool.map(lambda i: server.generate([i], 40), range(24)))
    assert [len(reply.body["output_ids"]) for reply in replies] == [40] * 24
    assert time.monotonic() - start < 12 * 40 * TOKEN_S


def test_wrong_requests_are_answered_by_400(server: FakeServer) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"input_ids": "x"},
        {"input_ids": []},
        {"input_ids": [1] * 390, "sampling_params": {}},
    ]
    for body in bodies:
        assert server.post("/generate", **body).status == 400
    reply = server.generate([1] * 390, 20)
    assert "maximum context length of 400 tokens. You requested a total of 410" in reply.body["error"]["message"]
    assert server.get("/no_such_path") == Reply(404, {"detail": "Not Found"})
    assert server.get("/get_weight_version").status == 404


def test_a_token_outside_the_vocabulary_is_the_end(own: FakeServer) -> None:
    with pytest.raises(NO_ANSWER):
        own.generate([1024])
    assert own.wait() == 1


def test_what_it_says_of_itself(own: FakeServer) -> None:
    assert own.get("/health").status == own.get("/health_generate").status == 200
    info = own.get("/model_info").body
    assert (info["weight_version"], info["model_path"]) == ("default", "scripted")
    assert own.get("/server_info").body["version"] == "0.5.23"
    assert own.calls() == ["/health"] * own.calls().index("/health_generate") + [
        "/health_generate",
        "/model_info",
        "/server_info",
    ]


def test_a_request_ends_with_its_client(own: FakeServer) -> None:
    with pytest.raises(OSError):
        own.generate([1], 4000, timeout_s=0.2)
    until(lambda: own.post("/flush_cache").status == 200)


# Aborts and pauses


def test_an_aborted_request_keeps_its_tokens(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    one, other = in_flight(server, pool, 2)
    server.post("/abort_request", rid="flight-0")
    cut = one.result(5).body
    num = len(cut["output_ids"])
    assert 0 < num < LENGTH and cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(cut["meta_info"]["output_token_logprobs"]) == cut["meta_info"]["completion_tokens"] == num
    server.post("/abort_request", rid="")
    time.sleep(5 * TOKEN_S)
    assert not other.done()
    server.post("/abort_request", abort_all=True)
    assert other.result(5).body["meta_info"]["finish_reason"]["type"] == "abort"


def test_pause_abort_ends_requests_and_holds_new_ones(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    flights = in_flight(server, pool, 3)
    assert server.post("/pause_generation").status == 200
    for flight in flights:
        assert flight.result(5).body["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/flush_cache").status == 200
    held = pool.submit(server.generate, [1], 2)
    time.sleep(20 * TOKEN_S)
    assert not held.done()
    server.post("/continue_generation")
    assert held.result(5).body["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_and_their_spans_tell(
    mode: str, server: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server.post("/update_weights_from_disk", model_path=folder(tmp_path / "w", 1), weight_version="run.3")
    flights = in_flight(server, pool, 2)
    server.post("/pause_generation", mode=mode)
    assert server.post("/flush_cache").status == (200 if mode == "retract" else 400)
    pushed = server.post(
        "/update_weights_from_disk", model_path=folder(tmp_path / "w", 2), weight_version="run.4", flush_cache=False
    )
    assert pushed.status == 200
    server.post("/continue_generation")
    for flight in flights:
        reply = flight.result(5)
        meta = reply.body["meta_info"]
        old, new = meta["weight_versions"]
        assert (old["version"], new["version"], meta["weight_version"]) == ("run.3", "run.4", "run.4")
        assert old["start"] == 0 < old["end"] == new["start"] < new["end"] == LENGTH
        assert versions(reply) == [3] * old["end"] + [4] * (LENGTH - old["end"])
        assert meta["num_retractions"] == (mode == "retract")
        assert meta["finish_reason"]["type"] == "length"


def test_an_aborted_request_is_stamped_as_it_ended(
    server: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Though the next weights come before its answer is written: many requests, and no time between."""
    path = folder(tmp_path, 1)
    for version in (21, 22, 23):
        server.post("/update_weights_from_disk", model_path=path, weight_version=f"run.{version}")
        flights = in_flight(server, pool, 20)
        server.post("/pause_generation")
        server.post("/update_weight_version", new_version="run.99")
        server.post("/continue_generation")
        for flight in flights:
            reply = flight.result(5)
            assert {span["version"] for span in reply.body["meta_info"]["weight_versions"]} == {f"run.{version}"}
            assert set(versions(reply)) == {version}


def test_in_place_a_push_that_flushes_fails_though_the_weights_came(
    server: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    (flight,) = in_flight(server, pool)
    server.post("/pause_generation", mode="in_place")
    before = server.get("/model_info").body["weight_version"]
    pushed = server.post("/update_weights_from_disk", model_path=folder(tmp_path, 9), weight_version="run.9")
    assert pushed.status == 400 and "Weights were updated, but the cache was not flushed" in pushed.body["message"]
    assert server.get("/model_info").body["weight_version"] == before
    server.post("/continue_generation")
    assert versions(flight.result(5))[-1] == 9


def test_a_new_name_aborts_unless_told_otherwise(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    (flight,) = in_flight(server, pool)
    server.post("/update_weight_version", new_version="x.1", abort_all_requests=False)
    time.sleep(5 * TOKEN_S)
    assert not flight.done()
    reply = server.post("/update_weight_version", new_version="x.2")
    assert reply.body["success"] and reply.body["new_version"] == "x.2"
    assert flight.result(5).body["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_unknown_pause_mode_is_refused(server: FakeServer) -> None:
    reply = server.post("/pause_generation", mode="wait")
    assert reply.status == 400 and "abort, retract, in_place, got 'wait'" in reply.body["error"]["message"]


# Weights


def test_weights_from_disk(own: FakeServer, tmp_path: Path) -> None:
    assert checksums(own) == {}
    reply = own.post("/update_weights_from_disk", model_path=folder(tmp_path / "a", 1), weight_version="run.0")
    assert reply.status == 200 and reply.body["success"] and reply.body["num_paused_requests"] == 0
    first = checksums(own)
    assert sorted(first) == ["a", "b"]
    info = own.get("/model_info").body
    assert (info["weight_version"], info["model_path"]) == ("run.0", str(tmp_path / "a"))
    assert versions(own.generate([1], 3)) == [0] * 3
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    for bad in ("nowhere", "torn"):
        reply = own.post("/update_weights_from_disk", model_path=str(tmp_path / bad), weight_version="run.1")
        assert reply.status == 400 and reply.body["success"] is False and bad in reply.body["message"]
        assert checksums(own) == first and own.get("/model_info").body == info
    own.post("/update_weights_from_disk", model_path=folder(tmp_path / "a", 2), weight_version="run.1")
    assert all(first[name] != checksum for name, checksum in checksums(own).items())


def test_weights_without_a_pause_wait_for_running_requests(
    server: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    (flight,) = in_flight(server, pool, 1, 100)
    server.post("/update_weights_from_disk", model_path=folder(tmp_path, 1), weight_version="run.50")
    drawn = versions(flight.result(5))
    assert len(drawn) == 100 and 50 not in drawn
    assert versions(server.generate([1], 1)) == [50]


def test_tensors_only_between_begin_and_end(own: FakeServer, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4).bfloat16()}
    body = {"serialized_named_tensors": bucket(**tensors), "load_format": "flattened_bucket"}
    reply = own.post("/update_weights_from_tensor", **body)
    assert reply.status == 400 and "between begin_weight_update() and end" in reply.body["message"]
    assert own.post("/end_weight_update").status == 400
    assert own.post("/begin_weight_update").status == 200
    assert own.post("/begin_weight_update").status == 400
    assert own.post("/update_weights_from_tensor", **body).body == {
        "success": True,
        "message": "Succeeded to update model weights.",
    }
    assert versions(own.generate([1], 2)) == [None] * 2
    assert own.post("/end_weight_update").status == 200
    own.post("/update_weight_version", new_version="run.6")
    assert versions(own.generate([1], 2)) == [6] * 2
    save_file(tensors, tmp_path / "same.safetensors")
    by_bucket = checksums(own)
    own.post("/update_weights_from_disk", model_path=str(tmp_path))
    assert checksums(own) == by_bucket


def test_older_releases_have_no_brackets() -> None:
    with fake_servers(1, no_brackets=True, release="0.4.0") as (server,):
        assert server.post("/begin_weight_update").status == 404
        reply = server.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=bucket(a=torch.ones(3)),
            load_format="flattened_bucket",
            weight_version="run.1",
        )
        assert reply.status == 200 and list(checksums(server)) == ["a"]
        assert versions(server.generate([1], 1)) == [1]


def test_a_shared_memory_handle_is_the_end(own: FakeServer) -> None:
    own.post("/begin_weight_update")
    # What torch.multiprocessing sends in place of a tensor names its own function.
    handle = base64.b64encode(b"ctorch.multiprocessing.reductions\nrebuild_tensor\n.").decode()
    with pytest.raises(NO_ANSWER):
        own.post("/update_weights_from_tensor", serialized_named_tensors=[handle])
    assert own.wait() == 1 and "rebuild_tensor is not allowed" in own.log()


def test_released_memory_holds_no_weights(own: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    own.post("/update_weights_from_disk", model_path=folder(tmp_path, 1), weight_version="run.1")
    assert own.post("/release_memory_occupation", tags=["kv_cache"]).status == 200
    own.post("/resume_memory_occupation", tags=["kv_cache"])
    assert versions(own.generate([1], 1)) == [1]
    own.post("/release_memory_occupation")
    own.post("/resume_memory_occupation")
    own.post("/update_weight_version", new_version="run.2")
    assert versions(own.generate([1], 1)) == [None] and checksums(own) == {}
    own.post("/release_memory_occupation")
    with pytest.raises(NO_ANSWER):
        own.generate([1], 1)
    assert own.wait() == 1 and "memory was released" in own.log()


def test_the_prefix_cache_keeps_what_filled_it_until_it_is_flushed(own: FakeServer, tmp_path: Path) -> None:
    def score() -> tuple[int, int | None]:
        meta = own.generate([7, 8, 9], 0, logprob_start_len=0).body["meta_info"]
        return meta["cached_tokens"], version_of(meta["input_token_logprobs"][1][0])

    def push(version: int) -> None:
        path = folder(tmp_path, version)
        own.post("/update_weights_from_disk", model_path=path, weight_version=f"r.{version}", flush_cache=False)

    push(1)
    assert score() == (0, 1)
    push(2)
    assert score() == (2, 1)
    own.post("/flush_cache")
    assert score() == (0, 2)
    own.faults(stale_cache=True)
    push(3)
    assert own.post("/flush_cache").status == 200
    assert score() == (2, 2)


# Faults


def test_counted_faults_befall_the_next_requests(server: FakeServer) -> None:
    server.faults(status_500=2, garbage=3, drop=4)
    assert [server.generate([1], 1).status for _ in range(2)] == [500, 500]
    with pytest.raises(NO_ANSWER):
        server.generate([1], 1)
    server.faults(drop=0, garbage=1)
    reply = server.generate([1], 1)
    assert reply.status == 200 and isinstance(reply.body, str) and reply.body.startswith('{"text"')
    assert server.generate([1], 1).body["output_ids"]


def test_slow(server: FakeServer) -> None:
    server.faults(slow_s=0.3)
    start = time.monotonic()
    assert server.generate([1], 1).status == 200
    assert time.monotonic() - start > 0.3


def test_hang_leaves_health_as_it_was(server: FakeServer) -> None:
    server.faults(hang=1)
    with pytest.raises(OSError):
        server.generate([1], 1, timeout_s=0.3)
    assert server.get("/health").status == 200
    assert server.generate([1], 1).status == 200


def test_wrong_version_is_of_another_run_but_the_weights_are_right(server: FakeServer, tmp_path: Path) -> None:
    server.post("/update_weights_from_disk", model_path=folder(tmp_path, 1), weight_version="run.8")
    server.faults(wrong_version=True)
    reply = server.generate([1], 2)
    assert reply.body["meta_info"]["weight_version"] == "other-run.8"
    assert reply.body["meta_info"]["weight_versions"][0]["version"] == "other-run.8"
    assert server.get("/model_info").body["weight_version"] == "other-run.8"
    assert versions(reply) == [8, 8]


def test_a_skipped_push_shows_in_checksum_and_logprobs_alone(server: FakeServer, tmp_path: Path) -> None:
    server.post("/update_weights_from_disk", model_path=folder(tmp_path, 1), weight_version="run.1")
    before = checksums(server)
    server.faults(skip_push=True)
    reply = server.post("/update_weights_from_disk", model_path=folder(tmp_path, 2), weight_version="run.2")
    assert reply.status == 200 and reply.body["success"]
    assert server.get("/model_info").body["weight_version"] == "run.2"
    reply = server.generate([1], 1, logprob_start_len=0)
    assert reply.body["meta_info"]["weight_version"] == "run.2"
    assert versions(reply) == [1] and checksums(server) == before


def test_refused_and_hanging_pushes(server: FakeServer, tmp_path: Path) -> None:
    before = server.get("/model_info").body
    server.faults(refuse_push=True)
    body: dict[str, Any] = {"model_path": folder(tmp_path, 1), "weight_version": "run.77"}
    assert server.post("/update_weights_from_disk", **body).status == 400
    server.faults(refuse_push=False, hang_push=True)
    with pytest.raises(OSError):
        server.post("/update_weights_from_disk", timeout_s=0.3, **body)
    assert server.get("/model_info").body == before


@pytest.mark.parametrize("fault", [{"die_after": 2}, {"die": True}, {"die_in_push": True}])
def test_deaths(fault: dict[str, Any], own: FakeServer, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    (flight,) = in_flight(own, pool)
    own.faults(**fault)
    if "die_after" in fault:
        assert own.generate([1], 1).status == 200
        with pytest.raises(NO_ANSWER):
            own.generate([1], 50)
    if "die_in_push" in fault:
        with pytest.raises(NO_ANSWER):
            own.post("/update_weights_from_disk", model_path=folder(tmp_path, 1))
    assert own.wait() == 1
    with pytest.raises(NO_ANSWER):
        flight.result(5)
    own.restart()
    assert own.get("/model_info").body["weight_version"] == "default"
    assert versions(own.generate([1], 1)) == [-1]


def test_faults_that_do_not_exist_are_refused(server: FakeServer) -> None:
    for body, message in (
        ({"slwo": 1}, "unknown fault slwo; expected one of slow_s"),
        ({"drop": 1.5}, "fault drop must be of type int, got 1.5"),
        ({"drop": -1}, "fault drop must be 0 or more, got -1"),
        ({"die": 1}, "fault die must be of type bool, got 1"),
    ):
        reply = server.faults(**body)
        assert reply.status == 400 and message in reply.body["error"]["message"]


def test_faults_from_the_command_line_and_a_slow_start() -> None:
    start = time.monotonic()
    with fake_servers(1, faults={"status_500": 1}, startup_seconds=0.5) as (server,):
        assert time.monotonic() - start > 0.5
        assert [server.generate([1], 1).status for _ in range(2)] == [500, 200]


def test_servers_end_with_their_test() -> None:
    with pytest.raises(ZeroDivisionError), fake_servers(2) as servers:
        raise ZeroDivisionError
    assert all(server.process.poll() is not None for server in servers)


def test_a_server_ends_with_its_parent(own: FakeServer) -> None:
    assert own.process.stdin is not None
    own.process.stdin.close()
    assert own.wait() == 1 and "its parent ended" in own.log()


def test_the_scripted_server_loads_no_torch_until_tensors_come(own: FakeServer) -> None:
    def loads_torch() -> bool:
        return "libtorch" in Path(f"/proc/{own.process.pid}/maps").read_text()

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    own.generate([1], 1)
    assert not loads_torch()
    own.post("/begin_weight_update")
    own.post(
        "/update_weights_from_tensor", serialized_named_tensors=bucket(a=torch.ones(1)), load_format="flattened_bucket"
    )
    assert loads_torch()
