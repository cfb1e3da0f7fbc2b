"""From samples to the forward passes of an optimizer update: the shift, the padding, and every global count.

Which sample goes where is planned in balance.py. What holds for the batches that `pack` makes of one update, one batch
a data-parallel rank (each is a test):

1. Every sample is in exactly one micro-batch of one rank, whole, in one piece.
2. All ranks have the same number of micro-batches, at least one and a multiple of `num_micro_batches_multiple` (the
   interleaved pipeline schedule counts in pipeline sizes). With `common_length` all micro-batches of the update have
   the same number of positions T: pipeline stages exchange [T, H] of one shape, and collectives meet.
3. A context-parallel rank holds T / context_parallel_size positions: at most `max_tokens`, a multiple of `multiple_of`.
4. `cu_seqlens` rises strictly from 0 to T. With context parallelism each sequence, padding included, takes a multiple
   of 2 x context_parallel_size positions: every rank holds two chunks of it. What a sample does not fill stands at its
   end and has no token, label or loss; `true_lengths` says how much it fills, and is all of it without context
   parallelism.
5. What fills a micro-batch up to T are padding sequences, none longer than the longest sample, with no loss. A
   micro-batch of nothing else occurs only with fewer samples than micro-batches, and is counted.
6. Position t of a sample holds what concerns PREDICTING the next token (types.py): token_scale, nll_scale, advantages
   and rollout_logprobs are shifted by one against the sample's rows, and the last position of each sequence is 0.
7. With token-mean the token_scale of the whole update adds up to 1, its nll_scale to `sft_loss_coef` (0 without a
   correct sample); other modes weigh by `aggregation.py`, the joint SFT term over its own samples alone.
8. Counts and sums do not depend on the `PackSpec`; each is the same number on every rank. The exception is the number
   of micro-batches without a sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_klear.data.aggregation import Aggregation
from megatron_klear.data.balance import Bin, Limits, Plan, TokenCost, make_plan
from megatron_klear.errors import DataError
from megatron_klear.types import MicroBatch, Sample, TrainBatch

_INT_FIELDS = ("token_ids", "labels", "positions", "sequence_ids", "cu_seqlens", "true_lengths", "sample_index")
_FLOAT_FIELDS = ("token_scale", "nll_scale", "advantages", "rollout_logprobs", "rewards")
# Header of a flattened batch: these counts, then (T, sequences, max_seqlen) for each micro-batch.
_HEADER = ("num_micro_batches", "num_loss_tokens", "num_samples", "num_sft_tokens", "num_dummy_micro_batches")
_SIZES = 3


@dataclass(frozen=True, slots=True)
class PackSpec:
    """How far the work is split. `max_tokens` is per micro-batch and rank, padding included.

    Ranks of a context-parallel group share their micro-batches, so one may have `max_tokens` positions for each.
    """

    data_parallel_size: int
    max_tokens: int
    multiple_of: int = 1
    """A rank's positions are a multiple of it (the tensor-parallel size under sequence parallelism)."""
    context_parallel_size: int = 1
    num_micro_batches_multiple: int = 1
    """A rank's micro-batches are a multiple of it (the pipeline size with virtual stages)."""
    common_length: bool = True
    """One T for the whole update. Without it T fits each micro-batch: where none meets another in a collective."""
    cost: TokenCost = field(default_factory=TokenCost)
    """What is balanced over ranks."""

    @property
    def alignment(self) -> int:
        """Each sequence takes a multiple of it: two chunks a context-parallel rank."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def unit(self) -> int:
        """T is a multiple of it."""
        return math.lcm(self.alignment, self.context_parallel_size * self.multiple_of)

    @property
    def budget(self) -> int:
        """Most positions a micro-batch can have."""
        return self.max_tokens * self.context_parallel_size // self.unit * self.unit

    def padded(self, length: int) -> int:
        """Positions of a sequence of `length` tokens."""
        return -(-length // self.alignment) * self.alignment

    def plan(self, lengths: Sequence[int]) -> Plan:
        """Where sequences of these `lengths` go; each must fit the budget."""
        limits = Limits(
            self.data_parallel_size,
            self.budget,
            unit=self.unit,
            count_multiple=self.num_micro_batches_multiple,
            common_length=self.common_length,
        )
        return make_plan([self.padded(length) for length in lengths], limits, self.cost)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What one trained position of each sample counts, global divisions included; keyed by the sample's index."""

    num_loss_tokens: int
    num_sft_tokens: int
    token: list[float]
    nll: list[float]


