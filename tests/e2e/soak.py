"""Kill servers at random while a run samples on them, and see that no token is lost, doubled or of a wrong version.

    python tests/e2e/soak.py --steps 40 --kills 20

The rollout process starts fake servers. Each step pushes new weights while requests of the step before still run, and
servers are killed (SIGKILL) at random times, in a push too. In the end every request must have come back once, whole;
every token must be the one that its server's rule gives after those before it; its log-prob must encode the version
that its piece says; and every kill must have become a restart.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    # The script's own folder would make this file importable under two names.
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root)
    sys.path += [str(root / "kernels"), str(root / "tests")]

import psutil

from helpers.rollout_processes import job, launched, push, receive, settings_of, weights_folder
from megatron_klear.rollout.fake.script import Script, state_of, version_of
from megatron_klear.rollout.jobs import Job, JobDone, ServerSpec
from megatron_klear.rollout.process import RolloutProcess
from megatron_klear.types import Completion, GenerationRequest

TOKEN_SECONDS = 0.01
TOKENS = 40
JOBS_PER_STEP = 6
REQUESTS_PER_JOB = 4
NUM_SERVERS = 3
TIMEOUT_S = 60.0


@dataclass
class Report:
    """What a soak found. All faults must be empty and all restarts counted."""

    steps: int = 0
    killed: int = 0
    restarted: int = 0
    pushes: int = 0
    full_pushes: int = 0
    requests: int = 0
    tokens: int = 0
    retried: int = 0
    continued: int = 0
    discarded: int = 0
    lost: int = 0
    doubled: int = 0
    versions_in_a_response: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        several = sum(count for versions, count in self.versions_in_a_response.items() if versions > 1)
        return (
            f"steps {self.steps}  pushes {self.pushes}, to all servers {self.full_pushes}  {self.seconds:.0f} s\n"
            f"requests {self.requests}  tokens {self.tokens}  retried {self.retried}  continued {self.continued}"
            f"  discarded {self.discarded}  of several versions {several}\n"
            f"killed {self.killed}  restarted {self.restarted}  lost {self.lost}  doubled {self.doubled}"
            f"  faults {len(self.faults)}"
        )


class Killer:
    """Kills servers of a process by SIGKILL, each at its own random time of its step."""

    def __init__(self, process: RolloutProcess, specs: Sequence[ServerSpec], chance: random.Random) -> None:
        self.num_killed = 0
        self._process = process
        self._ports = [spec.address.url.rsplit(":", 1)[1] for spec in specs]
        self._chance = chance

    def during(self, num_kills: int) -> threading.Thread:
        """Kill so many while the caller goes on."""
        delays = [self._chance.uniform(0.0, 0.5) for _ in range(num_kills)]
        thread = threading.Thread(target=self._kill, args=(delays,))
        thread.start()
        return thread

    def _kill(self, delays: Sequence[float]) -> None:
        for delay in delays:
            time.sleep(delay)
            deadline = time.monotonic() + TIMEOUT_S
            while not self._kill_one():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no server to kill within {TIMEOUT_S:g} s")
                time.sleep(0.02)

    def _kill_one(self) -> bool:
        """False if none runs right now."""
        servers = []
        for child in psutil.Process(self._process.pid).children(recursive=True):
            try:
                # Behind its guardian, once `env` has become the server.
                words = child.cmdline()
                if words[1:4] == ["-m", "megatron_klear.rollout.fake", "--port"] and words[4] in self._ports:
                    servers.append(child)
            except psutil.NoSuchProcess:
                continue
        if not servers:
            return False
        self._chance.choice(servers).kill()
        self.num_killed += 1
        return True


def expected_tokens(request: GenerationRequest, completion: Completion) -> list[int]:
    """What the servers' rule gives: the seed changes where a request went on after a break, so at each piece."""
    script, tokens, state, seed = Script(), [], state_of(request.token_ids), request.seed
    for piece in completion.pieces:
        if tokens:
            seed = zlib.crc32(f"{request.seed}/{len(tokens)}".encode())
        for _ in range(piece.num_tokens):
            tokens.append(script.next_token(state, seed, request.stop_token_ids))
            state = state_of(tokens[-1:], state)
    return tokens


