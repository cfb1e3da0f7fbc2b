"""The fake server with a true model: against the embedded engine and transformers, by every way that weights come."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from helpers.fake_servers import FakeServer, Reply, fake_servers, free_port
from helpers.tiny_qwen3 import hf_config, hf_model, random_tensors, tiny_shape
from megatron_klear.parallel.engine_member import EngineMember
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.types import GenerationRequest

SHAPE = tiny_shape(tied=True)
ROUND = 8
PROMPTS = [(1, 2, 3), (7,), (4, 4, 9, 11, 30), (60, 0)]


def weights(seed: int) -> dict[str, Tensor]:
    return random_tensors(SHAPE, seed)


def write(folder: Path, seed: int) -> str:
    folder.mkdir(exist_ok=True)
    save_file(weights(seed), folder / "model.safetensors")
    hf_config(SHAPE).save_pretrained(folder)
    return str(folder)


def embedded(seed: int, requests: list[GenerationRequest]) -> list[tuple[list[int], list[float]]]:
    engine = EmbeddedEngine(SHAPE)
    engine.load_weights(weights(seed).items(), 0)
    return [(list(done.token_ids), list(done.logprobs)) for done in engine.generate(requests)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    model = write(tmp_path_factory.mktemp("model"), 1)
    with fake_servers(1, model=model, round_tokens=ROUND, token_seconds=0.05, weight_version="run.1") as servers:
        yield servers[0]


@pytest.fixture
def fresh(server: FakeServer, tmp_path: Path) -> FakeServer:
    """With the weights of seed 1 again."""
    body: dict[str, Any] = {"model_path": write(tmp_path / "fresh", 1), "weight_version": "run.1"}
    assert server.post("/update_weights_from_disk", **body).status == 200
    return server


def greedy(server: FakeServer, prompt: tuple[int, ...], num: int = 20, **more: Any) -> Reply:
    return server.generate(list(prompt), num, temperature=0, **more)


def assert_holds(server: FakeServer, seed: int) -> None:
    """The server draws as the embedded engine does with the weights of `seed`."""
    request = GenerationRequest("r", PROMPTS[0], ROUND, temperature=0.0)
    ((tokens, logprobs),) = embedded(seed, [request])
    reply = greedy(server, PROMPTS[0], ROUND)
    assert reply.body["output_ids"] == tokens
    drawn = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
    torch.testing.assert_close(torch.tensor(drawn), torch.tensor(logprobs), rtol=0, atol=1e-5)


def test_greedy_tokens_and_logprobs_are_the_embedded_engines(fresh: FakeServer) -> None:
    """Four requests together, of several rounds each."""
    requests = [GenerationRequest(f"r{i}", prompt, 20, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda prompt: greedy(fresh, prompt), PROMPTS))
    for reply, (tokens, logprobs) in zip(replies, embedded(1, requests), strict=True):
        assert reply.body["output_ids"] == tokens
        drawn = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
        torch.testing.assert_close(torch.tensor(drawn), torch.tensor(logprobs), rtol=0, atol=1e-4)


def test_sampled_tokens_are_the_embedded_engines_by_seed(fresh: FakeServer) -> None:
    requests = [GenerationRequest(f"r{i}", PROMPTS[0], ROUND, temperature=0.7, seed=i) for i in range(6)]
    for i, (tokens, logprobs) in enumerate(embedded(1, requests)):
        reply = fresh.generate(list(PROMPTS[0]), ROUND, temperature=0.7, sampling_seed=i)
        assert reply.body["output_ids"] == tokens
        drawn = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
        torch.testing.assert_close(torch.tensor(drawn), torch.tensor(logprobs), rtol=0, atol=1e-4)


def test_scores_and_logprobs_of_all_rounds_are_those_of_transformers(fresh: FakeServer) -> None:
    temperature = 0.6
    reply = fresh.generate([1, 2, 3, 5, 8], 20, temperature=temperature, sampling_seed=3, logprob_start_len=0).body
    with torch.no_grad():
        logits = hf_model(SHAPE, weights(1))(torch.tensor([[1, 2, 3, 5, 8, *reply["output_ids"]]])).logits[0]
    prompt_rows, rows = reply["meta_info"]["input_token_logprobs"], reply["meta_info"]["output_token_logprobs"]
    expected = logits[:4].log_softmax(-1).gather(1, torch.tensor([[2], [3], [5], [8]]))[:, 0]
    torch.testing.assert_close(torch.tensor([row[0] for row in prompt_rows[1:]]), expected, rtol=0, atol=1e-4)
    ids = torch.tensor(reply["output_ids"])[:, None]
    expected = (logits[4:-1] / temperature).log_softmax(-1).gather(1, ids)[:, 0]
    torch.testing.assert_close(torch.tensor([row[0] for row in rows]), expected, rtol=0, atol=1e-4)


def test_a_stop_token_ends_it(fresh: FakeServer) -> None:
    tokens = greedy(fresh, PROMPTS[0]).body["output_ids"]
    stop = tokens[-1]
    reply = greedy(fresh, PROMPTS[0], 30, stop_token_ids=[stop]).body
    assert reply["output_ids"] == tokens[: tokens.index(stop) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_weights_from_disk(fresh: FakeServer, tmp_path: Path) -> None:
    assert_holds(fresh, 1)
    fresh.post("/update_weights_from_disk", model_path=write(tmp_path / "two", 2), weight_version="run.2")
    assert_holds(fresh, 2)
    save_file({"model.norm.weight": torch.ones(5)}, tmp_path / "two" / "model.safetensors")
    reply = fresh.post("/update_weights_from_disk", model_path=str(tmp_path / "two"), weight_version="run.3")
    assert reply.status == 400 and "model.norm.weight has shape (5,), expected (32,)" in reply.body["message"]
    assert fresh.get("/model_info").body["weight_version"] == "run.2"
    assert_holds(fresh, 2)


def test_weights_from_tensors_in_two_buckets(fresh: FakeServer) -> None:
    fresh.post("/begin_weight_update")
    named = list(weights(3).items())
    for part in (named[:5], named[5:]):
        metadata, at = [], 0
        for name, tensor in part:
            end = at + tensor.nbytes
            metadata.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=at, end_idx=end, numel=end - at
                )
            )
            at = end
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in part])
        content = base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()
        body = {"serialized_named_tensors": [content], "load_format": "flattened_bucket"}
        assert fresh.post("/update_weights_from_tensor", **body).status == 200
    fresh.post("/end_weight_update")
    assert_holds(fresh, 3)


def test_weights_from_a_broadcast(fresh: FakeServer) -> None:
    port, name = free_port(), "test"
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    specs = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in weights(4).items()}
    body = {
        "names": list(specs),
        "dtypes": [dtype for dtype, _ in specs.values()],
        "shapes": [shape for _, shape in specs.values()],
        "group_name": name,
        "weight_version": "run.4",
    }
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(fresh.post, "/init_weights_update_group", group_name=name, backend="gloo", **address)
        trainer = EngineMember(name, host="127.0.0.1", port=port, rank=0, world_size=2, backend="gloo", timeout_s=60.0)
        assert joined.result(60) == Reply(
            200, {"success": True, "message": "Succeeded to initialize custom process group."}
        )
        try:
            outside = fresh.post("/update_weights_from_distributed", **body)
            assert outside.status == 400 and "between begin_weight_update()" in outside.body["message"]
            fresh.post("/begin_weight_update")
            done = pool.submit(fresh.post, "/update_weights_from_distributed", **body)
            for tensor in weights(4).values():
                dist.broadcast(tensor, src=0, group=trainer.group)
            assert done.result(60).status == 200
            fresh.post("/end_weight_update")
            assert_holds(fresh, 4)
            assert fresh.get("/model_info").body["weight_version"] == "run.4"
        finally:
            left = fresh.post("/destroy_weights_update_group", group_name=name)
            trainer.leave()
    assert left.status == 200
    again = fresh.post("/destroy_weights_update_group", group_name=name)
    assert again == Reply(400, {"success": False, "message": "The group to be destroyed does not exist."})


def test_a_push_in_the_middle_shows_in_the_spans(fresh: FakeServer, tmp_path: Path) -> None:
    """Retracted requests go on with the new weights; each token's log-prob is that of the weights that drew it."""
    folder = write(tmp_path / "five", 5)
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(greedy, fresh, PROMPTS[0], 120)
        deadline = time.monotonic() + 20
        while not flight.done() and fresh.post("/flush_cache").status == 200:
            assert time.monotonic() < deadline
        fresh.post("/pause_generation", mode="retract")
        fresh.post("/update_weights_from_disk", model_path=folder, weight_version="run.5")
        fresh.post("/continue_generation")
        reply = flight.result(30).body
    spans, tokens = reply["meta_info"]["weight_versions"], reply["output_ids"]
    assert [span["version"] for span in spans] == ["run.1", "run.5"]
    assert spans[0]["end"] % ROUND == 0 and spans[1]["end"] == 120
    rows, ids = reply["meta_info"]["output_token_logprobs"], torch.tensor([[*PROMPTS[0], *tokens]])
    for span, seed in zip(spans, (1, 5), strict=True):
        with torch.no_grad():
            logits = hf_model(SHAPE, weights(seed))(ids).logits[0, 2:-1].log_softmax(-1)
        own = logits.gather(1, ids[0, 3:, None])[span["start"] : span["end"], 0]
        drawn = torch.tensor([row[0] for row in rows[span["start"] : span["end"]]])
        torch.testing.assert_close(drawn, own, rtol=0, atol=1e-4)


def test_an_abort_keeps_whole_rounds(fresh: FakeServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        flight = pool.submit(greedy, fresh, PROMPTS[0], 120)
        while not flight.done() and fresh.post("/flush_cache").status == 200:
            pass
        fresh.post("/abort_request", abort_all=True)
        reply = flight.result(30).body
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) % ROUND == 0 and len(reply["output_ids"]) < 120


def test_a_group_that_nobody_joins_is_named(fresh: FakeServer) -> None:
    fresh.post("/begin_weight_update")
    reply = fresh.post("/update_weights_from_distributed", names=[], dtypes=[], shapes=[], group_name="no")
    fresh.post("/end_weight_update")
    assert reply.status == 400 and "group no does not exist" in reply.body["message"]
