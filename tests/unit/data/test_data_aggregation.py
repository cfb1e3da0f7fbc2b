"""Aggregation modes against plain formulas, alone and through `pack`, whatever the split."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_klear.config.loss import LossAggMode
from megatron_klear.data.aggregation import Aggregation
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.types import Prompt, Sample

MODES: tuple[LossAggMode, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
FACTOR = 40.0
every_mode = pytest.mark.parametrize("mode", MODES)
SPECS = [PackSpec(1, 400), PackSpec(1, 32), PackSpec(2, 40, 4), PackSpec(5, 32), PackSpec(16, 64, 8)]


def ragged_sample(number: int, mask: Sequence[int], reward: float | None) -> Sample:
    """A prompt of two tokens and a response of which `mask` is trained; log-probs -0.1, -0.2, ... of their own."""
    sample = Sample(f"s{number}", Prompt(f"p{number}", (1, 2)), reward=reward)
    logprobs = [-0.1 * (i + 1) - number for i in range(len(mask))]
    sample.append_response([3] * len(mask), logprobs, weight_version=0, stop_reason="stop")
    sample.loss_mask[2:] = list(mask)
    return sample


RAGGED = [
    ragged_sample(0, [1] * 9, 1.0),
    ragged_sample(1, [1, 0, 1], -1.0),
    ragged_sample(2, [], 1.0),
    ragged_sample(3, [0, 0, 0, 0], 1.0),  # correct, and nothing of it is trained
    ragged_sample(4, [1] * 20, -1.0),
    ragged_sample(5, [0, 1, 1, 1, 0], 1.0),
    ragged_sample(6, [1], None),
    ragged_sample(7, [1] * 6, 0.999),
]


def mean_of(samples: Sequence[Sample], mode: LossAggMode) -> float:
    """The aggregated number as a person would write it, of the log-probs of trained tokens."""
    rows = [
        [x for x, on in zip(s.rollout_logprobs, s.loss_mask, strict=True) if on] for s in samples if sum(s.loss_mask)
    ]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
    divisors = {"seq-mean-token-sum": lambda row: 1, "seq-mean-token-mean": len}
    divisor = divisors.get(mode, lambda row: FACTOR)
    return math.fsum(math.fsum(row) / divisor(row) for row in rows) / len(rows)


def aggregation(mode: LossAggMode) -> Aggregation:
    return Aggregation(mode, FACTOR if mode == "seq-mean-token-sum-norm" else None)


def packed_means(samples: Sequence[Sample], spec: PackSpec, mode: LossAggMode) -> tuple[float, float]:
    """Sums over all ranks and micro-batches of scale x log-prob, and of nll_scale x log-prob."""
    batches = pack(samples, spec, sft_loss_coef=0.5, aggregation=aggregation(mode))
    parts = [one for batch in batches for one in batch.micro_batches]
    return (
        math.fsum((one.token_scale.double() * one.rollout_logprobs.double()).sum().item() for one in parts),
        math.fsum((one.nll_scale.double() * one.rollout_logprobs.double()).sum().item() for one in parts),
    )


@every_mode
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_loss_is_the_plain_formula_whatever_the_split(mode: LossAggMode, spec: PackSpec) -> None:
    policy, sft = packed_means(RAGGED, spec, mode)
    correct = [sample for sample in RAGGED if sample.reward == 1.0]
    assert policy == pytest.approx(mean_of(RAGGED, mode), rel=1e-6)
    assert sft == pytest.approx(0.5 * mean_of(correct, mode), rel=1e-6)


def test_the_modes_differ_on_the_ragged_samples() -> None:
    numbers = {round(mean_of(RAGGED, mode), 6) for mode in MODES}
    assert len(numbers) == 4


@every_mode
def test_a_sample_without_trained_tokens_counts_nowhere(mode: LossAggMode) -> None:
    counted = [sample for sample in RAGGED if sum(sample.loss_mask)]
    assert len(counted) == 6
    assert packed_means(RAGGED, SPECS[0], mode) == pytest.approx(packed_means(counted, SPECS[0], mode), rel=1e-7)


@every_mode
def test_without_a_correct_sample_there_is_no_joint_sft(mode: LossAggMode) -> None:
    wrong = [sample for sample in RAGGED if sample.reward != 1.0]
    assert packed_means(wrong, SPECS[0], mode)[1] == 0.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [0.1, 0.0, 0.1]),
        ("seq-mean-token-sum", [0.5, 0.0, 0.5]),
        ("seq-mean-token-mean", [0.25, 0.0, 0.0625]),
        ("seq-mean-token-sum-norm", [0.0125, 0.0, 0.0125]),
    ],
)
def test_token_weights(mode: LossAggMode, expected: list[float]) -> None:
    assert aggregation(mode).token_weights([2, 0, 8]) == pytest.approx(expected)


@every_mode
def test_nothing_trained_has_no_weight(mode: LossAggMode) -> None:
    assert aggregation(mode).token_weights([0, 0]) == [0.0, 0.0]
    assert aggregation(mode).token_weights([]) == []


def test_the_constant_is_needed() -> None:
    with pytest.raises(AssertionError, match="seq-mean-token-sum-norm needs its constant"):
        Aggregation("seq-mean-token-sum-norm").token_weights([3])


@settings(deadline=None, max_examples=40)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=12),
    mode=st.sampled_from(MODES),
    spec=st.sampled_from(SPECS),
)
def test_scales_are_constant_inside_a_sample_and_sum_to_its_share(
    masks: list[list[int]], mode: LossAggMode, spec: PackSpec
) -> None:
    assume(any(any(mask) for mask in masks))
    samples = [ragged_sample(i, mask, 1.0 if i % 2 else 0.0) for i, mask in enumerate(masks)]
    found: dict[int, list[float]] = defaultdict(list)
    for batch in pack(samples, spec, aggregation=aggregation(mode)):
        for one in batch.micro_batches:
            owner = one.sample_index[one.sequence_ids]
            for index, scale in zip(owner.tolist(), one.token_scale.tolist(), strict=True):
                if scale:
                    found[index].append(scale)
    lengths = [sum(mask) for mask in masks]
    num_sequences = sum(length > 0 for length in lengths)
    assert {index: len(scales) for index, scales in found.items()} == {i: n for i, n in enumerate(lengths) if n}
    for index, scales in found.items():
        share = {
            "token-mean": lengths[index] / sum(lengths),
            "seq-mean-token-sum": lengths[index] / num_sequences,
            "seq-mean-token-mean": 1 / num_sequences,
            "seq-mean-token-sum-norm": lengths[index] / num_sequences / FACTOR,
        }[mode]
        assert len(set(scales)) == 1
        assert sum(scales) == pytest.approx(share, rel=1e-5)


def test_the_default_is_token_mean() -> None:
    (plain,), (named,) = pack(RAGGED, SPECS[0]), pack(RAGGED, SPECS[0], aggregation=Aggregation("token-mean"))
    assert torch.equal(plain.micro_batches[0].token_scale, named.micro_batches[0].token_scale)
