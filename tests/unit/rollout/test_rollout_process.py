from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.fake_servers import FakeServer, fake_servers
from helpers.rollout_processes import job, launched, push, receive, running, settings_of, weights_folder
from megatron_klear.config.recipe import RewardConfig
from megatron_klear.data.arithmetic import vocabulary, write_model_folder
from megatron_klear.errors import RewardError, RolloutError, WeightsWanted
from megatron_klear.rollout.fake.script import version_of
from megatron_klear.rollout.jobs import EngineStatus, Job, JobDone
from megatron_klear.rollout.process import RolloutProcess
from megatron_klear.rollout.scoring import make_scorer
from megatron_klear.types import Completion, GenerationRequest, Piece, Prompt, RolloutBatch


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "weights")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.05)


def engine(process: RolloutProcess, index: int = 0) -> EngineStatus:
    return process.status().engines[index]


def check_versions(done: JobDone) -> set[int]:
    """The servers' log-probs say which weights drew a token; the pieces must say the same. All versions."""
    for completion in done.completions:
        told = [piece.weight_version for piece in completion.pieces for _ in range(piece.num_tokens)]
        assert [version_of(logprob) for logprob in completion.logprobs] == told
    return {piece.weight_version for completion in done.completions for piece in completion.pieces}


@contextmanager
def one_server(folder: Path, **settings: Any) -> Iterator[tuple[FakeServer, RolloutProcess]]:
    with fake_servers(1, **settings) as servers, RolloutProcess(settings_of([running(servers[0])], folder)) as process:
        yield servers[0], process


def test_jobs_are_completed_by_running_servers(tmp_path: Path, weights: Path) -> None:
    with fake_servers(2) as servers, RolloutProcess(settings_of(list(map(running, servers)), tmp_path)) as process:
        process.submit([job("a", 4), job("b", 4)])
        with pytest.raises(WeightsWanted, match="push the weights, then ask again"):
            receive(process)
        assert push(process, 3, weights) == ["fake0", "fake1"]
        found = {done.job_id: done for done in (receive(process), receive(process))}
        assert sorted(found) == ["a", "b"]
        for name, done in found.items():
            assert [one.request_id for one in done.completions] == [f"{name}/{i}" for i in range(4)]
            assert all(len(one.token_ids) == 16 and one.stop_reason == "length" for one in done.completions)
            assert check_versions(done) == {3}
            assert done.group is None and not done.cancelled
        assert process.receive(0.05) is None
        status = process.status()
        assert (status.version, status.num_tokens, status.num_waiting) == (3, 128, 0)
        assert [one.state for one in status.engines] == ["serving", "serving"]
        assert servers[0].calls().count("/generate") > 2 and servers[1].calls().count("/generate") > 2
        with pytest.raises(RolloutError, match="job c is already running"):
            process.submit([job("c"), job("c")])
    assert not process.log_file.read_text().count("Traceback")


def test_a_push_goes_through_running_requests_and_each_token_keeps_its_version(tmp_path: Path, weights: Path) -> None:
    with one_server(tmp_path, token_seconds=0.01) as (_, process):
        push(process, 1, weights)
        process.submit([job("a", 3, tokens=150)])
        wait_for(lambda: engine(process).num_running == 3, "requests to run")
        time.sleep(0.1)
        push(process, 2, weights)
        done = receive(process)
        assert check_versions(done) == {1, 2}
        assert all(len(one.token_ids) == 150 for one in done.completions)
        assert process.status().num_continued == 3


def test_a_cancelled_job_comes_back_with_its_tokens_and_can_go_on(tmp_path: Path, weights: Path) -> None:
    with one_server(tmp_path, token_seconds=0.01) as (_, process):
        push(process, 1, weights)
        whole = job("a", 2, tokens=150)
        process.submit([whole])
        wait_for(lambda: engine(process).num_running == 2, "requests to run")
        time.sleep(0.1)
        process.cancel(["a", "unknown"])
        cut = receive(process)
        assert cut.cancelled and {one.stop_reason for one in cut.completions} == {"abort"}
        assert all(0 < len(one.token_ids) < 150 for one in cut.completions)
        push(process, 2, weights)
        process.submit([Job("a", whole.requests, started=cut.completions)])
        done = receive(process)
        assert not done.cancelled and check_versions(done) == {1, 2}
        for one, begun in zip(done.completions, cut.completions, strict=True):
            assert one.token_ids[: len(begun.token_ids)] == begun.token_ids and len(one.token_ids) == 150
        # A cancel that follows at once finds the job too.
        process.submit([job("b", 2, tokens=150)])
        process.cancel(["b"])
        assert receive(process).cancelled


