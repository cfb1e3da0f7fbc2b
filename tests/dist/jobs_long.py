"""Jobs on long packed micro-batches: one update, what it costs, and log-probs of a long sequence and its prefix."""

from __future__ import annotations

import ctypes
import math
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist.world import ONE, Arrays, World, gppo, to_array, world
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.config.rope import RopeConfig
from megatron_klear.types import Prompt, Sample, TrainBatch

# YaRN as the paper evaluates at 64K: twice the original context and more, so that most positions lie beyond it.
SHAPE = Qwen3Shape(
    model_type="qwen3",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rope=RopeConfig(rope_type="yarn", rope_theta=1e6, factor=2.5, original_max_position_embeddings=32768),
    max_position_embeddings=81920,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class LongStep:
    """What one update reported and cost."""

    num_positions: int
    num_sequences: int
    metrics: dict[str, float]
    grad_norm: float
    moved: bool
    seconds: float
    peak_bytes: int
    """Above what the process held before the update."""


def lognormal_lengths(total: int, *, median: int, longest: int) -> list[int]:
    """Lengths that add up to `total`, a few of them many times the median."""
    numbers, lengths = random.Random(total), list[int]()
    while (left := total - sum(lengths)) > 0:
        length = max(2, min(longest, round(numbers.lognormvariate(math.log(median), 1.0))))
        # A rest of one token would train nothing.
        lengths.append(left if left - length < 2 else length)
    return lengths


def _samples(lengths: Sequence[int]) -> list[Sample]:
    numbers, samples = random.Random(len(lengths)), []
    for i, length in enumerate(lengths):
        tokens = [numbers.randrange(SHAPE.vocab_size) for _ in range(length)]
        sample = Sample(f"s{i:05d}", Prompt(f"p{i}", (tokens[0],)))
        sample.append_response(tokens[1:], [-math.log(128)] * (length - 1), weight_version=0, stop_reason="stop")
        sample.reward, sample.advantage = float(i % 2), numbers.uniform(-1, 1) or 1.0
        samples.append(sample)
    return samples


def _batch(here: World, lengths: Sequence[int]) -> TrainBatch:
    batch = here.batch(_samples(lengths), sum(lengths))
    (micro_batch,) = batch.micro_batches
    assert micro_batch.token_ids.numel() == sum(lengths)
    return batch


def _forget_peak() -> None:
    """What earlier jobs of this process left, free or as the highest mark: part of the peak would hide below it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(rank: int, world_size: int, lengths: Sequence[int]) -> LongStep:
    """Forward, backward and update on one micro-batch of sequences of these lengths."""
    with world(ONE) as here:
        policy = here.policy(SHAPE, optimizer=OptimizerConfig(lr=1e-2))
        # What the first update allocates once is not the long sequence's.
        policy.update(_batch(here, [64, 64]), gppo())
        batch = _batch(here, lengths)
        before = {name: parameter.detach().clone() for name, parameter in policy.stage.core.named_parameters()}
        _forget_peak()
        held, started = _peak_bytes(), time.perf_counter()
        report = policy.update(batch, gppo()).report
        seconds = time.perf_counter() - started
        moved = all((p.detach() != before[name]).any() for name, p in policy.stage.core.named_parameters())
        return LongStep(
            sum(lengths), len(lengths), report.metrics, report.grad_norm, moved, seconds, _peak_bytes() - held
        )


def prefixes(rank: int, world_size: int, length: int, cuts: Sequence[int]) -> tuple[np.ndarray, Arrays]:
    """Log-probs of a sequence, and of prefixes of it alone."""
    with world(ONE) as here:
        policy = here.policy(SHAPE, optimizer=OptimizerConfig(lr=1e-2))
        (sample,) = _samples([length])

        def logprobs(cut: int) -> np.ndarray:
            short = Sample("s", sample.prompt)
            tokens = sample.token_ids[1:cut]
            short.append_response(tokens, [-1.0] * len(tokens), weight_version=0, stop_reason="stop")
            short.reward, short.advantage = 1.0, 1.0
            (stats,) = policy.stats(here.batch([short], cut))
            return to_array(stats.logprobs)

        return logprobs(length), {str(cut): logprobs(cut) for cut in cuts}