def examine(jobs: Sequence[Job], found: Sequence[JobDone], report: Report) -> None:
    """Compare what came with what was asked."""
    asked = {request.request_id: request for one in jobs for request in one.requests}
    came = Counter(completion.request_id for done in found for completion in done.completions)
    report.requests = len(asked)
    report.lost = sum(came[name] == 0 for name in asked)
    report.doubled = sum(count - 1 for count in came.values() if count > 1)
    report.faults += [f"{name} was never asked for" for name in came if name not in asked]
    for completion in (completion for done in found for completion in done.completions):
        request, name = asked[completion.request_id], completion.request_id
        report.tokens += len(completion.token_ids)
        versions = [piece.weight_version for piece in completion.pieces]
        report.versions_in_a_response[len(set(versions))] += 1
        told = [piece.weight_version for piece in completion.pieces for _ in range(piece.num_tokens)]
        drawn = [version_of(logprob) for logprob in completion.logprobs]
        if drawn != told:
            report.faults.append(f"{name}: drawn by versions {drawn}, but the pieces say {completion.pieces}")
        if versions != sorted(versions):
            report.faults.append(f"{name}: versions go back: {versions}")
        if list(completion.token_ids) != expected_tokens(request, completion):
            report.faults.append(f"{name}: tokens are not those of the rule")
        if completion.stop_reason != "length" or len(completion.token_ids) != request.max_new_tokens:
            report.faults.append(f"{name}: stopped by {completion.stop_reason} at {len(completion.token_ids)} tokens")


def soak(*, steps: int, kills: int, seed: int, folder: Path) -> Report:
    """Run it. The jobs of a step are received after those of the next one went out, so pushes meet running requests."""
    begin = time.monotonic()
    report, chance = Report(steps), random.Random(seed)
    weights = weights_folder(folder / "weights")
    specs = [launched(f"server-{i}", token_seconds=TOKEN_SECONDS) for i in range(NUM_SERVERS)]
    settings = settings_of(specs, folder)
    config = settings.config.model_copy(update={"max_restarts": kills + 1})
    jobs: list[Job] = []
    found: list[JobDone] = []
    with RolloutProcess(settings_of(specs, folder, config=config)) as process:
        killer = Killer(process, specs, chance)

        def push_version(version: int) -> None:
            report.pushes += 1
            report.full_pushes += len(push(process, version, weights)) == NUM_SERVERS

        for step in range(steps):
            new = [job(f"{step}-{i}", REQUESTS_PER_JOB, tokens=TOKENS) for i in range(JOBS_PER_STEP)]
            jobs += new
            if step == 0:
                push_version(0)
            process.submit(new)
            planned = (step + 1) * kills // steps - step * kills // steps
            killing = killer.during(planned)
            time.sleep(chance.uniform(0.0, 0.3))
            if step > 0:
                push_version(step)
            # All but those that went out last.
            while len(found) < len(jobs) - len(new):
                found.append(receive(process, lambda version=step: push_version(version)))
            killing.join(TIMEOUT_S)
        while len(found) < len(jobs):
            found.append(receive(process, lambda: push_version(steps - 1)))
        report.killed = killer.num_killed
        report.restarted = _restarts(process, report.killed)
        status = process.status()
        report.retried, report.continued, report.discarded = (
            status.num_retried,
            status.num_continued,
            status.num_discarded,
        )
        if (extra := process.receive(0.2)) is not None:
            found.append(extra)
    examine(jobs, found, report)
    report.seconds = time.monotonic() - begin
    return report


def _restarts(process: RolloutProcess, expected: int) -> int:
    """Once all servers are back; the last kill may be recent."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        engines = process.status().engines
        count = sum(engine.num_restarts for engine in engines)
        if all(engine.state in ("stale", "serving") for engine in engines) and count >= expected:
            return count
        if time.monotonic() > deadline:
            return count
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = soak(steps=args.steps, kills=args.kills, seed=args.seed, folder=Path(folder))
    print(report)
    print("\n".join(report.faults[:20]))
    failed = report.lost or report.doubled or report.faults or report.restarted != report.killed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
