"""From samples to the forward passes of an optimizer update: the plan, the shift, and every global count.

What holds for the batches that `pack` makes of one update, one batch a data-parallel rank (each is a test):

1. Every sample is in exactly one micro-batch of one rank, whole, in one piece.
2. All ranks have the same number of micro-batches, at least one, and all micro-batches of the update have the same
   number of positions T: pipeline stages exchange [T, H] of one shape, and collectives meet.
3. T <= max_tokens, and T is a multiple of `multiple_of`.
4. `cu_seqlens` rises strictly from 0 to T; what fills a micro-batch up to T are padding sequences, none of them longer
   than the longest sample, with no loss.
5. Position t of a sample holds what concerns PREDICTING the next token (types.py): token_scale, nll_scale, advantages
   and rollout_logprobs are shifted by one against the sample's rows, and the last position of each sequence is 0.
6. With token-mean the token_scale of the whole update adds up to 1, its nll_scale to `sft_loss_coef` (0 without a
   correct sample); other modes weigh by `aggregation.py`, the joint SFT term over its own samples alone.
7. Counts and sums do not depend on `data_parallel_size` or `max_tokens`; each is the same number on every rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.data.aggregation import Aggregation
from megatron_klear.errors import DataError
from megatron_klear.types import MicroBatch, Sample, TrainBatch

_INT_FIELDS = ("token_ids", "labels", "positions", "sequence_ids", "cu_seqlens", "sample_index")
_FLOAT_FIELDS = ("token_scale", "nll_scale", "advantages", "rollout_logprobs", "rewards")
# Header of a flattened batch: these counts, then (T, sequences, max_seqlen) for each micro-batch.
_HEADER = ("num_micro_batches", "num_loss_tokens", "num_samples", "num_sft_tokens")
_SIZES = 3

Bin = list[int]
"""Indices of the samples of one micro-batch, ascending."""


@dataclass(frozen=True, slots=True)
class PackSpec:
    """How far the work is split. `max_tokens` is per micro-batch and rank, padding included."""

    data_parallel_size: int
    max_tokens: int
    multiple_of: int = 1
    """T is padded to a multiple of it (the tensor-parallel size under sequence parallelism)."""

    @property
    def budget(self) -> int:
        """Most positions a micro-batch can have."""
        return self.max_tokens // self.multiple_of * self.multiple_of


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
    bins = _assign(samples, spec)
    longest_bin = max(_load(samples, one) for one in bins)
    num_positions = -(-longest_bin // spec.multiple_of) * spec.multiple_of
    longest_sample = max(len(sample.token_ids) for sample in samples)
    micro_batches = [
        _micro_batch([samples[i] for i in one], one, num_positions, longest=longest_sample, weights=weights)
        for one in bins
    ]
    return [
        TrainBatch(
            micro_batches=micro_batches[rank :: spec.data_parallel_size],
            num_loss_tokens=weights.num_loss_tokens,
            num_samples=len(samples),
            num_sft_tokens=weights.num_sft_tokens,
        )
        for rank in range(spec.data_parallel_size)
    ]


def _check(samples: Sequence[Sample], spec: PackSpec) -> None:
    if not samples:
        raise DataError("no samples to pack; expected at least one (were all of them dropped?)")
    for sample in samples:
        length = len(sample.token_ids)
        assert length == len(sample.loss_mask) == len(sample.rollout_logprobs), f"{sample.sample_id}: uneven rows"
        if length > spec.budget:
            padded = f", rounded down to a multiple of {spec.multiple_of}" if spec.budget < spec.max_tokens else ""
            raise DataError(
                f"sample {sample.sample_id} has {length} tokens, more than batch.max_tokens_per_gpu = {spec.max_tokens}"
                f"{padded}; raise it, or lower the longest prompt or response"
            )


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


def _load(samples: Sequence[Sample], one: Bin) -> int:
    return sum(len(samples[index].token_ids) for index in one)


def _assign(samples: Sequence[Sample], spec: PackSpec) -> list[Bin]:
    """Bins of all ranks (bin i is of rank i modulo their number): the fewest that the greedy rule keeps in budget."""
    total = sum(len(sample.token_ids) for sample in samples)
    num_micro_batches = -(-total // (spec.data_parallel_size * spec.budget))
    while True:
        bins = _balance(samples, num_micro_batches * spec.data_parallel_size)
        if max(_load(samples, one) for one in bins) <= spec.budget:
            return bins
        # Ends at the latest when each sample has a bin of its own.
        num_micro_batches += 1


def _balance(samples: Sequence[Sample], num_bins: int) -> list[Bin]:
    """Longest sample first, each into the bin that is lightest so far (of equals, the first)."""
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i))
    chosen: list[Bin] = [[] for _ in range(num_bins)]
    lightest = [(0, number) for number in range(num_bins)]
    for index in order:
        load, number = lightest[0]
        chosen[number].append(index)
        heapq.heapreplace(lightest, (load + len(samples[index].token_ids), number))
    return [sorted(indices) for indices in chosen]


def _padding(num_missing: int, longest: int) -> list[int]:
    """Lengths of the padding sequences that fill `num_missing` positions."""
    whole, rest = divmod(num_missing, longest)
    return [longest] * whole + [rest] * (rest > 0)


def _micro_batch(
    one: Sequence[Sample], indices: Bin, num_positions: int, *, longest: int, weights: _Weights
) -> MicroBatch:
    real = [len(sample.token_ids) for sample in one]
    # Padding no longer than this micro-batch's own samples, so that it does not widen its attention; only a
    # micro-batch without samples takes the update's longest.
    lengths = real + _padding(num_positions - sum(real), max(real, default=longest))
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)

    def per_position(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(num_positions, dtype=dtype)
        flat[: sum(real)] = torch.tensor([number for row in rows for number in row], dtype=dtype)
        return flat

    def of_sequences(numbers: Sequence[float]) -> Tensor:
        return torch.tensor([*numbers, *[0.0] * (len(lengths) - len(numbers))], dtype=torch.float32)

    def per_sequence(numbers: Sequence[float]) -> Tensor:
        return of_sequences(numbers).repeat_interleave(sizes)

    trained = per_position([[*sample.loss_mask[1:], 0] for sample in one], torch.float32)
    return MicroBatch(
        token_ids=per_position([sample.token_ids for sample in one], torch.int64),
        labels=per_position([[*sample.token_ids[1:], 0] for sample in one], torch.int64),
        positions=torch.arange(num_positions) - (ends - sizes).repeat_interleave(sizes),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(sizes),
        max_seqlen=max(lengths),
        sample_index=torch.tensor([*indices, *[-1] * (len(lengths) - len(indices))]),
        token_scale=trained * per_sequence([weights.token[i] for i in indices]),
        nll_scale=trained * per_sequence([weights.nll[i] for i in indices]),
        advantages=trained * per_sequence([sample.advantage for sample in one]),
        rollout_logprobs=per_position([[*sample.rollout_logprobs[1:], 0.0] for sample in one], torch.float32),
        rewards=of_sequences([sample.training_reward or 0.0 for sample in one]),
    )


def flatten(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """The batch as one int64 and one float32 tensor, for the way to another rank. The ints begin with the layout."""
    header = [len(batch.micro_batches), batch.num_loss_tokens, batch.num_samples, batch.num_sft_tokens]
    ints: list[Tensor] = []
    floats: list[Tensor] = []
    for one in batch.micro_batches:
        header += [one.token_ids.numel(), one.cu_seqlens.numel() - 1, one.max_seqlen]
        ints += [one.token_ids, one.labels, one.positions, one.sequence_ids]
        ints += [one.cu_seqlens.to(torch.int64), one.sample_index]
        floats += [one.token_scale, one.nll_scale, one.advantages, one.rollout_logprobs, one.rewards]
    device = batch.micro_batches[0].token_ids.device
    return torch.cat([torch.tensor(header, device=device), *ints]), torch.cat(floats)


def unflatten(ints: Tensor, floats: Tensor) -> TrainBatch:
    """The batch that `flatten` was given, on the tensors' device. Its tensors share the memory of these two."""
    num_micro_batches, num_loss_tokens, num_samples, num_sft_tokens = ints[: len(_HEADER)].tolist()
    start = len(_HEADER) + _SIZES * num_micro_batches
    sizes = ints[len(_HEADER) : start].view(num_micro_batches, _SIZES).tolist()
    # The last fields are per sequence, all others per position.
    int_sizes = [n for t, s, _ in sizes for n in (*[t] * (len(_INT_FIELDS) - 2), s + 1, s)]
    float_sizes = [n for t, s, _ in sizes for n in (*[t] * (len(_FLOAT_FIELDS) - 1), s)]
    int_parts, float_parts = iter(ints[start:].split(int_sizes)), iter(floats.split(float_sizes))
    micro_batches: list[MicroBatch] = []
    for _, _, max_seqlen in sizes:
        rows = {name: next(int_parts) for name in _INT_FIELDS} | {name: next(float_parts) for name in _FLOAT_FIELDS}
        rows["cu_seqlens"] = rows["cu_seqlens"].to(torch.int32)
        micro_batches.append(MicroBatch(max_seqlen=max_seqlen, **rows))
    return TrainBatch(micro_batches, num_loss_tokens, num_samples, num_sft_tokens)
