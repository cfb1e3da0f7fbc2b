"""Whole RL runs on real servers: three steps of the quickstart's model, by every way that weights travel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from helpers.fake_servers import free_port
from megatron_klear.data import arithmetic
from megatron_klear.report.record import read_metrics
from megatron_klear.report.samples import read_samples
from megatron_klear.types import ServerAddress
from servers.environments import environment, tools
from servers.sglang.process import make_weights, serve

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 900
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
# As tools/servers/sglang_cpu/serve.sh starts it.
SGLANG_ON_CPU: dict[str, Any] = {
    "launch_env": [f"PYTHONPATH={tools('sglang')}", "SGLANG_USE_CPU_ENGINE=1", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=2"],
    "launch_args": (
        "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch"
        " --grammar-backend none --disable-overlap-schedule --disable-cuda-graph --max-total-tokens 8192"
        " --max-running-requests 64 --context-length 512"
    ),
}
VLLM_ON_CPU: dict[str, Any] = {
    "launch_env": ("VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1"),
    "launch_args": "--dtype float32 --max-model-len 512 --max-num-seqs 64 --enforce-eager",
}


@dataclass(frozen=True)
class Line:
    """A folder with problems and a model's weights; runs of three steps from them."""

    folder: Path

    def start(self, name: str, changes: dict[str, Any]) -> subprocess.Popen[str]:
        """`megatron-klear rl`, its output to be read line by line."""
        raw: dict[str, Any] = {
            "run": {"output_dir": str(self.folder / name), "tensorboard": False},
            "model": {"hf_checkpoint": str(self.folder / "weights"), "params_dtype": "float32"},
            "data": {"prompt_data": str(self.folder / "data" / "rl.jsonl"), "max_prompt_len": 16},
            "rollout": {
                "num_rollout": 3,
                "rollout_batch_size": 8,
                "n_samples_per_prompt": 4,
                "rollout_max_response_len": 24,
            },
            "loss": {"type": "gppo"},
            "batch": {"global_batch_size": 32, "max_tokens_per_gpu": 2048},
            "optimizer": {"lr": 1.0e-3},
            "reward": {"type": "helpers.rewards:length_reward", "format": "none"},
            "selection": {"drop_zero_std_groups": False},
            "servers": {"max_probe_logprob_abs_diff": 1.0e-3},
        }
        for key, value in changes.items():
            section, setting = key.split(".")
            raw[section][setting] = value
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(raw))
        path = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests"))
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_klear", "rl", str(recipe)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        )

    def run(self, name: str, changes: dict[str, Any]) -> str:
        """To its end; what it printed."""
        process = self.start(name, changes)
        try:
            out, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            process.kill()
        assert process.returncode == 0, out[-4000:]
        return out

    def check(self, name: str, out: str, *, engine: str) -> None:
        """Log-probs are the trainer's, and every token is of the weights that its step began with."""
        lines = read_metrics(self.folder / name)
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(line[DIFFERENCE] < 1e-4 for line in lines), [line[DIFFERENCE] for line in lines]
        assert all(line["rollout/num_samples"] == 32 for line in lines)
        for step, sample in read_samples(self.folder / name):
            assert {piece.weight_version for piece in sample.pieces} == {step - 1}
            assert {piece.engine for piece in sample.pieces} == {engine}
        assert [int(version) for version in re.findall(r"^weights (\d+): ", out, re.MULTILINE)][-1] == 3


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    folder = tmp_path_factory.mktemp("line")
    arithmetic.main(["--out", str(folder / "data"), "--num-sft", "1", "--num-rl", "64", "--num-eval", "1"])
    make_weights(folder / "weights", seed=3)
    return Line(folder)


@pytest.fixture(scope="module")
def sglang(line: Line) -> Iterator[ServerAddress]:
    with serve(make_weights(line.folder / "other", seed=4), line.folder / "server.log") as (_, address):
        yield address


@pytest.mark.servers
@pytest.mark.parametrize("transport", ["disk", "tensor", "broadcast"])
def test_three_steps_on_a_running_sglang(line: Line, sglang: ServerAddress, transport: str) -> None:
    changes: dict[str, Any] = {
        "rollout.engine": "sglang",
        "servers.urls": sglang.url,
        "servers.transport": transport,
        "servers.pause_mode": "retract",
    }
    if transport == "broadcast":
        changes["servers.broadcast_port"] = free_port()
    line.check(transport, line.run(transport, changes), engine="sglang-0")


@pytest.mark.servers
def test_steps_ahead_with_requests_in_flight_at_every_push(line: Line, sglang: ServerAddress) -> None:
    """Responses span updates: each token says which weights drew it."""
    changes = {
        "rollout.engine": "sglang",
        "rollout.max_async_steps": 2,
        "rollout.num_rollout": 6,
        "rollout.rollout_max_response_len": 200,
        "servers.urls": sglang.url,
        "servers.transport": "tensor",
        "servers.pause_mode": "retract",
    }
    line.run("ahead", changes)
    lines = read_metrics(line.folder / "ahead")
    assert len(lines) == 6 and all(0 <= entry["rollout/staleness_max"] <= 2 for entry in lines)
    samples = list(read_samples(line.folder / "ahead"))
    assert all(sum(piece.num_tokens for piece in sample.pieces) == len(sample.tokens) for _, sample in samples)
    assert all(0 <= step - 1 - piece.weight_version <= 2 for step, sample in samples for piece in sample.pieces)


@pytest.mark.servers
def test_a_killed_sglang_is_started_again_and_gets_the_weights(line: Line) -> None:
    port = free_port()
    changes: dict[str, Any] = {
        "rollout.engine": "sglang",
        "servers.num_servers": 1,
        "servers.launch_port": port,
        "servers.launch_python": str(environment("sglang") / "bin" / "python"),
        "servers.transport": "disk",
        **{f"servers.{key}": value for key, value in SGLANG_ON_CPU.items()},
    }
    process = line.start("killed", changes)
    assert process.stdout is not None
    printed, deadline = [], time.monotonic() + RUN_TIMEOUT_S
    try:
        for text in process.stdout:
            printed.append(text)
            if text.startswith("step 1/3"):
                os.kill(listener(port), signal.SIGKILL)
            assert time.monotonic() < deadline
        assert process.wait(timeout=60) == 0, "".join(printed)[-4000:]
    finally:
        process.kill()
    line.check("killed", "".join(printed), engine="sglang-0")
    assert [entry["rollout/num_restarts"] for entry in read_metrics(line.folder / "killed")][-1] == 1


def listener(port: int) -> int:
    """Process that listens at a port."""
    found = [
        c.pid for c in psutil.net_connections("tcp") if tuple(c.laddr)[1:] == (port,) and c.status == psutil.CONN_LISTEN
    ]
    assert found and found[0] is not None
    return found[0]


@pytest.mark.servers
def test_three_steps_on_a_vllm_that_the_run_starts(line: Line) -> None:
    changes: dict[str, Any] = {
        "rollout.engine": "vllm",
        "servers.num_servers": 1,
        "servers.launch_port": free_port(),
        "servers.launch_python": str(environment("vllm") / "bin" / "python"),
        "servers.transport": "disk",
        **{f"servers.{key}": value for key, value in VLLM_ON_CPU.items()},
    }
    line.check("vllm", line.run("vllm", changes), engine="vllm-0")
