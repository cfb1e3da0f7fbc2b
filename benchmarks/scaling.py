"""What more tokens cost: time and memory of packing, output layer, training step and engine at 1, 4, 16 and 64 times.

    python benchmarks/scaling.py [--rounds 3]      prints a table; writes docs/images/scaling.png and, into
                                                   docs/performance.md, the table between its two marks

Each measurement runs in a process of its own, forked after the imports: time is the best of the rounds, memory the high
water of resident memory above what was held before the first round. Linear cost has the exponent 1 (time ~ tokens^1);
the one shown is between the last two points, where fixed costs no longer matter.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from memory import high_water_mib, reset_high_water

from megatron_klear.config.loss import GppoLossConfig, KlConfig
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.data.balance import TokenCost
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.losses.registry import build_loss
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.models.random_init import random_source
from megatron_klear.parallel.topology import parallel_context
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import build_policy
from megatron_klear.types import GenerationRequest, Prompt, Sample
from megatron_klear_kernels.linear_policy_loss.policy_loss import fused_linear_policy_loss

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "scaling.png"
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
TIMES = (1, 4, 16, 64)
SEQUENCE = 64
SHAPE = Qwen3Shape(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Point:
    tokens: int
    seconds: float
    mib: float


Work = Callable[[], object]


def _samples(num_tokens: int) -> list[Sample]:
    numbers = random.Random(0)
    samples = []
    for i in range(num_tokens // SEQUENCE):
        ids = [numbers.randrange(SHAPE.vocab_size) for _ in range(SEQUENCE)]
        sample = Sample(f"s{i}", Prompt(f"p{i}", tuple(ids[:8])))
        logprobs = [-4.0] * (SEQUENCE - 8)
        sample.append_response(ids[8:], logprobs, weight_version=0, stop_reason="stop")
        sample.reward = sample.advantage = numbers.choice((-1.0, 1.0))
        samples.append(sample)
    return samples


@contextmanager
def packing(num_tokens: int) -> Iterator[Work]:
    """Samples to the micro-batches of 4 replicas."""
    samples, spec = _samples(num_tokens), PackSpec(4, 2048, cost=TokenCost.of(SHAPE))
    yield lambda: pack(samples, spec)


@contextmanager
def head(num_tokens: int) -> Iterator[Work]:
    """Hidden states to GPPO loss and gradients, vocabulary of 4,096."""
    hidden, weight = torch.randn(num_tokens, 128), torch.randn(4096, 128) * 0.1
    targets, rows = torch.randint(0, 4096, (num_tokens,)), torch.randn(3, num_tokens)

    def work() -> None:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        fused_linear_policy_loss(h, w, targets, rows[0] - 8, rows[1], rows[2].abs()).loss.backward()

    yield work


@contextmanager
def step(num_tokens: int) -> Iterator[Work]:
    """One GPPO update of a 0.8M model on one micro-batch of all tokens."""
    table = qwen3_table(SHAPE)

    def fill(stage: ModelStage) -> None:
        import_weights(stage, table, random_source(table, seed=0, std=0.02))

    parallel = ParallelConfig()
    with parallel_context(parallel) as context:
        settings = LearnerSettings(parallel, OptimizerConfig(lr=1e-5), "float32")
        policy = build_policy(SHAPE, fill, context, settings, HeadSettings())
        (batch,) = pack(_samples(num_tokens), PackSpec(1, num_tokens))
        for micro_batch in batch.micro_batches:
            micro_batch.old_logprobs = micro_batch.rollout_logprobs
        loss = build_loss(GppoLossConfig(type="gppo"), KlConfig())
        yield lambda: policy.update(batch, loss)


@contextmanager
def engine(num_tokens: int) -> Iterator[Work]:
    """Responses of 56 tokens to prompts of 8, 64 at a time."""
    made = EmbeddedEngine(SHAPE, max_running_requests=64)
    source = random_source(qwen3_table(SHAPE), seed=0, std=0.02)
    made.load_weights(((name, source(name)) for name in SHAPE.tensor_shapes()), 0)
    requests = [
        GenerationRequest(str(i), tuple((i + j) % SHAPE.vocab_size for j in range(8)), SEQUENCE - 8, seed=i)
        for i in range(num_tokens // SEQUENCE)
    ]
    yield lambda: made.generate(requests)


PARTS = {"packing": (packing, 4096), "output layer": (head, 1024), "update": (step, 512), "engine": (engine, 4096)}
"""What is measured, and the tokens of its first point."""


def _measure(name: str, num_tokens: int, rounds: int, answer: multiprocessing.SimpleQueue[Point]) -> None:
    build, _ = PARTS[name]
    torch.set_num_threads(1)
    with build(num_tokens) as work:
        before, seconds = reset_high_water(), math.inf
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            seconds = min(seconds, time.perf_counter() - started)
        answer.put(Point(num_tokens, seconds, high_water_mib() - before))


def measure(name: str, rounds: int) -> list[Point]:
    """The four points of a part."""
    fork, points = multiprocessing.get_context("fork"), []
    for times in TIMES:
        answer = fork.SimpleQueue()
        process = fork.Process(target=_measure, args=(name, times * PARTS[name][1], rounds, answer))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name} at {times} times failed with exit code {process.exitcode}; its output is above")
        points.append(answer.get())
    return points


def exponent(points: list[Point], what: Callable[[Point], float]) -> float:
    """Of the last two points; 1 is linear."""
    a, b = points[-2:]
    return math.log(what(b) / what(a)) / math.log(b.tokens / a.tokens)


def table(parts: dict[str, list[Point]]) -> str:
    """Markdown."""
    lines = ["| part | tokens | ms | MiB | microseconds a token |", "|---|---|---|---|---|"]
    for name, points in parts.items():
        for point in points:
            each = 1e6 * point.seconds / point.tokens
            lines.append(f"| {name} | {point.tokens:,} | {1e3 * point.seconds:.1f} | {point.mib:.0f} | {each:.2f} |")
        of_time, of_memory = exponent(points, lambda p: p.seconds), exponent(points, lambda p: max(p.mib, 1.0))
        lines.append(f"| {name} | exponent | {of_time:.2f} | {of_memory:.2f} | |")
    return "\n".join(lines)


def plot(parts: dict[str, list[Point]], path: Path) -> None:
    """Time and memory against tokens, both axes logarithmic, with a line of slope 1 through each last point."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, what, label in zip(
        axes, (lambda p: p.seconds, lambda p: max(p.mib, 1.0)), ("seconds", "MiB"), strict=True
    ):
        for name, points in parts.items():
            tokens = [point.tokens for point in points]
            (line,) = axis.loglog(tokens, [what(point) for point in points], marker="o", label=name)
            last = what(points[-1])
            axis.loglog(tokens, [last * t / tokens[-1] for t in tokens], linestyle=":", color=line.get_color())
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.legend()
    figure.suptitle("Cost against tokens; dotted: linear")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    parts = {}
    for name in PARTS:
        parts[name] = measure(name, arguments.rounds)
        print(table({name: parts[name]}), flush=True)
    plot(parts, PLOT)
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n{table(parts)}\n\n{after}")
    print(f"wrote {os.path.relpath(PLOT)} and {os.path.relpath(PAGE)}")


if __name__ == "__main__":
    main()