def test_a_server_that_dies_in_a_request_is_restarted_and_stale_until_pushed(tmp_path: Path, weights: Path) -> None:
    specs = [launched("one", token_seconds=0.01), launched("two", token_seconds=0.01)]
    with RolloutProcess(settings_of(specs, tmp_path)) as process:
        assert push(process, 1, weights) == ["one", "two"]
        process.submit([job("a", 6, tokens=40)])
        wait_for(lambda: engine(process).num_running == 3, "requests to run")
        kill_server(process, specs[0].address.url)
        done = receive(process)
        assert check_versions(done) == {1}
        assert {piece.engine for one in done.completions for piece in one.pieces} == {"two"}
        wait_for(lambda: engine(process).state == "stale", "one to be stale")
        assert engine(process).num_restarts == 1 and engine(process).version is None
        assert "one ended with exit code 137; the end of" in engine(process).last_failure
        process.submit([job("b", 4)])
        assert {piece.engine for one in receive(process).completions for piece in one.pieces} == {"two"}
        push(process, 2, weights)
        process.submit([job("c", 4)])
        done = receive(process)
        assert check_versions(done) == {2}
        assert {piece.engine for one in done.completions for piece in one.pieces} == {"one", "two"}
        children = psutil.Process(process.pid).children(recursive=True)
    psutil.wait_procs(children, timeout=20)
    assert not any(child.is_running() for child in children)
    assert (tmp_path / "logs" / "one.log").read_text().count("--- env") == 2


def kill_server(process: RolloutProcess, url: str) -> None:
    port = url.rsplit(":", 1)[1]
    words = ["-m", "megatron_klear.rollout.fake", "--port", port]
    found = [child for child in psutil.Process(process.pid).children(recursive=True) if child.cmdline()[1:5] == words]
    assert len(found) == 1, f"{len(found)} servers at {url}"
    found[0].kill()


def test_faults_of_a_server_cost_requests_nothing(tmp_path: Path, weights: Path) -> None:
    with (
        fake_servers(2, token_seconds=0.002) as servers,
        RolloutProcess(settings_of(list(map(running, servers)), tmp_path)) as process,
    ):
        push(process, 1, weights)
        for number, fault in enumerate(("status_500", "drop", "garbage"), start=1):
            servers[0].faults(**{fault: 1})
            process.submit([job(fault, 4)])
            assert check_versions(receive(process)) == {1}
            assert process.status().num_retried == number
        servers[1].faults(wrong_version=True)
        process.submit([job(f"k{i}", 4) for i in range(4)])
        for _ in range(4):
            done = receive(process)
            assert check_versions(done) == {1}
        assert process.status().num_discarded > 0 and engine(process, 1).state == "stale"


def test_a_running_server_that_is_replaced_is_stale(tmp_path: Path, weights: Path) -> None:
    with fake_servers(1) as servers, RolloutProcess(settings_of([running(servers[0])], tmp_path)) as process:
        push(process, 1, weights)
        servers[0].restart()
        process.submit([job("a")])
        done = receive(process, lambda: push(process, 1, weights))
        assert check_versions(done) == {1} and process.status().num_discarded > 0


def test_a_bad_request_is_an_error_of_its_job_alone(tmp_path: Path, weights: Path) -> None:
    with fake_servers(1) as servers, RolloutProcess(settings_of([running(servers[0])], tmp_path)) as process:
        push(process, 1, weights)
        bad = GenerationRequest("bad/0", (1, 5000), 4)
        process.submit([Job("bad", (*job("bad").requests[1:], bad)), job("good")])
        with pytest.raises(RolloutError, match=r"request bad/0.* holds token id 5000, expected ids from 0 to 1023"):
            for _ in range(2):
                receive(process)
        process.submit([job("more")])
        assert check_versions(receive(process)) == {1}


def test_no_server_left_is_told_by_name(tmp_path: Path, weights: Path) -> None:
    specs = [launched("one")]
    settings = settings_of(specs, tmp_path)
    config = settings.config.model_copy(update={"max_restarts": 0})
    with RolloutProcess(settings_of(specs, tmp_path, config=config)) as process:
        push(process, 1, weights)
        kill_server(process, specs[0].address.url)
        process.submit([job("a")])
        with pytest.raises(RolloutError, match=r"(?s)no server is left.*one \(dead, 0 restarts\).*exit code 137"):
            receive(process)


