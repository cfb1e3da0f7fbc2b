"""Packed micro-batches of up to 65,536 tokens: they train, memory grows linearly, and positions see only the past."""

from __future__ import annotations

import numpy as np
import pytest

from dist.jobs_long import LongStep, lognormal_lengths
from dist.pool import Pool
from megatron_klear.models.qwen3.attention import MAX_DENSE_LENGTH

K = 1024


def step(pool: Pool, lengths: list[int]) -> LongStep:
    (done,) = pool.run(1, "dist.jobs_long:step", lengths, timeout=1200)
    print(
        f"{done.num_positions} tokens in {done.num_sequences} sequences of at most {max(lengths)}:"
        f" {done.seconds:.1f} s, {done.peak_bytes / 2**20:.0f} MiB,"
        f" {done.peak_bytes / done.num_positions / 1024:.1f} KiB a token"
    )
    assert done.moved and np.isfinite(done.grad_norm) and done.grad_norm > 0
    # Random weights know nothing: about log 128 a token.
    assert -8.0 < done.metrics["train/logprob"] < -4.0
    return done


def assert_linear(steps: list[LongStep]) -> None:
    """Bytes a token do not grow: fourfold tokens in a quadratic path would take 16 times the bytes.

    Resident memory depends on the allocator and on what else the machine does, hence the room above 1.
    """
    first = steps[0].peak_bytes / steps[0].num_positions
    for one in steps[1:]:
        assert one.peak_bytes / one.num_positions <= 1.6 * first


def test_many_sequences(pool: Pool) -> None:
    """Lengths of a lognormal distribution with a tail of up to 32 times the median."""
    assert_linear([step(pool, lognormal_lengths(n * K, median=256, longest=8 * K)) for n in (16, 32, 64)])


def test_many_short_sequences(pool: Pool) -> None:
    """None too long for the dense path."""
    assert_linear([step(pool, lognormal_lengths(n * K, median=60, longest=MAX_DENSE_LENGTH)) for n in (16, 32, 64)])


def test_one_sequence(pool: Pool) -> None:
    # Of a shorter one a good part hides below the peak that building the model left.
    assert_linear([step(pool, [n * K]) for n in (8, 16)])


@pytest.mark.slow
def test_one_sequence_of_65536(pool: Pool) -> None:
    assert_linear([step(pool, [n * K]) for n in (16, 32, 64)])


def assert_causal(pool: Pool, length: int, cuts: list[int]) -> None:
    whole, alone = pool.run(1, "dist.jobs_long:prefixes", length, cuts, timeout=1200)[0]
    assert whole.shape == (length,) and np.ptp(whole[: cuts[1]]) > 1.0
    for cut in cuts:
        # The last position of a sequence predicts nothing.
        np.testing.assert_allclose(alone[str(cut)][:-1], whole[: cut - 1], rtol=0, atol=1e-4)


def test_a_prefix_alone_has_the_same_logprobs(pool: Pool) -> None:
    """The short ones go through the dense path, the whole does not."""
    assert_causal(pool, 16 * K, [2, 100, MAX_DENSE_LENGTH + 1, 5000])


@pytest.mark.slow
def test_a_prefix_of_65536_alone_has_the_same_logprobs(pool: Pool) -> None:
    assert_causal(pool, 64 * K, [MAX_DENSE_LENGTH, 40 * K, 64 * K - 1])
