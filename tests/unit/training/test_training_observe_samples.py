"""What the report is told of a sample: numbers of its own tokens, at their own places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers.stages import cpu_context
from megatron_klear.config.loss import GppoLossConfig
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.losses.policy import GppoLoss
from megatron_klear.losses.terms import LossTerms, RlLoss
from megatron_klear.parallel.topology import ParallelContext
from megatron_klear.protocols import PolicyLoss
from megatron_klear.report.samples import SampleRecord
from megatron_klear.training.observe import SAMPLES_PER_STEP, record_samples
from megatron_klear.training.run import Run
from megatron_klear.types import LossOutput, MicroBatch, Piece, Prompt, Sample, TokenStats, TrainBatch

LOSS = RlLoss(GppoLoss(GppoLossConfig(type="gppo")), LossTerms())


class ListRecorder:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.records: list[SampleRecord] = []

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        assert step == 3
        self.records += samples


class NumberTokenizer:
    """Text is the ids."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    with cpu_context() as context:
        yield context


def make_sample(number: int, advantage: float) -> Sample:
    """Prompts of 2 to 4 tokens, responses of 3 to 6."""
    ids = tuple(range(10 * number, 10 * number + 2 + number % 3))
    sample = Sample(f"s{number}", Prompt(f"p{number}", ids, answer="42"), reward=1.0, reward_reason="correct")
    length = 3 + number % 4
    logprobs = [-0.1 * (i + 1) - number for i in range(length)]
    sample.append_response([100 + i for i in range(length)], logprobs, weight_version=5, stop_reason="length")
    sample.advantage = advantage
    return sample


def recorded(
    samples: Sequence[Sample],
    context: ParallelContext,
    loss: PolicyLoss = LOSS,
    *,
    advantages: torch.Tensor | None = None,
) -> list[SampleRecord]:
    """Ratios rise along the micro-batch: position t has the ratio 0.5 + t / 10."""
    (batch,) = pack(samples, PackSpec(data_parallel_size=1, max_tokens=256, multiple_of=16))
    micro_batch = batch.micro_batches[0]
    micro_batch.old_logprobs = -torch.arange(micro_batch.token_ids.numel()).float()
    if advantages is not None:
        micro_batch.advantages = advantages
    current = micro_batch.old_logprobs + ratios(batch).log()
    recorder = ListRecorder()
    main = SimpleNamespace(recorder=recorder, tokenizer=NumberTokenizer())
    run: Any = SimpleNamespace(context=context, main=main)
    record_samples(cast(Run, run), 3, batch, [current], samples, loss)
    return recorder.records


def ratios(batch: TrainBatch) -> torch.Tensor:
    return 0.5 + torch.arange(batch.micro_batches[0].token_ids.numel()) / 10


def test_numbers_are_those_of_the_response_tokens(context: ParallelContext) -> None:
    samples = [make_sample(0, advantage=-1.0), make_sample(1, advantage=1.0)]
    records = {record.sample_id: record for record in recorded(samples, context)}
    assert set(records) == {"s0", "s1"}
    first, second = records["s0"], records["s1"]
    # s0: 2 prompt tokens and 3 of the response, predicted at positions 1 to 3. s1 starts at position 5.
    assert first.ratios == pytest.approx((0.6, 0.7, 0.8), rel=1e-5)
    assert second.ratios == pytest.approx((1.2, 1.3, 1.4, 1.5), rel=1e-5)
    assert first.current_logprobs == pytest.approx([-t + math.log(0.5 + t / 10) for t in (1, 2, 3)], rel=1e-5)
    assert first.rollout_logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert first.cells[:2] == ("clipped_low",) * 2
    assert second.cells == ("in_range", "clipped_high", "clipped_high", "clipped_high")
    assert first.tokens == ("100", "101", "102")
    assert (first.prompt, first.response, first.answer) == ("0 1", "100 101 102", "42")
    assert (first.reward, first.reason, first.mean_advantage) == (1.0, "correct", -1.0)
    assert first.is_truncated and first.pieces == (Piece(3, 5, ""),)


@pytest.mark.parametrize("num_samples", (1, 4, 9))
def test_a_few_samples_stand_for_all(num_samples: int, context: ParallelContext) -> None:
    records = recorded([make_sample(i, advantage=1.0) for i in range(num_samples)], context)
    assert len(records) == min(num_samples, SAMPLES_PER_STEP)
    assert len({record.sample_id for record in records}) == len(records)
    for record in records:
        assert len(record.ratios) == len(record.cells) == len(record.tokens) == len(record.rollout_logprobs)


def test_samples_with_the_same_tokens_are_each_recorded_once(context: ParallelContext) -> None:
    """Siblings often give the same short answer; under shuffled rewards they even differ in their advantage."""
    twin = make_sample(0, advantage=1.0)
    twin.sample_id = "twin"
    records = recorded([make_sample(0, advantage=-1.0), twin], context)
    assert sorted((record.sample_id, record.mean_advantage) for record in records) == [("s0", -1.0), ("twin", 1.0)]


def test_a_sample_keeps_its_numbers_wherever_it_was_packed(context: ParallelContext) -> None:
    """`pack` orders by index inside a micro-batch; the records follow `sample_index`, not the order of the samples."""
    samples = [make_sample(i, advantage=float(i)) for i in range(4)]
    for record in recorded(samples, context):
        number = int(record.sample_id[1:])
        assert record.mean_advantage == number
        assert record.rollout_logprobs[0] == pytest.approx(-0.1 - number)
        assert len(record.tokens) == 3 + number % 4


def test_every_token_keeps_its_own_advantage_weights_and_engine(context: ParallelContext) -> None:
    """With a critic advantages differ from token to token; a partial rollout was drawn by several engines."""
    sample = make_sample(1, advantage=0.0)
    sample.append_response([7, 8], [-1.0, -2.0], weight_version=9, stop_reason="stop", engine="b")
    (record,) = recorded([sample], context, advantages=torch.arange(16.0))
    # Three prompt tokens: the response is predicted at positions 2 to 7.
    assert record.advantages == (2.0, 3.0, 4.0, 5.0, 6.0, 7.0) and record.mean_advantage == 4.5
    assert record.pieces == (Piece(4, 5), Piece(2, 9, "b"))
    assert record.versions == (5, 9) and record.engines == ("", "b")
    assert record.stop_reason == "stop" and not record.is_truncated


def test_a_loss_of_your_own_has_ratios_and_no_cells(context: ParallelContext) -> None:
    def own(stats: TokenStats, micro_batch: MicroBatch) -> LossOutput:
        raise AssertionError("recording evaluates no loss")

    (record,) = recorded([make_sample(1, advantage=1.0)], context, own)
    assert record.ratios == pytest.approx((0.7, 0.8, 0.9, 1.0), rel=1e-5)
    assert set(record.cells) == {"in_range"}
