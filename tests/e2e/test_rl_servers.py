"""RL runs whose responses come from servers: fake ones that really generate with the weights that were pushed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.runs import Bench
from helpers.fake_servers import FakeServer, fake_servers
from megatron_klear.report.samples import read_samples

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
KEEP = {"selection.drop_zero_std_groups": False}


@pytest.fixture(scope="module")
def servers(sft: Bench) -> Iterator[list[FakeServer]]:
    with fake_servers(2, model=sft.folder / "sft" / "hf") as started:
        yield started


def recipe(bench: Bench, servers: list[FakeServer], name: str, changes: dict[str, Any]) -> Path:
    urls = [server.url for server in servers]
    return bench.recipe("rl", name, {"rollout.engine": "sglang", "servers.urls": urls} | KEEP | changes)


@pytest.mark.parametrize("transport", ["disk", "tensor", "broadcast"])
def test_a_run_on_servers_agrees_with_the_trainer(sft: Bench, servers: list[FakeServer], transport: str) -> None:
    name = f"servers_{transport}"
    # As a run leaves it that dies in a push.
    servers[0].post("/pause_generation", mode="abort")
    done = sft.succeed("rl", recipe(sft, servers, name, {"servers.transport": transport}))
    lines = sft.metrics(name)
    assert [line[DIFFERENCE] < 1e-5 for line in lines] == [True] * 3
    assert [line["rollout/num_samples"] for line in lines] == [16] * 3
    assert [line["rollout/staleness_max"] for line in lines] == [0] * 3
    assert [line["rollout/num_engines_serving"] for line in lines] == [2] * 3
    # Two updates a step: every step's samples are of the weights that it began with.
    for step, sample in read_samples(sft.folder / name):
        assert {piece.weight_version for piece in sample.pieces} == {2 * (step - 1)}
        assert {piece.engine for piece in sample.pieces} <= {"sglang-0", "sglang-1"}
    pushes = re.findall(r"weights (\d+): [\d.]+ MB in [\d.]+ s \([\d.]+ MB/s\)", done.out + done.err)
    assert pushes == ["0", "2", "4", "6"]


def test_every_layout_pushes_the_same_weights(sft: Bench, servers: list[FakeServer]) -> None:
    layout = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}
    for transport in ("tensor", "broadcast"):
        name = f"servers_layout_{transport}"
        sft.succeed("rl", recipe(sft, servers, name, layout | {"servers.transport": transport}), world_size=4)
        assert all(line[DIFFERENCE] < 1e-5 for line in sft.metrics(name))


def test_a_step_ahead_trains_on_weights_of_the_step_before(sft: Bench, servers: list[FakeServer]) -> None:
    done = sft.succeed("rl", recipe(sft, servers, "servers_ahead", {"rollout.max_async_steps": 1}))
    lines = sft.metrics("servers_ahead")
    assert [line["rollout/num_groups_ahead"] for line in lines] == [4] * 3
    assert all(line["rollout/staleness_max"] <= 2 for line in lines) and lines[-1]["rollout/staleness_max"] == 2
    assert done.code == 0


def test_evaluations_and_a_restart_with_prompts_under_way(sft: Bench, servers: list[FakeServer]) -> None:
    held_out = str(sft.folder / "data" / "eval.jsonl")
    changes = {
        "rollout.max_async_steps": 1,
        "eval.prompt_data": held_out,
        "eval.max_response_len": 8,
        "checkpoint.save_interval": 1,
        "rollout.num_rollout": 2,
    }
    sft.succeed("rl", recipe(sft, servers, "servers_resumed", changes))
    more = changes | {"rollout.num_rollout": 3, "checkpoint.resume": True}
    sft.succeed("rl", recipe(sft, servers, "servers_resumed", more))
    lines = sft.metrics("servers_resumed")
    trained = [line["step"] for line in lines if "train/loss" in line]
    assert trained == [1, 2, 3] and all("eval/accuracy" in line for line in lines if line["step"] == 0)


def test_a_push_that_was_skipped_is_found_and_the_run_goes_on_with_the_others(
    sft: Bench, servers: list[FakeServer]
) -> None:
    servers[1].faults(skip_push=True)
    try:
        tight = {"servers.max_probe_logprob_abs_diff": 1e-4, "servers.transport": "tensor"}
        done = sft.succeed("rl", recipe(sft, servers, "servers_skipped", tight))
    finally:
        servers[1].faults(skip_push=False)
    assert re.search(r"sglang-1 is taken out: .*(probe|checksum)", done.out + done.err)
    assert all(line["rollout/num_engines_serving"] == 1 for line in sft.metrics("servers_skipped"))


def test_servers_that_share_gpus_sleep_while_the_trainer_trains(sft: Bench, servers: list[FakeServer]) -> None:
    before = len(servers[0].calls())
    sft.succeed("rl", recipe(sft, servers, "servers_colocated", {"servers.colocate": True, "rollout.num_rollout": 2}))
    calls = [path.removeprefix("/") for path in servers[0].calls()[before:]]
    sleeping = "release_memory_occupation", "resume_memory_occupation"
    wanted = ["update_weights_from_disk", *(("generate", *sleeping, "update_weights_from_disk") * 2)]
    seen = [name for name in calls if name in wanted]
    # Of the many generations between two others one is enough; those of probes and readiness stand there too.
    assert [name for i, name in enumerate(seen) if i == 0 or name != seen[i - 1]] == ["generate", *wanted, "generate"]
    for begin in (i for i, name in enumerate(calls) if name == sleeping[0]):
        assert calls[begin - 2 : begin] == ["pause_generation", "flush_cache"]
        assert calls[begin + 1] == sleeping[1] or calls[begin + 1] in ("server_info", "openapi.json", "model_info")


def test_without_a_server_the_error_names_it(sft: Bench) -> None:
    changes = {"rollout.engine": "sglang", "servers.urls": ["http://127.0.0.1:9"], "servers.start_timeout_s": 2.0}
    done = sft.run("rl", sft.recipe("rl", "servers_none", changes))
    assert done.code == 2 and re.search(r"sglang-0.*127\.0\.0\.1:9", done.err)
