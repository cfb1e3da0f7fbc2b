"""Sample rollouts for the report: text, tokens, ratios and clip cells as the last update of a step saw them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_klear.losses.policy import ClippedLoss
from megatron_klear.losses.terms import RlLoss
from megatron_klear.parallel.broadcast import from_last_stage
from megatron_klear.parallel.context import whole_rows
from megatron_klear.protocols import PolicyLoss
from megatron_klear.report.samples import SampleRecord
from megatron_klear.training.run import MainSide, Run
from megatron_klear.types import MicroBatch, Sample, TrainBatch
from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule

SAMPLES_PER_STEP = 4
# A loss of your own has no cells: its ratios are shown, and nothing counts as clipped.
_NO_CLIP = ClippedLoss(ClipRule(eps_low=None, eps_high=float("inf")))


def record_samples(
    run: Run, step: int, batch: TrainBatch, logprobs: list[Tensor], samples: Sequence[Sample], loss: PolicyLoss
) -> None:
    """Record a few samples of this rank's first micro-batch. A collective along the pipeline and the context.

    `samples` are those of the update, in packing order, on rank 0.
    """
    first = batch.micro_batches[0]
    policy = loss.policy if isinstance(loss, RlLoss) else _NO_CLIP
    seen = _seen(first, logprobs[0], policy) if logprobs else None
    if seen is not None:
        seen = whole_rows(seen.t(), first, run.context).t()
    rows = from_last_stage(seen, (5, first.token_ids.numel() * run.context.topology.context_size), run.context).cpu()
    if run.main is None:
        return
    index, starts = first.sample_index.tolist(), first.cu_seqlens.tolist()
    chosen = [(samples[number], begin) for number, begin in zip(index, starts[:-1], strict=True) if number >= 0]
    spread = chosen[:: max(1, len(chosen) // SAMPLES_PER_STEP)][:SAMPLES_PER_STEP]
    run.main.recorder.log_samples(step, [_record(run.main, one, rows[:, begin:]) for one, begin in spread])


def _seen(micro_batch: MicroBatch, current: Tensor, policy: ClippedLoss) -> Tensor:
    """[5, T] current log-prob, ratio, clipped low, clipped high, advantage."""
    c = policy.coefficients(current, micro_batch)
    return torch.stack((current, c.ratio, c.clipped_low.float(), c.clipped_high.float(), micro_batch.advantages))


def _record(main: MainSide, sample: Sample, rows: Tensor) -> SampleRecord:
    """`rows` [5, ...] start at the sample's first position."""
    first = len(sample.prompt.token_ids) - 1
    current, ratios, low, high, advantages = rows[:, first : first + len(sample.response_ids)].tolist()
    decode = main.tokenizer.decode
    return SampleRecord(
        sample_id=sample.sample_id,
        prompt=decode(sample.prompt.token_ids),
        response=decode(sample.response_ids),
        answer=sample.prompt.answer,
        reward=sample.reward,
        reason=sample.reward_reason,
        stop_reason=sample.stop_reason,
        tokens=tuple(decode([token]) for token in sample.response_ids),
        rollout_logprobs=tuple(sample.rollout_logprobs[first + 1 :]),
        current_logprobs=tuple(current),
        ratios=tuple(ratios),
        cells=tuple(
            "clipped_low" if a else "clipped_high" if b else "in_range" for a, b in zip(low, high, strict=True)
        ),
        advantages=tuple(advantages),
        pieces=tuple(sample.pieces),
    )
