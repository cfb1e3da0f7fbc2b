"""How long `megatron-klear sft` and `rl` take from the command to the line of their first step, and for what.

    python benchmarks/startup.py [--turns 3] [--out FOLDER]

Runs the quickstart's recipes (examples/quickstart), in turns with bare imports of what every trainer on Megatron must
import, each in a process of its own. A process ends itself when the line of its first step is due. `wall` and `cpu` are
seconds, the medians of the turns; on a machine that others use look at `cpu`. Files that Python compiled before are
there (an unmeasured turn comes first), and in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_klear.report.console import format_table

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
BARE = ("torch", "transformers", "megatron.core")
# What a process prints before its phases.
MARK = "startup-phases "
AIM = 20.0


@dataclass
class Clock:
    """Wall and CPU seconds by phase; whatever lies between two phases belongs to the earlier one."""

    wall: float
    cpu: float = 0.0
    phase: str = "interpreter"
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        """The last phase ends here."""
        wall, cpu = time.time(), time.process_time()
        before = self.phases.get(self.phase, (0.0, 0.0))
        self.phases[self.phase] = (before[0] + wall - self.wall, before[1] + cpu - self.cpu)
        self.wall, self.cpu, self.phase = wall, cpu, phase


def _marked(clock: Clock, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        clock.enter(phase)
        return function(*args, **kwargs)

    return run


def child(kind: str, started: float, words: Sequence[str]) -> None:
    """Be `megatron-klear kind`, up to the line of the first step; print the phases."""
    clock = Clock(started)
    clock.enter("imports")
    from megatron_klear import cli

    command = cli._load(cli.COMMANDS[kind][0])
    from megatron_klear.training import rl, run, sft

    loops: Any = rl if kind == "rl" else sft
    opened: Any = run
    opened.parallel_context = _marked(clock, "process groups", run.parallel_context)
    opened.build_policy = _marked(clock, "model and weights", run.build_policy)
    opened._open_main_side = _marked(clock, "tokenizer, data, reward", run._open_main_side)
    opened.Run.evaluate = _marked(clock, "evaluation before", run.Run.evaluate)
    loop = loops.loop

    def timed_loop(opened: Any, total: int, do_step: Callable[[int], Any], **options: Any) -> None:
        loop(opened, total, _marked(clock, "first step", do_step), **options)

    def done(*_args: Any, **_kwargs: Any) -> str:
        clock.enter("")
        print(MARK + json.dumps(clock.phases), flush=True)
        os._exit(0)

    opened.step_line, loops.loop = done, timed_loop
    clock.enter("recipe")
    command(list(words))
    raise SystemExit(f"{kind} ended before its first step")


def measure(command: Sequence[str]) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Phases, if the process told them, and (wall, cpu) of all of it."""
    started = time.time()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(list(command), stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.time() - started
        out.seek(0)
        text = out.read()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-2000:]}")
    told = next((line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)), "{}")
    phases = {name: (float(w), float(c)) for name, (w, c) in json.loads(told).items()}
    return phases, (wall, usage.ru_utime + usage.ru_stime)


def commands(out: Path) -> dict[str, list[str]]:
    """What is measured; the data and the weights it needs are made first."""
    klear = [sys.executable, "-W", "ignore", "-m", "megatron_klear"]
    data = out / "data"
    subprocess.run([*klear, "arithmetic", "--out", str(data)], check=True, stdout=subprocess.DEVNULL)
    common = [f"model.hf_checkpoint={data / 'model'}", f"eval.prompt_data={data / 'eval.jsonl'}"]
    sft = [str(RECIPES / "sft.yaml"), *common, f"data.path={data / 'sft.jsonl'}", "checkpoint.overwrite=true"]
    once = [f"run.output_dir={out / 'once'}", "train_iters=1", "eval.eval_before_train=false"]
    subprocess.run([*klear, "sft", *sft, *once, "optimizer.lr_warmup_iters=0"], check=True, stdout=subprocess.DEVNULL)
    rl = [
        *(str(RECIPES / "rl.yaml"), *common, f"data.prompt_data={data / 'rl.jsonl'}", "checkpoint.overwrite=true"),
        *(f"model.load={out / 'once' / 'checkpoints'}", f"export.hf_dir={out / 'hf'}"),
    ]
    words = {"sft": [*sft, f"run.output_dir={out / 'sft'}"], "rl": [*rl, f"run.output_dir={out / 'rl'}"]}
    here = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child"]
    found = {f"import {name}": [sys.executable, "-W", "ignore", "-c", f"import {name}"] for name in BARE}
    return found | {kind: [*here, kind, *rest] for kind, rest in words.items()}


def table(turns: Sequence[tuple[dict[str, tuple[float, float]], tuple[float, float]]]) -> list[dict[str, str]]:
    """One row a phase, and their sum: medians over the turns."""
    rows = []
    for name in turns[0][0]:
        wall, cpu = (statistics.median(phases[name][i] for phases, _ in turns) for i in (0, 1))
        rows.append({"phase": name, "wall": f"{wall:.2f}", "cpu": f"{cpu:.2f}"})
    wall, cpu = (statistics.median(total[i] for _, total in turns) for i in (0, 1))
    return [*rows, {"phase": "all", "wall": f"{wall:.2f}", "cpu": f"{cpu:.2f}"}]


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """Where to write: `given`, which stays, or a folder that is deleted in the end."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def main() -> int:
    """Exit code 1 if the first step of `rl` came after more than 20 s."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder to keep; else a temporary one")
    args = parser.parse_args()
    with folder(args.out) as out:
        found = commands(out)
        turns: dict[str, list[Any]] = {name: [] for name in found}
        for turn in range(args.turns + 1):
            for name, command in found.items():
                at = command.index("--child") + 2 if "--child" in command else len(command)
                # The moment of its start is the first of its words.
                now = [repr(time.time())] if at < len(command) else []
                result = measure([*command[:at], *now, *command[at:]])
                if turn:
                    turns[name].append(result)
    for name in ("sft", "rl"):
        print(f"\nmegatron-klear {name}, to the line of its first step (seconds, medians of {args.turns})")
        print(format_table(table(turns[name])))
    bare = [{"phase": name, **{k: v for k, v in table(turns[name])[-1].items() if k != "phase"}} for name in turns]
    print("\nwhole processes")
    print(format_table(bare))
    wall = statistics.median(total[0] for _, total in turns["rl"])
    print(f"\nfirst step of rl after {wall:.1f} s, aim {AIM:.0f} s: {'OK' if wall <= AIM else 'MISSED'}")
    return 0 if wall <= AIM else 1


if __name__ == "__main__":
    raise SystemExit(main())
