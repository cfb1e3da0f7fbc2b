"""A vocabulary cut into shards: statistics merge into those of the whole, and each shard's gradient is its part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import CPU, LinearCase, by_autograd, every_path, linear_case, relative_error
from megatron_klear_kernels.linear_policy_loss.paths import ChunkPath, PathName, Shard, build_path, choose_path
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution, Vocabulary, merge, over_ranks

INV_TEMPERATURE = 1 / 0.7


@dataclass(frozen=True)
class Part:
    """What one of the ranks has."""

    path: ChunkPath
    statistics: Tensor
    columns: slice


def cut(case: LinearCase, num_shards: int, path: PathName) -> list[Part]:
    """Shards of equal size, as Megatron cuts a padded vocabulary: the last may be all padding."""
    size, rest = divmod(case.weight.size(0), num_shards)
    assert rest == 0
    parts = []
    for start in range(0, case.weight.size(0), size):
        columns = slice(start, start + size)
        shard = Shard(start, Vocabulary(start, case.num_valid).num_local(size), INV_TEMPERATURE)
        worker = build_path(choose_path(path, CPU), case.weight[columns], shard, case.num_tokens)
        parts.append(Part(worker, worker.statistics(case.hidden, case.targets), columns))
    return parts


def gradient_of(parts: list[Part], case: LinearCase, rows: Distribution, slopes: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([part.path.gradient(case.targets, rows, *slopes).clone() for part in parts], dim=1)


def whole(parts: list[Part]) -> Distribution:
    return over_ranks(merge(torch.stack([part.statistics for part in parts])), None)


@every_path
@pytest.mark.parametrize("num_shards", (1, 2, 4))
@pytest.mark.parametrize("num_valid", (1000, 997, 513))
def test_shards_together_are_the_whole(num_valid: int, num_shards: int, path: PathName) -> None:
    """513 of 1,024 columns: one shard of four ends with padding, and the last is nothing else."""
    case = linear_case(num_valid, num_tokens=16, num_padding=1024 - num_valid, scale=2.0)
    edges = torch.tensor([255, 256, 257, 511, 512])
    targets = case.targets.clone()
    targets[2:7] = edges
    case = replace(case, targets=targets)
    d_logprob, d_entropy = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))

    parts = cut(case, num_shards, path)
    rows = whole(parts)
    d_logits = gradient_of(parts, case, rows, (d_logprob, d_entropy))
    expected = by_autograd(
        case, lambda logprob, entropy: (logprob * d_logprob + entropy * d_entropy).sum(), temperature=0.7
    )
    torch.testing.assert_close(rows.logprob.double(), expected.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows.entropy.double(), expected.entropy, rtol=0, atol=1e-5)
    assert not d_logits[:, num_valid:].any()
    assert relative_error(d_logits.t() @ case.hidden, expected.grad_weight) < 1e-5
    hidden = sum(d_logits[:, part.columns] @ case.weight[part.columns] for part in parts)
    assert isinstance(hidden, Tensor) and relative_error(hidden, expected.grad_hidden) < 1e-5

    unsharded = cut(case, 1, path)
    assert relative_error(d_logits, gradient_of(unsharded, case, whole(unsharded), (d_logprob, d_entropy))) < 2e-6


@every_path
def test_a_target_elsewhere_is_nobody_here_whatever_its_id(path: PathName) -> None:
    """Ids next to the shard's ends, ids of its padding, and ids that lie in the padding of a kernel's last tile."""
    case = linear_case(1001, num_tokens=16, num_padding=7)
    targets = torch.tensor([0, 4999, 6001, 6002, 6005, 6007, 6008, 6023, 6024, 9000, 151_935, 5000, 6000, 5500, 1, 2])
    shard = Shard(start=5000, num_valid=1001, inv_temperature=1.0)
    worker = build_path(choose_path(path, CPU), case.weight, shard, 16)
    found = worker.statistics(case.hidden, targets)
    logits = case.hidden @ case.weight[:1001].t()
    mine = (targets >= 5000) & (targets < 6001)
    assert mine.sum() == 3
    expected = logits.gather(1, (targets - 5000).clamp(0, 1000)[:, None])[:, 0].masked_fill(~mine, 0.0)
    torch.testing.assert_close(found[3], expected)
    assert (found[3][~mine] == 0.0).all()
    rows = over_ranks(found, None)
    d_logits = worker.gradient(targets, rows, torch.ones(16), None)
    # Without its target a row is -p alone.
    torch.testing.assert_close(d_logits[:, :1001].sum(dim=1), mine.float() - 1, rtol=0, atol=1e-5)
    assert (d_logits[~mine] <= 0).all() and not d_logits[:, 1001:].any()


def test_num_local() -> None:
    vocab = [Vocabulary(start, num_valid=1001).num_local(500) for start in (0, 500, 1000, 1500)]
    assert vocab == [500, 500, 1, 0]


def parts_of(logits: Tensor, num_parts: int) -> Tensor:
    """[R, 4, C] statistics in float64 of logits [C, V], the target in column 0."""
    rows = []
    for i, part in enumerate(logits.double().chunk(num_parts, dim=1)):
        shifted = part - part.amax(dim=1, keepdim=True)
        weights = shifted.exp()
        target = part[:, 0] if i == 0 else torch.zeros_like(part[:, 0])
        rows.append(torch.stack((part.amax(dim=1), weights.sum(dim=1), (weights * shifted).sum(dim=1), target)))
    return torch.stack(rows)


@pytest.mark.parametrize("offset", (0.0, 1000.0, -1000.0))
@pytest.mark.parametrize("num_parts", (1, 2, 3, 5, 8, 25))
def test_merge_in_any_number(num_parts: int, offset: float) -> None:
    """Logits of a true maximum below zero, too: a maximum that starts at 0 makes the sums underflow."""
    logits = 5 * torch.randn(9, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + offset
    found = over_ranks(merge(parts_of(logits, num_parts)), None)
    log_p = logits.log_softmax(dim=1)
    torch.testing.assert_close(found.logprob, log_p[:, 0], rtol=0, atol=1e-11)
    torch.testing.assert_close(found.entropy, -(log_p.exp() * log_p).sum(dim=1), rtol=0, atol=1e-11)
    torch.testing.assert_close(found.peak, logits.amax(dim=1))


def test_parts_without_a_token_count_nothing() -> None:
    parts = parts_of(torch.randn(5, 20, generator=torch.Generator().manual_seed(1)), 2)
    nothing = torch.zeros(1, 4, 5, dtype=torch.float64)
    nothing[:, 0] = -torch.inf
    for extended in (torch.cat((nothing, parts)), torch.cat((parts, nothing)), torch.cat((nothing, parts, nothing))):
        torch.testing.assert_close(merge(extended), merge(parts), rtol=1e-15, atol=0)


def test_a_part_far_below_the_maximum_vanishes() -> None:
    parts = parts_of(torch.cat((torch.zeros(3, 10), torch.full((3, 10), -1e30)), dim=1), 2).float()
    found = over_ranks(merge(parts), None)
    torch.testing.assert_close(found.entropy, torch.full((3,), 10.0).log())
    assert found.stacked.shape == (4, 3)


@pytest.mark.parametrize("num_parts", (2, 7, 8, 64, 600))
def test_merging_a_row_gives_the_same_bits_in_any_company(num_parts: int) -> None:
    """torch.sum over eight parts or more adds in an order that depends on the number of rows."""
    parts = torch.rand(num_parts, 4, 70, generator=torch.Generator().manual_seed(1)) * 5 + 1
    together = merge(parts)
    for begin, end in ((0, 1), (7, 24), (0, 17), (53, 70), (1, 70)):
        assert torch.equal(merge(parts[:, :, begin:end].clone()), together[:, begin:end])


def test_a_certain_token_is_not_more_than_certain() -> None:
    one = torch.tensor([[5.0], [1.0], [0.0], [5.0 + 1e-6]])
    assert over_ranks(one, None).logprob.item() == 0.0
    assert over_ranks(torch.full((4, 1), torch.nan), None).logprob.isnan().all(), "a NaN must not pass for certainty"
