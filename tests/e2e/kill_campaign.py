"""Kill a small RL run again and again, and see that it ends as the run that nobody killed.

    python tests/e2e/kill_campaign.py --kills 40

Half of the kills (SIGKILL to the whole process group) come at a random time, half at a random point of a random phase:
at a change of the disk, or where a function of the run starts or ends. After each, every checkpoint must be whole, and
the same command line goes on. In the end metrics, samples, exported weights, every tensor of the last checkpoint and
all cursors must be equal to the unbroken run's.
"""

# ruff: noqa: E402  a script must find its modules first
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

if __name__ == "__main__":
    # The script's own folder would make this file importable under two names.
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root)
    sys.path += [str(root / "kernels"), str(root / "tests")]
    # Workers that score answers are started anew and must find the reward too.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(root), str(root / "kernels"), str(root / "tests")))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml

from dist.pool import COSTLY_IMPORTS, free_port
from e2e.compare_runs import differences, whole_or_not
from e2e.jobs_killed import MUTANTS, WRITER, Attempt, Board, Point, lead
from megatron_klear.checkpoint.folder import TRACKER, latest_step, leftovers, recover
from megatron_klear.data import arithmetic
from megatron_klear.report.record import read_metrics

WANTED = ("start-up", "rollout", "update", "save", "rename", "tracker", "prune", "metrics")
SAVE_INTERVAL = 2
# A descriptor that every process of a group holds, and loses last of all when it dies.
_PIPE = 500


@dataclass(frozen=True)
class Options:
    """What to do. `phases`: where the kills at points fall, in turn; all phases there are if empty."""

    kills: int = 40
    seed: int = 0
    steps: int = 0
    async_save: bool = False
    world_size: int = 1
    max_seconds: float = 480.0
    phases: tuple[str, ...] = ()
    random_times: float = 0.5
    mutant: str | None = None
    words: tuple[str, ...] = ()
    """Overrides of the recipe, for both runs."""


@dataclass
class Report:
    """What a campaign found."""

    kills: int = 0
    resumes: int = 0
    mismatches: list[str] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    points: list[str] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""

    def __str__(self) -> str:
        rows = [f"  {phase:<10}{count:4}" for phase, count in sorted(self.hits.items())]
        missed = [phase for phase in WANTED if not self.hits[phase]]
        return "\n".join(
            [
                "kills by phase:",
                *rows,
                f"never hit: {', '.join(missed) or 'none of the wanted'}",
                *(f"MISMATCH {line}" for line in self.mismatches),
                f"kills {self.kills}, resumes {self.resumes}, mismatches {len(self.mismatches)},"
                f" seconds {self.seconds:.0f}",
            ]
        )


@dataclass(frozen=True)
class Pace:
    """Of the unbroken run: seconds until its first step, seconds a step (a save counted in), events of each rank."""

    startup: float
    step: float
    events: tuple[Counter[str], ...]


class Group:
    """A started attempt: its process group, and whether all of it is gone."""

    def __init__(self, attempt: Attempt) -> None:
        self.board = Board(attempt.world_size)
        reading, writing = os.pipe()
        port = free_port()
        self.leader = os.fork()
        if self.leader == 0:
            os.dup2(writing, _PIPE)
            os.close(writing)
            code = 1
            try:
                code = lead(attempt, self.board, port)
            finally:
                os._exit(code)
        os.close(writing)
        self._pipe = reading
        os.set_blocking(reading, False)

    def ended(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the last process is gone, or so many seconds have passed, or `until` says so; whether it is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            with contextlib.suppress(BlockingIOError):
                if os.read(self._pipe, 1) == b"":
                    return True
            time.sleep(0.002)
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # A moment after the fork it has no group of its own yet.
            if os.getpgid(self.leader) == self.leader:
                os.killpg(self.leader, signal.SIGKILL)
            else:
                os.kill(self.leader, signal.SIGKILL)

    def code(self) -> int:
        """Exit code once it has ended; negative for a signal."""
        assert self.ended(30), "a process of a killed group lives on"
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.leader, 0)[1])


