"""The quickstart: data, SFT, GPPO, export, a check with transformers, a report. Each step is a command you can type.

python examples/quickstart/run.py                       the whole line, about two minutes on two cores
python examples/quickstart/run.py --smoke               a few steps of each, to see that everything runs
python examples/quickstart/run.py --seeds 1 2 3 --control   three seeds, each also with shuffled rewards
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_klear.report.console import format_table
from megatron_klear.report.html import build_report
from megatron_klear.report.record import read_metrics

HERE = Path(__file__).resolve().parent
NUM_PROBLEMS = 512
SMOKE_SFT = ["train_iters=30", "eval.eval_before_train=false"]
SMOKE_RL = ["rollout.num_rollout=2", "eval.eval_before_train=false", "eval.eval_interval=2"]


@dataclass
class Line:
    """One pass through the line: where it writes, how it went."""

    out: Path
    seed: int
    smoke: bool
    seconds: dict[str, float] = field(default_factory=dict)

    def command(self, phase: str, *words: str) -> None:
        """Run a command of megatron-klear, its output on this terminal; stop everything if it fails."""
        self._run(phase, [sys.executable, "-m", "megatron_klear", *words])

    def script(self, phase: str, name: str, *words: str) -> None:
        """Run a script of this folder."""
        self._run(phase, [sys.executable, str(HERE / name), *words])

    def _run(self, phase: str, command: list[str]) -> None:
        print(f"\n== {phase}: {' '.join(command[1:])}", flush=True)
        started = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        self.seconds[phase] = time.perf_counter() - started
        if code:
            raise SystemExit(f"{phase} failed with exit code {code}; its output is above")

    def data(self) -> None:
        """Problems, the tokenizer and the shape of the model."""
        self.command("data", "arithmetic", "--out", str(self.out / "data"))

    def sft(self) -> None:
        """Random weights -> imitation of the careless teacher."""
        self.command(
            "sft",
            "sft",
            str(HERE / "sft.yaml"),
            f"run.output_dir={self.out / 'sft'}",
            f"run.seed={self.seed}",
            f"model.hf_checkpoint={self.out / 'data/model'}",
            f"data.path={self.out / 'data/sft.jsonl'}",
            f"eval.prompt_data={self.out / 'data/eval.jsonl'}",
            "checkpoint.overwrite=true",
            *(SMOKE_SFT if self.smoke else []),
        )

    def rl(self, name: str = "rl", *, shuffle_rewards: bool = False) -> None:
        """SFT weights -> GPPO on the reward of right answers."""
        self.command(
            name,
            "rl",
            str(HERE / "rl.yaml"),
            f"run.output_dir={self.out / name}",
            f"run.name={name}",
            f"run.seed={self.seed}",
            f"model.hf_checkpoint={self.out / 'data/model'}",
            f"model.load={self.out / 'sft/checkpoints'}",
            f"data.prompt_data={self.out / 'data/rl.jsonl'}",
            f"eval.prompt_data={self.out / 'data/eval.jsonl'}",
            f"export.hf_dir={self.out / 'hf' if not shuffle_rewards else self.out / 'hf_control'}",
            f"selection.shuffle_rewards={str(shuffle_rewards).lower()}",
            "checkpoint.overwrite=true",
            *(SMOKE_RL if self.smoke else []),
        )

    def check_export(self) -> None:
        """The exported folder in transformers: same logits, same accuracy by its own generate."""
        dtype = ["--params-dtype", "float32"]
        folders = ["--hf", str(self.out / "hf"), "--megatron", str(self.out / "rl/checkpoints")]
        self.command("verify", "convert", "verify", *folders, *dtype)
        expected = round(self.accuracy("rl", -1) * NUM_PROBLEMS)
        self.script(
            "generate",
            "check_export.py",
            str(self.out / "hf"),
            str(self.out / "data/eval.jsonl"),
            f"--expected={expected}",
        )

    def accuracy(self, name: str, index: int) -> float:
        """Held-out accuracy of a run: its first (0) or last (-1) evaluation."""
        found = [row["eval/accuracy"] for row in read_metrics(self.out / name) if "eval/accuracy" in row]
        return found[index]

    def report(self) -> None:
        """report.html and curves.png over both runs, and the same facts on the terminal."""
        started = time.perf_counter()
        rows = [{"weights": "random", "held-out accuracy": "-"}] if self.smoke else [self._row("random", "sft", 0)]
        rows += [self._row("after SFT", "sft", -1), self._row("after RL (GPPO)", "rl", -1)]
        folders = {"sft": self.out / "sft", "rl": self.out / "rl"}
        page = build_report(folders, self.out, title="megatron-klear quickstart", accuracy_table=rows)
        self.seconds["report"] = time.perf_counter() - started
        print(f"\n{format_table(rows)}\n")
        print(format_table([{"phase": name, "seconds": f"{value:.1f}"} for name, value in self.seconds.items()]))
        print(f"total {sum(self.seconds.values()):.1f} s\n")
        places = {
            "report": page,
            "curves": self.out / "curves.png",
            "runs": f"{self.out / 'sft'}, {self.out / 'rl'}",
            "Hugging Face": self.out / "hf",
        }
        print("\n".join(f"{name:<14}{place}" for name, place in places.items()))

    def _row(self, weights: str, run: str, index: int) -> dict[str, str]:
        value = self.accuracy(run, index)
        right = round(value * NUM_PROBLEMS)
        return {"weights": weights, "held-out accuracy": f"{value:.1%}", "right": f"{right} of {NUM_PROBLEMS}"}

    def judge(self) -> list[str]:
        """What the quickstart promises and did not keep."""
        before, after = self.accuracy("sft", -1), self.accuracy("rl", -1)
        promises = {
            f"accuracy after SFT {before:.1%}, promised 40% to 65%": 0.40 <= before <= 0.65,
            f"accuracy after RL {after:.1%}, promised at least 80%": after >= 0.80,
            f"RL gained {100 * (after - before):.1f} points, promised at least 15": after - before >= 0.15,
        }
        return [promise for promise, kept in promises.items() if not kept]


def run_once(out: Path, seed: int, *, smoke: bool, control: bool) -> dict[str, str]:
    """The whole line for one seed; a row for the table of seeds."""
    shutil.rmtree(out, ignore_errors=True)
    line = Line(out, seed, smoke)
    line.data()
    line.sft()
    line.rl()
    if control:
        line.rl("rl_shuffled", shuffle_rewards=True)
    line.check_export()
    line.report()
    broken = [] if smoke else line.judge()
    if broken:
        raise SystemExit("the quickstart did not keep its promise: " + "; ".join(broken))
    row = {"seed": str(seed)} | {
        name: f"{line.accuracy(run, index):.1%}" for name, run, index in (("SFT", "sft", -1), ("RL", "rl", -1))
    }
    if control:
        row["shuffled rewards"] = f"{line.accuracy('rl_shuffled', -1):.1%}"
        gain = line.accuracy("rl_shuffled", -1) - line.accuracy("sft", -1)
        row["shuffled gain, points"] = f"{100 * gain:+.1f}"
    return row | {"seconds": f"{sum(line.seconds.values()):.0f}"}


def main() -> int:
    """Exit code 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), help="folder to write; it is emptied first"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="one pass each")
    parser.add_argument("--control", action="store_true", help="also train with shuffled rewards")
    parser.add_argument("--smoke", action="store_true", help="a few steps; no promise about accuracy")
    args = parser.parse_args()
    single = len(args.seeds) == 1
    rows = [
        run_once(args.out if single else args.out / f"seed{seed}", seed, smoke=args.smoke, control=args.control)
        for seed in args.seeds
    ]
    if not single or args.control:
        print(f"\n{format_table(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