def test_the_death_of_the_process_is_told_with_its_log(tmp_path: Path, weights: Path) -> None:
    with fake_servers(1) as servers, RolloutProcess(settings_of([running(servers[0])], tmp_path)) as process:
        push(process, 1, weights)
        process.submit([job("done")])
        wait_for(lambda: process.status().num_tokens == 32, "the job to be done")
        time.sleep(0.2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert receive(process).job_id == "done"
        for attempt in (lambda: process.receive(5), process.status, lambda: process.submit([job("b")])):
            with pytest.raises(RolloutError, match=r"(?s)ended with exit code -9.*rollout.log:\n.*push of version 1"):
                attempt()


def test_the_death_of_the_trainer_ends_process_and_servers(tmp_path: Path) -> None:
    """Also where a helper of the trainer's holds its pipes open."""
    code = f"""
import os, sys, time
from pathlib import Path
if __name__ == "__main__":
    from helpers.rollout_processes import launched, settings_of
    from megatron_klear.rollout.process import RolloutProcess
    process = RolloutProcess(settings_of([launched("one")], Path({str(tmp_path)!r})))
    helper = os.fork()
    if helper == 0:
        time.sleep(60)
        os._exit(0)
    process.begin_push(0)
    print(helper, flush=True)
    time.sleep(60)
"""
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join(str(root / name) for name in (".", "kernels", "tests"))
    script = tmp_path / "trainer.py"
    script.write_text(code)
    trainer = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )
    own: list[psutil.Process] = []
    try:
        assert trainer.stdout is not None
        helper = int(trainer.stdout.readline())
        own = [one for one in psutil.Process(trainer.pid).children(recursive=True) if one.pid != helper]
        # Python's own, which ends once nobody holds its pipe.
        own = [one for one in own if not any("resource_tracker" in word for word in one.cmdline())]
        assert any("megatron_klear.rollout.fake" in one.cmdline() for one in own)
        trainer.kill()
        _, alive = psutil.wait_procs(own, timeout=30)
        assert not alive
    finally:
        trainer.kill()
        trainer.wait(10)
        for one in own:
            if one.is_running():
                one.kill()
        os.kill(helper, signal.SIGKILL)


# Scoring

WORDS = len(vocabulary())


def reward(name: str) -> RewardConfig:
    return RewardConfig(type=f"helpers.rewards:{name}", format="none")


def with_reward(folder: Path, servers: list[FakeServer], config: RewardConfig) -> RolloutProcess:
    write_model_folder(folder)
    return RolloutProcess(settings_of(list(map(running, servers)), folder, reward=config))


def prompt_job(name: str, count: int = 4) -> Job:
    """Its responses end by a stop token: those that are cut off are wrong whatever they say."""
    requests = tuple(
        GenerationRequest(f"{name}/{i}", (5, 6, 7), 500, stop_token_ids=(1,), seed=i) for i in range(count)
    )
    return Job(name, requests, Prompt(name, (5, 6, 7), answer="7"))


def test_groups_are_scored_and_selected_in_the_process(tmp_path: Path, weights: Path) -> None:
    with (
        fake_servers(1, vocab_size=WORDS, mean_length=8) as servers,
        with_reward(tmp_path, servers, reward("checksum_reward")) as process,
    ):
        push(process, 2, weights)
        process.submit([prompt_job("a")])
        done = receive(process)
        assert done.group is not None and done.group.prompt.prompt_id == "a"
        for sample, completion in zip(done.group.samples, done.completions, strict=True):
            assert sample.sample_id == completion.request_id
            assert tuple(sample.response_ids) == completion.token_ids and sample.reward is not None
            assert sample.pieces == [Piece(len(completion.token_ids), 2, "fake0")]
        assert done.metrics["rollout/num_samples"].value == 4.0


def test_scoring_leaves_the_loop_alone_and_drops_groups_without_spread(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    scorer = make_scorer(settings_of([], tmp_path, reward=reward("slow_equal_reward")))
    completions = [Completion(f"a/{i}", (5 + i, 1), (-0.5, -0.5), "stop", (Piece(2, 3, "x"),)) for i in range(4)]

    async def test() -> tuple[RolloutBatch, int]:
        turns = 0
        judging = asyncio.create_task(scorer.judge(Prompt("a", (5, 6)), completions, 3))
        while not judging.done():
            await asyncio.sleep(0.01)
            turns += 1
        await scorer.close()
        return await judging, turns

    batch, turns = asyncio.run(asyncio.wait_for(test(), 60))
    assert batch.groups == () and dict(batch.dropped) == {"zero_std": 4}
    # Four times 0.05 s at least, in which the loop went on.
    assert turns >= 5


def test_a_reward_that_fails_ends_the_process_with_its_error(tmp_path: Path, weights: Path) -> None:
    with fake_servers(1, vocab_size=WORDS, mean_length=8) as servers:
        with with_reward(tmp_path, servers, reward("wrong_type")) as process:
            push(process, 2, weights)
            process.submit([prompt_job("a")])
            for _ in range(2):
                with pytest.raises(RewardError, match=r"helpers\.rewards:wrong_type"):
                    receive(process)
            with pytest.raises(RewardError, match=r"helpers\.rewards:wrong_type"):
                process.status()
        assert "Traceback" in process.log_file.read_text()


def test_a_prompt_needs_a_reward(tmp_path: Path) -> None:
    with fake_servers(1) as servers, RolloutProcess(settings_of([running(servers[0])], tmp_path)) as process:
        with pytest.raises(RolloutError, match="job a has a prompt to be scored, but the process was given no reward"):
            process.submit([prompt_job("a")])
        with pytest.raises(RolloutError, match="job b: 1 beginnings for 2 requests"):
            process.submit([Job("b", job("b").requests, started=(None,))])