def in_fork(work: Callable[[], T]) -> T:
    """The result of `work`, done by a process of its own, so that this one stays clean enough to fork from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            data = pickle.dumps(work())
            with os.fdopen(writing, "wb") as out:
                out.write(data)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("a helper process failed; see above")
    return pickle.loads(data)


def write_recipe(folder: Path, output: str, options: Options) -> Path:
    """RL from random weights with critic and reference, evaluations, and a checkpoint every second step."""
    raw: dict[str, Any] = {
        "run": {"name": "killed", "output_dir": str(folder / output)},
        "model": {"hf_checkpoint": str(folder / "data" / "model"), "random_init": True, "params_dtype": "float32"},
        "data": {"prompt_data": str(folder / "data" / "rl.jsonl"), "max_prompt_len": 16},
        "rollout": {
            "num_rollout": options.steps,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 10,
        },
        "loss": {"type": "gppo"},
        "advantage": {"type": "gae"},
        "critic": {"lr": 1.0e-3, "warmup_steps": 1},
        "kl": {"kl_coef": 0.1, "kl_in": "reward", "ref_update_interval": 3},
        "batch": {"global_batch_size": 8, "max_tokens_per_gpu": 96},
        "optimizer": {"lr": 1.0e-3},
        "reward": {"type": "helpers.rewards:length_reward", "format": "none"},
        "eval": {"prompt_data": str(folder / "data" / "eval.jsonl"), "eval_interval": 3, "max_response_len": 8},
        "checkpoint": {
            "save_interval": SAVE_INTERVAL,
            "keep_last": 2,
            "resume": "auto",
            "async_save": options.async_save,
        },
        "export": {"hf_dir": str(folder / output / "hf")},
    }
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


class Campaign:
    """One unbroken run, and one that is killed."""

    def __init__(self, options: Options, folder: Path, say: Callable[[str], None] = print) -> None:
        self.options = options
        self.folder = folder
        self.say = say
        self.random = random.Random(options.seed)
        self.report = Report(folder=str(folder))
        self.deadline = time.monotonic() + options.max_seconds
        self.output = folder / "killed"
        self.checkpoints = self.output / "checkpoints"
        self._had_tracker = False

    def run(self) -> Report:
        started = time.monotonic()
        words = ["--out", str(self.folder / "data"), "--num-sft", "8", "--num-rl", "30", "--num-eval", "6"]
        in_fork(lambda: arithmetic.main(words))
        pace = self._unbroken()
        self.say(f"unbroken: {self.options.steps} steps, start-up {pace.startup:.1f} s, {pace.step:.2f} s a step")
        recipe = write_recipe(self.folder, "killed", self.options)
        if self._kill_often(recipe, pace):
            self._finish(recipe)
        self.report.seconds = time.monotonic() - started
        return self.report

    def _attempt(self, output: str, recipe: Path, **more: Any) -> Attempt:
        return Attempt(
            ("rl", str(recipe), *self.options.words),
            self.folder / output,
            self.folder / f"{output}.log",
            self.options.world_size,
            mutant=self.options.mutant if output == "killed" else None,
            **more,
        )

    def _unbroken(self) -> Pace:
        counts, begun = self.folder / "counts", time.time()
        recipe = write_recipe(self.folder, "whole", self.options)
        group = Group(self._attempt("whole", recipe, counts=counts))
        if not group.ended(self.options.max_seconds):
            group.kill()
        if code := group.code():
            raise RuntimeError(f"the unbroken run failed with {code}:\n{_tail(self.folder / 'whole.log')}")
        steps = [line for line in read_metrics(self.folder / "whole") if "perf/step_time" in line]
        first = steps[0]["time"] - steps[0]["perf/step_time"]
        events = []
        for rank in range(self.options.world_size):
            lines = (line.split(maxsplit=1) for line in counts.with_suffix(f".{rank}").read_text().splitlines())
            events.append(Counter({phase: int(number) for number, phase in lines}))
        last = steps[-1]["time"]
        return Pace(first - begun, (last - first) / len(steps), tuple(events))

    def _kill_often(self, recipe: Path, pace: Pace) -> bool:
        """Whether there was time for all kills."""
        barren, before = 0, self._tracker()
        while self.report.kills < self.options.kills and not self.report.mismatches:
            if time.monotonic() > self.deadline:
                self.report.mismatches.append(
                    f"--max-minutes are over after {self.report.kills} kills at step {before}"
                )
                return False
            # Whoever was killed three times without getting on may live until it got on, where there is a way to go.
            patient = barren >= 3 and before != self.options.steps
            point = self._choose(pace, patient=patient)
            group = self._start(recipe, point)
            self._let_live(group, pace, point, patient=patient)
            self._after(group)
            now = self._tracker()
            barren, before = (barren + 1 if now == before else 0), now
        return not self.report.mismatches

    def _start(self, recipe: Path, point: Point | None = None) -> Group:
        self.report.resumes += self.report.kills > 0
        return Group(self._attempt("killed", recipe, point=point))

    def _tracker(self) -> int | None:
        return latest_step(self.checkpoints)

    def _choose(self, pace: Pace, *, patient: bool) -> Point | None:
        """None for a kill at a random time."""
        if patient or self.random.random() < self.options.random_times:
            return None
        there = [phase for events in pace.events for phase in events if phase != "recover"]
        phases = self.options.phases or sorted({*there, "recover"})
        # Those that were hit least first.
        least = min(self.report.hits[phase] for phase in phases)
        phase = self.random.choice([phase for phase in phases if self.report.hits[phase] == least])
        ranks = [rank for rank, events in enumerate(pace.events) if events[phase]] or [0]
        rank = self.random.choice(ranks)
        a_save = pace.events[rank][phase] * SAVE_INTERVAL / self.options.steps
        number = self.random.randint(1, max(1, round(1.5 * a_save)))
        return Point(phase, number, self.random.choice(("before", "after")), rank)

    def _let_live(self, group: Group, pace: Pace, point: Point | None, *, patient: bool) -> None:
        """Wait until the attempt has killed itself, or its time is over; then kill it."""
        a_save = SAVE_INTERVAL * pace.step
        if patient:
            before = self._tracker()
            if group.ended(60, until=lambda: self._tracker() != before):
                return
            seconds = self.random.uniform(0, a_save)
        elif point is None:
            is_done = self._tracker() == self.options.steps
            seconds = self.random.uniform(0, pace.startup + (0 if is_done else 1.5 * a_save))
        else:
            seconds = 2 * pace.startup + 3 * a_save
        if not group.ended(seconds):
            group.kill()

    def _after(self, group: Group) -> None:
        code = group.code()
        if code == 0:
            self.say("an attempt came to its end before its kill")
            return
        if code != -signal.SIGKILL:
            text = f"an attempt failed with {code}:\n{_tail(self.folder / 'killed.log')}"
            self.report.mismatches.append(text)
            return
        self.report.kills += 1
        ranks = range(self.options.world_size)
        point = next(filter(None, map(group.board.point, ranks)), "")
        phase = point.partition(":")[0] or group.board.phase(0)
        self.report.hits[phase] += 1
        if phase != WRITER and group.board.writes(0):
            self.report.hits[WRITER] += 1
        number = self.report.kills
        where = point or f"{phase}: at a random time"
        self.report.points.append(where)
        self.say(f"kill {number:3}, newest checkpoint {self._tracker()}, {where}")
        self.report.mismatches += [f"kill {number} ({where}): {fault}" for fault in self._faults()]

    def _faults(self) -> list[str]:
        """What is wrong with the folder of checkpoints now, and after its mending (of a copy)."""
        faults = whole_or_not(self.checkpoints)
        if not self.checkpoints.is_dir():
            return faults
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.checkpoints, copy, copy_function=os.link)
        recover(copy)
        faults += [f"after recovery: {fault}" for fault in whole_or_not(copy)]
        faults += [f"{path.name} is left after recovery" for path in leftovers(copy)]
        if self._had_tracker and not (copy / TRACKER).is_file():
            faults.append("the tracker is gone")
        self._had_tracker = (copy / TRACKER).is_file()
        return faults

    def _finish(self, recipe: Path) -> None:
        """Let the run come to its end, and compare."""
        group = self._start(recipe)
        if not group.ended(max(1.0, self.deadline - time.monotonic())):
            group.kill()
        if code := group.code():
            log = _tail(self.folder / "killed.log")
            self.report.mismatches.append(f"the last attempt did not come to its end ({code}):\n{log}")
            return
        self.report.mismatches += whole_or_not(self.checkpoints)
        self.report.mismatches += in_fork(lambda: list(differences(self.folder, self.options.steps)))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def run_campaign(options: Options, say: Callable[[str], None] = print) -> Report:
    """In a clean process that has imported `COSTLY_IMPORTS`. The folder stays if anything was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="klear-kills-"))
    report = Campaign(options, folder, say).run()
    if not report.mismatches:
        shutil.rmtree(folder)
    return report


def job(rank: int, world_size: int, options: Options) -> Report:
    """`run_campaign` on a pool."""
    return run_campaign(options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="a random one if not given")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--world-size", type=int, choices=(1, 2), default=1)
    parser.add_argument("--max-minutes", type=float, default=8.0)
    parser.add_argument("--phases", nargs="*", default=[], help="where kills at points fall; all phases if not given")
    parser.add_argument("--random-times", type=float, default=0.5, help="share of kills at random times")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="make a mistake on purpose, which must be found")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    for module in COSTLY_IMPORTS:
        importlib.import_module(module)
    # A kill gains about a step; what is left after the last one is done in one go.
    steps = max(8, round(1.2 * args.kills))
    options = Options(
        args.kills,
        seed,
        steps,
        args.async_save,
        args.world_size,
        60 * args.max_minutes,
        tuple(args.phases),
        args.random_times,
        args.mutant,
        tuple(args.set),
    )
    report = run_campaign(options, lambda line: print(line, flush=True))
    print(report)
    if report.mismatches:
        print(f"what was found lies in {report.folder}; repeat with --seed {seed}")
    return 1 if report.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
