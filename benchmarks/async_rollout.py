"""Step time of sync, one step off and fully asynchronous rollouts, beside max(rollout, train) and their sum.

    python benchmarks/async_rollout.py [--servers 2] [--steps 12]

Fake servers of known speed (a fixed time per token, tokens decided by the request alone) behind the real rollout
process, and a trainer that only sleeps: what remains is the bridge. Each step takes 8 groups of 4 samples of ragged
length, trains for as long as such a rollout takes, and tells the fleet of new weights. Rollout and training alone are
measured first, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from helpers.fake_servers import fake_servers
from megatron_klear.config.recipe import RewardConfig, SelectionConfig
from megatron_klear.config.servers import ServersConfig
from megatron_klear.data import arithmetic
from megatron_klear.data.prompts import ItemStream
from megatron_klear.protocols import EngineServer
from megatron_klear.report.console import format_table
from megatron_klear.rollout.connect import connect
from megatron_klear.rollout.jobs import ProcessSettings
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.local_server import server_specs
from megatron_klear.rollout.process import RolloutProcess
from megatron_klear.rollout.sampler import SamplingPlan
from megatron_klear.rollout.stream import GroupStream, Mailbox, StreamSettings
from megatron_klear.types import PauseMode, Prompt, ServerAddress
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync
from megatron_klear.weight_sync.tensor import TensorTransport

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 4, 64
PROMPTS = [Prompt(f"p{i}", (1 + i % 50, 2, 3)) for i in range(997)]
PLAN = SamplingPlan(GROUP_SIZE, NEW_TOKENS, 1.0, (0,), seed=1, step=0)
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Bench:
    """The rollout process over fake servers, and pushes of one small tensor to them."""

    mailbox: Mailbox
    sync: RemoteSync
    versions: Iterator[int]

    def step_seconds(self, steps_ahead: int, train_s: float, num_steps: int) -> float:
        """Median time of a step: take a rollout, train, push."""
        settings = StreamSettings(GROUPS, GROUPS, steps_ahead)
        stream = GroupStream(self.mailbox, PROMPTS, ItemStream(len(PROMPTS), seed=steps_ahead), settings, PLAN)
        version, seconds = self._push(), []
        for _ in range(WARMUP + num_steps):
            started = time.perf_counter()
            rollout = stream.take(version)
            assert len(rollout.groups) == GROUPS, dict(rollout.dropped)
            time.sleep(train_s)
            version = self._push()
            seconds.append(time.perf_counter() - started)
        ahead = [stream.mailbox.next_group() for _ in range(stream.num_ahead)]
        assert len(ahead) == steps_ahead * GROUPS
        return statistics.median(seconds[WARMUP:])

    def _push(self) -> int:
        version = next(self.versions)
        self.sync.push([("model.norm.weight", torch.full((8,), float(version)))], version)
        return version


@contextlib.contextmanager
def open_bench(urls: Sequence[str], pause_mode: PauseMode) -> Iterator[Bench]:
    """Everything between a trainer and these servers."""
    config = ServersConfig(urls=tuple(urls), transport="tensor", pause_mode=pause_mode)
    labels, limits = VersionLabels("benchmark"), ModelLimits(64, 512)

    def open_connection(address: ServerAddress) -> EngineServer:
        return connect(address, labels, timeout_s=60.0, max_connections=4, limits=limits)

    with tempfile.TemporaryDirectory() as folder:
        arithmetic.main(["--out", folder, "--num-sft", "1", "--num-rl", "1", "--num-eval", "1"])
        settings = ProcessSettings(
            server_specs("sglang", config, ""),
            config,
            limits,
            labels.tag,
            f"{folder}/logs",
            f"{folder}/model",
            NEW_TOKENS,
            SelectionConfig(drop_zero_std_groups=False),
            RewardConfig(type="arithmetic"),
        )
        with RolloutProcess(settings) as process:
            transport = TensorTransport(bucket_bytes=1 << 20)
            setup = PushSetup(process, open_connection, transport, pause_mode, timeout_s=60.0, max_probe_diff=1.0)
            with RemoteSync(setup) as sync:
                yield Bench(Mailbox(process, stall_timeout_s=120.0), sync, itertools.count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each way")
    parser.add_argument("--token-seconds", type=float, default=0.02)
    parser.add_argument("--pause-mode", default="in_place", choices=("abort", "retract", "in_place", "wait"))
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(fake_servers(args.servers, token_seconds=args.token_seconds))
        bench = stack.enter_context(open_bench([server.url for server in servers], args.pause_mode))
        print_table(bench, args)


def print_table(bench: Bench, args: argparse.Namespace) -> None:
    """Each way beside the limit and the sum."""
    rollout_s = bench.step_seconds(0, 0.0, args.steps)
    # Where both take as long, waiting costs most.
    train_s = rollout_s
    limit, total = max(rollout_s, train_s), rollout_s + train_s
    print(f"rollout alone {rollout_s:.3f} s, training alone {train_s:.3f} s, pushes inside; {args.pause_mode}")
    rows = []
    for steps_ahead in (0, 1, 2):
        seconds = bench.step_seconds(steps_ahead, train_s, args.steps)
        rows.append(
            {
                "max_async_steps": steps_ahead,
                "step s": f"{seconds:.3f}",
                "of max(rollout, train)": f"{seconds / limit:.2f}",
                "of the sum": f"{seconds / total:.2f}",
            }
        )
    print(format_table(rows))


if __name__ == "__main__":
    main()