def split_updates(samples: Sequence[Sample], global_batch_size: int) -> list[list[Sample]]:
    """Samples of each update: as few updates as `global_batch_size` allows, of sizes that differ by 1 at most."""
    if not samples:
        raise DataError("no samples to train on; expected at least one (were all of them dropped?)")
    num_updates = -(-len(samples) // global_batch_size)
    borders = [len(samples) * i // num_updates for i in range(num_updates + 1)]
    return [list(samples[start:stop]) for start, stop in itertools.pairwise(borders)]


def pack(
    samples: Sequence[Sample],
    spec: PackSpec,
    *,
    sft_loss_coef: float = 0.0,
    aggregation: Aggregation = Aggregation(),  # noqa: B008  frozen
) -> list[TrainBatch]:
    """ONE optimizer update as one batch a data-parallel rank. A pure function; the module docstring says what holds.

    Raises `DataError` for no samples, no token with loss, and a sample that fits no micro-batch.
    """
    _check(samples, spec)
    weights = _weights(samples, sft_loss_coef, aggregation)
    lengths = [len(sample.token_ids) for sample in samples]
    plan = spec.plan(lengths)
    longest = spec.padded(max(lengths))

    def micro_batch(one: Bin, num_positions: int) -> MicroBatch:
        chosen = [samples[index] for index in one]
        sizes = [spec.padded(lengths[index]) for index in one]
        # Padding no longer than this micro-batch's own samples, so that it does not widen its attention; only a
        # micro-batch without samples takes the update's longest.
        sizes += _padding(num_positions - sum(sizes), max(sizes, default=longest))
        return _micro_batch(chosen, one, sizes, weights)

    return [
        TrainBatch(
            micro_batches=[micro_batch(one, size) for one, size in zip(bins, positions, strict=True)],
            num_loss_tokens=weights.num_loss_tokens,
            num_samples=len(samples),
            num_sft_tokens=weights.num_sft_tokens,
            num_dummy_micro_batches=plan.num_empty,
        )
        for bins, positions in zip(plan.ranks, plan.positions, strict=True)
    ]


def _check(samples: Sequence[Sample], spec: PackSpec) -> None:
    if not samples:
        raise DataError("no samples to pack; expected at least one (were all of them dropped?)")
    for sample in samples:
        length = len(sample.token_ids)
        assert length == len(sample.loss_mask) == len(sample.rollout_logprobs), f"{sample.sample_id}: uneven rows"
        if spec.padded(length) > spec.budget:
            raise DataError(f"sample {sample.sample_id} has {length} tokens{_why_too_long(length, spec)}")


def _why_too_long(length: int, spec: PackSpec) -> str:
    padded, size = spec.padded(length), spec.context_parallel_size
    limit = spec.max_tokens * size
    text = f", padded to {padded} for context parallelism (2 x {size})" if padded > length else ""
    text += f", more than batch.max_tokens_per_gpu = {spec.max_tokens}"
    text += f" x context_parallel_size {size} = {limit}" if size > 1 else ""
    text += f", rounded down to a multiple of {spec.unit}" if spec.budget < limit else ""
    return text + "; raise it, or lower the longest prompt or response"


def _weights(samples: Sequence[Sample], sft_loss_coef: float, aggregation: Aggregation) -> _Weights:
    # The first token of a sequence is never predicted, so its mask counts nowhere.
    lengths = [sum(sample.loss_mask[1:]) for sample in samples]
    correct = [n if sample.reward == 1.0 else 0 for n, sample in zip(lengths, samples, strict=True)]
    num_loss_tokens = sum(lengths)
    if num_loss_tokens == 0:
        raise DataError(
            f"none of the {len(samples)} samples of this update has a token with loss; expected at least one"
            " (are the responses empty?)"
        )
    nll = [sft_loss_coef * weight for weight in aggregation.token_weights(correct)]
    return _Weights(num_loss_tokens, sum(correct), token=aggregation.token_weights(lengths), nll=nll)


def _padding(num_missing: int, longest: int) -> list[int]:
    """Lengths of the padding sequences that fill `num_missing` positions."""
    whole, rest = divmod(num_missing, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _micro_batch(chosen: Sequence[Sample], indices: Bin, sizes: Sequence[int], weights: _Weights) -> MicroBatch:
    """`sizes` are the positions of each sequence: the samples', then those of padding."""
    true_lengths = [*(len(sample.token_ids) for sample in chosen), *sizes[len(chosen) :]]
    widths = torch.tensor(sizes)
    ends = widths.cumsum(0)
    starts = ends - widths

    positions = torch.arange(sum(sizes)) - starts.repeat_interleave(widths)
    is_sample = torch.arange(len(sizes)) < len(chosen)
    filled = positions < (torch.tensor(true_lengths) * is_sample).repeat_interleave(widths)

    def per_position(rows: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(sum(sizes), dtype=dtype)
        # One conversion for all rows: a tensor of each would take most of the time of packing.
        flat[filled] = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
        return flat

    def of_sequences(numbers: Sequence[float]) -> Tensor:
        return torch.tensor([*numbers, *[0.0] * (len(sizes) - len(numbers))], dtype=torch.float32)

    def per_sequence(numbers: Sequence[float]) -> Tensor:
        return of_sequences(numbers).repeat_interleave(widths)

    trained = per_position([[*sample.loss_mask[1:], 0] for sample in chosen], torch.float32)
    return MicroBatch(
        token_ids=per_position([sample.token_ids for sample in chosen], torch.int64),
        labels=per_position([[*sample.token_ids[1:], 0] for sample in chosen], torch.int64),
        positions=positions,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        true_lengths=torch.tensor(true_lengths, dtype=torch.int32),
        sequence_ids=torch.arange(len(sizes)).repeat_interleave(widths),
        max_seqlen=max(sizes),
        sample_index=torch.tensor([*indices, *[-1] * (len(sizes) - len(indices))]),
        token_scale=trained * per_sequence([weights.token[i] for i in indices]),
        nll_scale=trained * per_sequence([weights.nll[i] for i in indices]),
        advantages=trained * per_sequence([sample.advantage for sample in chosen]),
        rollout_logprobs=per_position([[*sample.rollout_logprobs[1:], 0.0] for sample in chosen], torch.float32),
        rewards=of_sequences([sample.training_reward or 0.0 for sample in chosen]),
    )


def flatten(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """The batch as one int64 and one float32 tensor, for the way to another rank. The ints begin with the layout."""
    header = [len(batch.micro_batches), batch.num_loss_tokens, batch.num_samples, batch.num_sft_tokens]
    header.append(batch.num_dummy_micro_batches)
    ints: list[Tensor] = []
    floats: list[Tensor] = []
    for one in batch.micro_batches:
        header += [one.token_ids.numel(), one.cu_seqlens.numel() - 1, one.max_seqlen]
        ints += [one.token_ids, one.labels, one.positions, one.sequence_ids]
        ints += [one.cu_seqlens.to(torch.int64), one.true_lengths.to(torch.int64), one.sample_index]
        floats += [one.token_scale, one.nll_scale, one.advantages, one.rollout_logprobs, one.rewards]
    device = batch.micro_batches[0].token_ids.device
    return torch.cat([torch.tensor(header, device=device), *ints]), torch.cat(floats)


def unflatten(ints: Tensor, floats: Tensor) -> TrainBatch:
    """The batch that `flatten` was given, on the tensors' device. Its tensors share the memory of these two."""
    num_micro_batches, *counts = ints[: len(_HEADER)].tolist()
    start = len(_HEADER) + _SIZES * num_micro_batches
    sizes = ints[len(_HEADER) : start].view(num_micro_batches, _SIZES).tolist()
    # The last fields are per sequence, all others per position.
    int_sizes = [n for t, s, _ in sizes for n in (*[t] * (len(_INT_FIELDS) - 3), s + 1, s, s)]
    float_sizes = [n for t, s, _ in sizes for n in (*[t] * (len(_FLOAT_FIELDS) - 1), s)]
    int_parts, float_parts = iter(ints[start:].split(int_sizes)), iter(floats.split(float_sizes))
    micro_batches: list[MicroBatch] = []
    for _, _, max_seqlen in sizes:
        rows = {name: next(int_parts) for name in _INT_FIELDS} | {name: next(float_parts) for name in _FLOAT_FIELDS}
        rows |= {name: rows[name].to(torch.int32) for name in ("cu_seqlens", "true_lengths")}
        micro_batches.append(MicroBatch(max_seqlen=max_seqlen, **rows))
    return TrainBatch(micro_batches, *counts)
