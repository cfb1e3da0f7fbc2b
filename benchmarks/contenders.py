"""What benchmarks with a peer share: a tiny model on disk, and contenders that take turns, each in its own process."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_klear.data import arithmetic

THREADS = 2


@dataclass(frozen=True)
class Outcome:
    """What a contender measured. `seconds` of its steps after the warm-up; `phases` are medians, if it has any."""

    seconds: list[float]
    counts: dict[str, int]
    """Work done in the measured steps; equal for all contenders, or the comparison means nothing."""
    weights_moved: float
    """Mean absolute change of a weight over all steps."""
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


Contender = Callable[[Path, argparse.Namespace], Outcome]
Weights = Mapping[str, Tensor]


def write_inputs(folder: Path) -> None:
    """The quickstart's problems, tokenizer and shape, and random weights (0.8 million), from which all start."""
    arithmetic.main(["--out", str(folder)])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    # Saving the model writes its own, without the tokens to stop at.
    (folder / "model" / "generation_config.json").write_text(json.dumps(arithmetic.generation_config()))


def weights_moved(before: Weights, after: Weights) -> float:
    """Mean absolute difference over all weights."""
    total = sum((after[name].float() - before[name].float()).abs().sum().item() for name in before)
    return total / sum(tensor.numel() for tensor in before.values())


def take_turns(script: str, contenders: Mapping[str, Contender], args: argparse.Namespace) -> list[dict[str, Outcome]]:
    """Outcomes by name, of each round. In a process that was started for one contender: run it, and end.

    `args` come from a parser that `add_arguments` has seen.
    """
    torch.set_num_threads(THREADS)
    if args.contender is not None:
        outcome = contenders[args.contender](args.folder, args)
        args.result.write_text(json.dumps(asdict(outcome)))
        sys.exit(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder / "inputs")
        rounds = []
        for number in range(args.rounds):
            found = {}
            for contender in contenders:
                result = folder / f"{contender}.{number}.json"
                words = ["--contender", contender, "--folder", str(folder / "inputs"), "--result", str(result)]
                found[contender] = _in_process([script, *sys.argv[1:], *words], result)
            rounds.append(found)
        return rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of every such benchmark."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each contender in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)


def _in_process(words: Sequence[str], result: Path) -> Outcome:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(THREADS))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **threads, **offline}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return Outcome(**json.loads(result.read_text()))


class StepTimer:
    """Seconds between steps' ends, those of the warm-up left out."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.ends: list[float] = []

    def step_ended(self) -> None:
        """Call at the end of each step."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of the measured steps."""
        return [stop - start for start, stop in itertools.pairwise(self.ends[self.warmup - 1 :])]


def print_table(rounds: Sequence[Mapping[str, Outcome]], peers: Sequence[str]) -> None:
    """A line a round: each contender's step, and how many times faster than each peer the others are."""
    names = list(rounds[0])
    own = [name for name in names if name not in peers]
    counts = {json.dumps(outcome.counts, sort_keys=True) for found in rounds for outcome in found.values()}
    assert len(counts) == 1, f"contenders did different work: {sorted(counts)}"
    assert all(outcome.weights_moved > 0 for found in rounds for outcome in found.values()), "somebody learnt nothing"
    print(f"work of each contender in its measured steps: {counts.pop()}; {THREADS} threads each")
    for name in names:
        print(f"  weights of {name} moved by {rounds[0][name].weights_moved:.2e} on average")
    pairs = [(mine, peer) for peer in peers for mine in own]
    print("round  " + "".join(f"{name:>20}" for name in names) + "".join(f"{f'{p} / {m}':>30}" for m, p in pairs))
    ratios: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for number, found in enumerate(rounds, start=1):
        line = f"{number:5}  " + "".join(f"{f'{1e3 * found[name].step:.0f} ms':>20}" for name in names)
        for mine, peer in pairs:
            ratios[mine, peer].append(found[peer].step / found[mine].step)
            line += f"{f'{ratios[mine, peer][-1]:.2f} x':>30}"
        print(line)
    medians = {pair: statistics.median(values) for pair, values in ratios.items()}
    print("median " + " " * 20 * len(names) + "".join(f"{f'{medians[pair]:.2f} x':>30}" for pair in pairs))
    for name in own:
        phases = {
            phase: statistics.median(found[name].phases[phase] for found in rounds) for phase in rounds[0][name].phases
        }
        if phases:
            print(f"{name}: " + ", ".join(f"{phase} {1e3 * seconds:.0f} ms" for phase, seconds in phases.items()))
