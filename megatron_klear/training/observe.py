"""Sample rollouts for the report: text, tokens, ratios and clip cells as the last update of a step saw them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megatron_klear.losses.policy import ClippedPolicyLoss
from megatron_klear.parallel.broadcast import from_last_stage
from megatron_klear.report.record import SampleRecord
from megatron_klear.training.run import MainSide, Run
from megatron_klear.types import RolloutBatch, Sample, TrainBatch
from megatron_klear_kernels.linear_policy_loss.coefficients import policy_coefficients

SAMPLES_PER_STEP = 4


def record_samples(
    run: Run, step: int, batch: TrainBatch, logprobs: list[Tensor], rollout: RolloutBatch, loss: ClippedPolicyLoss
) -> None:
    """Record a few samples of this rank's first micro-batch. A collective along the pipeline."""
    first = batch.micro_batches[0]
    rows = torch.stack((first.old_logprobs, logprobs[0])) if logprobs else None
    old, current = from_last_stage(rows, (2, first.token_ids.numel()), run.context).cpu()
    if run.main is None:
        return
    by_tokens: dict[tuple[int, ...], list[Sample]] = {}
    for sample in rollout.samples:
        by_tokens.setdefault(tuple(sample.token_ids), []).append(sample)
    chosen: list[tuple[Sample, int]] = []
    starts = first.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(starts):
        # Sequences are found again by their tokens; padding sequences are nobody's. Twins have the same numbers.
        twins = by_tokens.get(tuple(first.token_ids[begin:end].tolist()))
        if twins:
            chosen.append((twins.pop(), begin))
    chosen.sort(key=lambda pair: pair[0].sample_id)
    spread = chosen[:: max(1, len(chosen) // SAMPLES_PER_STEP)][:SAMPLES_PER_STEP]
    records = [_record(run.main, sample, old[begin:], current[begin:], loss) for sample, begin in spread]
    run.main.recorder.log_samples(step, records)


def _record(main: MainSide, sample: Sample, old: Tensor, current: Tensor, loss: ClippedPolicyLoss) -> SampleRecord:
    """`old` and `current` start at the sample's first position."""
    first = len(sample.prompt.token_ids) - 1
    own = slice(first, first + len(sample.response_ids))
    coefficients = policy_coefficients(
        current[own] - old[own],
        torch.full((len(sample.response_ids),), sample.advantage),
        eps_low=loss.eps_low,
        eps_high=loss.eps_high,
        keep_low=loss.keep,
        keep_high=loss.keep,
    )
    flags = zip(coefficients.clipped_low.tolist(), coefficients.clipped_high.tolist(), strict=True)
    return SampleRecord(
        sample_id=sample.sample_id,
        prompt=main.tokenizer.decode(sample.prompt.token_ids),
        response=main.tokenizer.decode(sample.response_ids),
        answer=sample.prompt.answer,
        reward=sample.reward,
        reason=sample.reward_reason,
        advantage=sample.advantage,
        tokens=tuple(main.tokenizer.decode([token]) for token in sample.response_ids),
        rollout_logprobs=tuple(sample.rollout_logprobs[first + 1 :]),
        current_logprobs=tuple(current[own].tolist()),
        ratios=tuple(coefficients.ratio.tolist()),
        cells=tuple("clipped_low" if low else "clipped_high" if high else "in_range" for low, high in flags),
        truncated=sample.stop_reason == "length",
        weight_version=sample.weight_version_max if sample.weight_version_max is not None else -1,
    )
