"""Each numbered statement of packing.py's docstring is a test here."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_klear.data.balance import TokenCost
from megatron_klear.data.packing import PackSpec, flatten, pack, split_updates, unflatten
from megatron_klear.errors import DataError
from megatron_klear.types import MicroBatch, Prompt, Sample, TrainBatch

MAX_LENGTH = 24


def make_sample(
    number: int, *, prompt: int, response: int, reward: float | None = None, advantage: float = 0.0
) -> Sample:
    """Token ids that name sample and place, so that a micro-batch can be traced back."""
    ids = [1000 * (number + 1) + i for i in range(prompt + response)]
    sample = Sample(f"s{number}", Prompt(f"p{number}", tuple(ids[:prompt])), reward=reward, advantage=advantage)
    sample.append_response(
        ids[prompt:], [-0.01 * (number + 1) * i for i in range(1, response + 1)], weight_version=0, stop_reason="stop"
    )
    return sample


@st.composite
def updates(draw: st.DrawFn) -> list[Sample]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(0, MAX_LENGTH - 8)), min_size=1, max_size=20))
    rewards = st.sampled_from([None, 1.0, -1.0, 0.99])
    samples = [
        make_sample(i, prompt=p, response=r, reward=draw(rewards), advantage=draw(st.floats(-3, 3, width=32)))
        for i, (p, r) in enumerate(shapes)
    ]
    assume(any(sample.num_loss_tokens for sample in samples))
    return samples


specs = st.builds(
    PackSpec,
    data_parallel_size=st.integers(1, 5),
    # Also rounded down to 4 positions for each of 4 context-parallel ranks, the longest sample fits.
    max_tokens=st.integers(MAX_LENGTH + 3, 90),
    multiple_of=st.sampled_from([1, 2, 3, 4]),
    context_parallel_size=st.sampled_from([1, 1, 2, 3, 4]),
    num_micro_batches_multiple=st.sampled_from([1, 1, 2, 3]),
    common_length=st.booleans(),
    cost=st.sampled_from([TokenCost(), TokenCost(1.0, 0.1)]),
)
law = settings(deadline=None, max_examples=60)


def vars_of(one: MicroBatch) -> dict[str, Tensor]:
    return {
        "token_ids": one.token_ids,
        "labels": one.labels,
        "positions": one.positions,
        "cu_seqlens": one.cu_seqlens,
        "sequence_ids": one.sequence_ids,
        "token_scale": one.token_scale,
        "nll_scale": one.nll_scale,
        "advantages": one.advantages,
        "rollout_logprobs": one.rollout_logprobs,
        "true_lengths": one.true_lengths,
        "sample_index": one.sample_index,
        "rewards": one.rewards,
    }


PER_SEQUENCE = ("cu_seqlens", "true_lengths", "sample_index", "rewards")
ANNOTATED = ("old_logprobs", "old_entropy", "reference_logprobs", "policy_weights", "values", "returns")


def all_micro_batches(batches: list[TrainBatch]) -> list[MicroBatch]:
    return [one for batch in batches for one in batch.micro_batches]


def sequences(one: MicroBatch) -> list[slice]:
    borders = one.cu_seqlens.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def total(tensors: list[Tensor]) -> float:
    return float(sum(tensor.double().sum() for tensor in tensors))


def real_sequences(batches: list[TrainBatch], samples: list[Sample]) -> list[tuple[Sample, MicroBatch, slice]]:
    """(sample, micro-batch, place of its tokens) of every sequence that is not padding."""
    by_first_token = {sample.token_ids[0]: sample for sample in samples}
    return [
        (by_first_token[int(one.token_ids[place.start])], one, slice(place.start, place.start + length))
        for one in all_micro_batches(batches)
        for place, length in zip(sequences(one), one.true_lengths.tolist(), strict=True)
        if int(one.token_ids[place.start]) != 0
    ]


def is_dummy(one: MicroBatch) -> bool:
    return bool((one.sample_index == -1).all())


@law
@given(samples=updates(), spec=specs)
def test_1_every_sample_is_in_exactly_one_place_and_whole(samples: list[Sample], spec: PackSpec) -> None:
    found = real_sequences(pack(samples, spec), samples)
    assert Counter(sample.sample_id for sample, _, _ in found) == Counter(sample.sample_id for sample in samples)
    for sample, one, place in found:
        assert one.token_ids[place].tolist() == sample.token_ids


@law
@given(samples=updates(), spec=specs)
def test_2_all_ranks_have_equal_counts_and_lengths(samples: list[Sample], spec: PackSpec) -> None:
    batches = pack(samples, spec)
    assert len(batches) == spec.data_parallel_size
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count > 0 and count % spec.num_micro_batches_multiple == 0
    assert {field.name for field in fields(MicroBatch)} == {
        *vars_of(batches[0].micro_batches[0]),
        "max_seqlen",
        *ANNOTATED,
        "loss_rows",
        "num_gradient_rows",
        "own_rows",
        "sum_over_context",
    }
    lengths = set()
    for one in all_micro_batches(batches):
        rows = {name: tuple(tensor.shape) for name, tensor in vars_of(one).items()}
        num = len(sequences(one))
        assert [rows.pop(name) for name in PER_SEQUENCE] == [(num + 1,), (num,), (num,), (num,)]
        (shape,) = set(rows.values())
        lengths.add(shape)
    if spec.common_length:
        assert len(lengths) == 1


@law
@given(samples=updates(), spec=specs)
def test_3_length_is_within_the_budget_and_a_multiple(samples: list[Sample], spec: PackSpec) -> None:
    for one in all_micro_batches(pack(samples, spec)):
        on_a_rank, rest = divmod(one.token_ids.numel(), spec.context_parallel_size)
        assert rest == 0
        assert 0 < on_a_rank <= spec.max_tokens
        assert on_a_rank % spec.multiple_of == 0
        if not spec.common_length:
            used = sum(b - a for a, b in _borders_of_samples(one))
            assert one.token_ids.numel() < used + spec.unit or (is_dummy(one) and one.token_ids.numel() == spec.unit)


def _borders_of_samples(one: MicroBatch) -> list[tuple[int, int]]:
    every = itertools.pairwise(one.cu_seqlens.tolist())
    return [pair for pair, index in zip(every, one.sample_index.tolist(), strict=True) if index >= 0]


@law
@given(samples=updates(), spec=specs)
def test_4_sequence_borders_and_padding_inside_them(samples: list[Sample], spec: PackSpec) -> None:
    multiple = 2 * spec.context_parallel_size if spec.context_parallel_size > 1 else 1
    for one in all_micro_batches(pack(samples, spec)):
        borders = one.cu_seqlens.tolist()
        assert one.cu_seqlens.dtype == one.true_lengths.dtype == torch.int32
        assert borders[0] == 0
        assert borders[-1] == one.token_ids.numel()
        assert borders == sorted(set(borders))
        assert one.max_seqlen == max(b - a for a, b in itertools.pairwise(borders))
        for number, place in enumerate(sequences(one)):
            size, length = place.stop - place.start, int(one.true_lengths[number])
            assert size % multiple == 0
            assert one.positions[place].tolist() == list(range(size))
            assert one.sequence_ids[place].tolist() == [number] * size
            assert size - multiple < length <= size
            if one.sample_index[number] == -1:
                assert length == size
            else:
                assert length == len(samples[int(one.sample_index[number])].token_ids)
            for name in NOTHING_IN_PADDING:
                assert not vars_of(one)[name][place.start + length : place.stop].any()


NOTHING_IN_PADDING = ("token_ids", "labels", "token_scale", "nll_scale", "advantages", "rollout_logprobs")


@law
@given(samples=updates(), spec=specs)
def test_5_padding_sequences_have_no_loss_and_dummies_are_counted(samples: list[Sample], spec: PackSpec) -> None:
    batches = pack(samples, spec)
    longest = spec.padded(max(len(sample.token_ids) for sample in samples))
    for one in all_micro_batches(batches):
        for number, place in enumerate(sequences(one)):
            if int(one.token_ids[place.start]) == 0:
                assert place.stop - place.start <= longest
                assert (int(one.sample_index[number]), float(one.rewards[number])) == (-1, 0.0)
                for name in NOTHING_IN_PADDING:
                    assert not vars_of(one)[name][place].any()
    num_dummies = sum(map(is_dummy, all_micro_batches(batches)))
    assert {batch.num_dummy_micro_batches for batch in batches} == {num_dummies}
    assert num_dummies == max(0, len(all_micro_batches(batches)) - len(samples))


@law
@given(samples=updates(), spec=specs)
def test_6_numbers_stand_where_the_token_is_predicted(samples: list[Sample], spec: PackSpec) -> None:
    batches = pack(samples, spec, sft_loss_coef=0.5)
    for sample, one, place in real_sequences(batches, samples):
        last = len(sample.token_ids) - 1
        rows = {name: tensor[place].tolist() for name, tensor in vars_of(one).items() if name not in PER_SEQUENCE}
        for t in range(last):
            trained = sample.loss_mask[t + 1]
            correct = sample.reward == 1.0
            assert rows["labels"][t] == sample.token_ids[t + 1]
            assert rows["token_scale"][t] == pytest.approx(trained / batches[0].num_loss_tokens)
            assert rows["nll_scale"][t] == pytest.approx(0.5 * trained * correct / max(batches[0].num_sft_tokens, 1))
            assert rows["advantages"][t] == pytest.approx(trained * sample.advantage)
            assert rows["rollout_logprobs"][t] == pytest.approx(sample.rollout_logprobs[t + 1])
        for name in ("labels", "token_scale", "nll_scale", "advantages", "rollout_logprobs"):
            assert rows[name][last] == 0
        number = int(one.sequence_ids[place.start])
        assert samples[int(one.sample_index[number])] is sample
        assert float(one.rewards[number]) == pytest.approx(sample.training_reward or 0.0)
        assert not one.old_logprobs.any() and (one.policy_weights == 1).all()


@law
@given(samples=updates(), spec=specs, coef=st.sampled_from([0.0, 0.1, 2.0]))
def test_7_scales_add_up(samples: list[Sample], spec: PackSpec, coef: float) -> None:
    micro_batches = all_micro_batches(pack(samples, spec, sft_loss_coef=coef))
    assert total([one.token_scale for one in micro_batches]) == pytest.approx(1.0, abs=1e-6)
    any_correct = any(sample.reward == 1.0 and sample.num_loss_tokens for sample in samples)
    assert total([one.nll_scale for one in micro_batches]) == pytest.approx(coef * any_correct, abs=1e-6)


@law
@given(samples=updates(), spec=specs, other=specs)
def test_8_counts_and_sums_do_not_depend_on_the_split(samples: list[Sample], spec: PackSpec, other: PackSpec) -> None:
    a, b = (pack(samples, one, sft_loss_coef=0.1) for one in (spec, other))
    counts = {(batch.num_loss_tokens, batch.num_samples, batch.num_sft_tokens) for batch in a + b}
    correct = [sample for sample in samples if sample.reward == 1.0]
    expected = (sum(s.num_loss_tokens for s in samples), len(samples), sum(s.num_loss_tokens for s in correct))
    assert counts == {expected}
    for name in ("token_scale", "nll_scale", "advantages", "rollout_logprobs"):
        sums = [total([vars_of(one)[name] for one in all_micro_batches(batches)]) for batches in (a, b)]
        assert sums[0] == pytest.approx(sums[1], abs=1e-4)


@law
@given(samples=updates(), spec=specs)
def test_packing_is_deterministic_and_travels_as_two_tensors(samples: list[Sample], spec: PackSpec) -> None:
    for one, again in zip(pack(samples, spec), pack(samples, spec), strict=True):
        ints, floats = flatten(one)
        assert (ints.dtype, floats.dtype) == (torch.int64, torch.float32)
        back = unflatten(ints, floats)
        assert replace(back, micro_batches=[]) == replace(one, micro_batches=[])
        for sent, received, twin in zip(one.micro_batches, back.micro_batches, again.micro_batches, strict=True):
            assert sent.max_seqlen == received.max_seqlen == twin.max_seqlen
            for name, tensor in vars_of(sent).items():
                assert vars_of(received)[name].dtype == tensor.dtype
                assert torch.equal(vars_of(received)[name], tensor)
                assert torch.equal(vars_of(twin)[name], tensor)


def test_a_small_update_by_hand() -> None:
    long = make_sample(0, prompt=2, response=3, reward=1.0, advantage=2.0)
    short = make_sample(1, prompt=1, response=1, reward=-1.0, advantage=-1.0)
    (batch,) = pack([short, long], PackSpec(1, max_tokens=16, multiple_of=4), sft_loss_coef=0.3)
    (one,) = batch.micro_batches
    assert one.token_ids.tolist() == [2000, 2001, 1000, 1001, 1002, 1003, 1004, 0]
    assert one.labels.tolist() == [2001, 0, 1001, 1002, 1003, 1004, 0, 0]
    assert one.cu_seqlens.tolist() == [0, 2, 7, 8]
    assert one.true_lengths.tolist() == [2, 5, 1]
    assert one.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 0]
    assert one.sequence_ids.tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    assert one.token_scale.tolist() == pytest.approx([0.25, 0, 0, 0.25, 0.25, 0.25, 0, 0])
    assert one.nll_scale.tolist() == pytest.approx([0, 0, 0, 0.1, 0.1, 0.1, 0, 0])
    assert one.advantages.tolist() == [-1, 0, 0, 2, 2, 2, 0, 0]
    assert one.rollout_logprobs.tolist() == pytest.approx([-0.02, 0, 0, -0.01, -0.02, -0.03, 0, 0])
    assert one.sample_index.tolist() == [0, 1, -1]
    assert one.rewards.tolist() == [-1.0, 1.0, 0.0]
    assert (batch.num_loss_tokens, batch.num_samples, batch.num_sft_tokens) == (4, 2, 3)


def test_the_joint_sft_term_asks_for_the_raw_reward_and_advantages_get_the_shaped_one() -> None:
    """A correct answer that was too long is still a correct answer."""
    right, wrong = (make_sample(i, prompt=1, response=2, reward=reward) for i, reward in enumerate((1.0, 0.5)))
    right.shaped_reward, wrong.shaped_reward = 0.25, 1.0
    (batch,) = pack([right, wrong], PackSpec(1, max_tokens=6), sft_loss_coef=1.0)
    (one,) = batch.micro_batches
    assert one.nll_scale.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert one.rewards.tolist() == [0.25, 1.0]


def test_rewards_are_float32_even_where_a_reward_function_says_one() -> None:
    (batch,) = pack([make_sample(0, prompt=1, response=2, reward=1)], PackSpec(1, max_tokens=3))
    assert batch.micro_batches[0].rewards.dtype == torch.float32


def test_ranks_without_a_sample_get_masked_padding() -> None:
    batches = pack([make_sample(0, prompt=2, response=3)], PackSpec(3, max_tokens=8))
    assert [float(batch.micro_batches[0].token_scale.sum()) for batch in batches] == pytest.approx([1.0, 0.0, 0.0])
    assert batches[2].micro_batches[0].cu_seqlens.tolist() == [0, 5]
    assert batches[2].num_loss_tokens == 3
    assert [batch.num_dummy_micro_batches for batch in batches] == [2, 2, 2]


def test_context_parallel_padding_by_hand() -> None:
    """Two ranks: sequences of multiples of 4, on each rank a multiple of 6 positions."""
    long = make_sample(0, prompt=2, response=3, reward=1.0, advantage=2.0)
    short = make_sample(1, prompt=1, response=1)
    spec = PackSpec(1, max_tokens=13, multiple_of=6, context_parallel_size=2, common_length=False)
    assert (spec.alignment, spec.unit, spec.budget) == (4, 12, 24)
    (batch,) = pack([short, long], spec, sft_loss_coef=0.3)
    (one,) = batch.micro_batches
    assert one.token_ids.tolist() == [2000, 2001, 0, 0, 1000, 1001, 1002, 1003, 1004, 0, 0, 0]
    assert one.labels.tolist() == [2001, 0, 0, 0, 1001, 1002, 1003, 1004, 0, 0, 0, 0]
    assert one.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert one.sequence_ids.tolist() == [0] * 4 + [1] * 8
    assert (one.cu_seqlens.tolist(), one.true_lengths.tolist(), one.max_seqlen) == ([0, 4, 12], [2, 5], 8)
    assert one.token_scale.tolist() == pytest.approx([0.25, 0, 0, 0, 0, 0.25, 0.25, 0.25, 0, 0, 0, 0])
    assert one.nll_scale.tolist() == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.1, 0.1, 0, 0, 0, 0])
    assert one.advantages.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0]
    assert one.sample_index.tolist() == [0, 1]


def test_virtual_stages_get_their_multiple_with_dummies_if_need_be() -> None:
    batches = pack(with_lengths(5, 4, 3), PackSpec(2, max_tokens=8, num_micro_batches_multiple=4))
    assert [len(batch.micro_batches) for batch in batches] == [4, 4]
    assert [sum(map(is_dummy, batch.micro_batches)) for batch in batches] == [3, 2]
    assert batches[0].num_dummy_micro_batches == 5
    assert {one.token_ids.numel() for one in all_micro_batches(batches)} == {5}


def test_lengths_that_may_differ_do() -> None:
    batches = pack(with_lengths(9, 4, 3), PackSpec(2, max_tokens=10, multiple_of=2, common_length=False))
    assert [[one.token_ids.numel() for one in batch.micro_batches] for batch in batches] == [[10], [8]]


def with_lengths(*lengths: int) -> list[Sample]:
    return [make_sample(i, prompt=1, response=length - 1) for i, length in enumerate(lengths)]


def test_load_is_balanced_whatever_the_order() -> None:
    samples = with_lengths(4, 6, 8, 2, 2, 10)
    batches = pack(samples, PackSpec(2, max_tokens=16))
    assert [len(batch.micro_batches) for batch in batches] == [1, 1]
    assert batches[0].micro_batches[0].token_ids.numel() == 16


def test_micro_batches_are_no_more_than_needed() -> None:
    (batch,) = pack(with_lengths(9, 9, 9), PackSpec(1, max_tokens=16))
    assert len(batch.micro_batches) == 3
    assert batch.micro_batches[0].token_ids.numel() == 9


def test_no_rank_idles_while_another_has_two_more() -> None:
    batches = pack(with_lengths(9, 9, 9, 9, 9), PackSpec(4, max_tokens=10))
    busy = [sum(bool(one.token_scale.any()) for one in batch.micro_batches) for batch in batches]
    assert busy == [2, 1, 1, 1]


def test_padding_does_not_widen_a_micro_batch_of_short_samples() -> None:
    samples = [make_sample(0, prompt=10, response=10), make_sample(1, prompt=2, response=1)]
    wide, narrow = pack(samples, PackSpec(2, max_tokens=20))
    assert wide.micro_batches[0].max_seqlen == 20
    assert narrow.micro_batches[0].max_seqlen == 3
    assert narrow.micro_batches[0].cu_seqlens.tolist() == [0, 3, 6, 9, 12, 15, 18, 20]


def test_first_token_of_a_sequence_counts_nowhere() -> None:
    sample = make_sample(0, prompt=1, response=2)
    sample.loss_mask = [1, 1, 1]
    (batch,) = pack([sample], PackSpec(1, max_tokens=8))
    assert batch.num_loss_tokens == 2
    assert batch.micro_batches[0].token_scale.tolist() == [0.5, 0.5, 0.0]


def test_what_cannot_be_packed_is_explained() -> None:
    long = make_sample(4, prompt=5, response=6)
    with pytest.raises(DataError, match=r"sample s4 has 11 tokens, more than batch\.max_tokens_per_gpu = 10; raise it"):
        pack([make_sample(0, prompt=1, response=1), long], PackSpec(1, max_tokens=10))
    with pytest.raises(DataError, match=r"max_tokens_per_gpu = 11, rounded down to a multiple of 4; raise it"):
        pack([long], PackSpec(1, max_tokens=11, multiple_of=4))
    spec = PackSpec(1, max_tokens=5, multiple_of=4, context_parallel_size=2)
    arithmetic = (
        r"s4 has 11 tokens, padded to 12 for context parallelism \(2 x 2\), more than batch\.max_tokens_per_gpu = 5"
        r" x context_parallel_size 2 = 10, rounded down to a multiple of 8; raise it, or lower the longest prompt"
    )
    with pytest.raises(DataError, match=arithmetic):
        pack([long], spec)
    assert len(pack([long], replace(spec, max_tokens=8))) == 1
    with pytest.raises(DataError, match="no samples to pack; expected at least one"):
        pack([], PackSpec(1, max_tokens=10))
    with pytest.raises(DataError, match="none of the 2 samples of this update has a token with loss"):
        pack([make_sample(i, prompt=2, response=0) for i in range(2)], PackSpec(1, max_tokens=10))


@given(num_samples=st.integers(1, 40), size=st.integers(1, 12))
def test_updates_are_few_even_and_in_order(num_samples: int, size: int) -> None:
    samples = [make_sample(i, prompt=1, response=1) for i in range(num_samples)]
    parts = split_updates(samples, size)
    assert [sample for part in parts for sample in part] == samples
    assert len(parts) == -(-num_samples // size)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def test_no_samples_make_no_update() -> None:
    with pytest.raises(DataError, match="no samples to train on"):
        split_updates([], 4)
