"""linear_logprobs against plain float64 arithmetic over the whole [T, V]."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_klear_kernels.linear_policy_loss.logprobs import EntropyMode, Vocabulary, linear_logprobs

WIDTH = 24
# 1001 and 4099 are no multiple of anything a tile could have.
VOCABULARIES = (1000, 1001, 4099)


@dataclass(frozen=True)
class Case:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [rows, H], padding rows included
    targets: Tensor  # [T]
    upstream: Tensor  # [T], gradient of the log-probs
    num_valid: int
    entropy_upstream: Tensor | None = None  # [T], gradient of the entropies


@dataclass(frozen=True)
class Outcome:
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def make_case(
    num_valid: int,
    *,
    num_tokens: int = 37,
    num_padding: int = 0,
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random logits of standard deviation `scale` around a common `offset`; padding rows would win every softmax."""
    generator = torch.Generator().manual_seed(num_valid + num_tokens)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator) * scale
    weight = torch.randn(num_valid + num_padding, WIDTH, generator=generator) * WIDTH**-0.5
    hidden[:, -1], weight[:, -1] = 1.0, offset
    weight[num_valid:] = 1e3
    targets = torch.randint(num_valid, (num_tokens,), generator=generator)
    targets[:2] = torch.tensor([0, num_valid - 1])
    upstream = torch.randn(num_tokens, generator=generator)
    return Case(hidden.to(dtype), weight.to(dtype), targets, upstream, num_valid)


def run(case: Case, *, temperature: float = 1.0, chunk_bytes: int = 1 << 20, entropy: EntropyMode = "value") -> Outcome:
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logprobs, entropies = linear_logprobs(
        hidden,
        weight,
        case.targets,
        vocab=Vocabulary(0, case.num_valid),
        temperature=temperature,
        entropy=entropy,
        chunk_bytes=chunk_bytes,
    )
    assert entropies.requires_grad == (entropy == "gradient")
    objective = (logprobs * case.upstream).sum()
    if case.entropy_upstream is not None:
        objective = objective + (entropies * case.entropy_upstream).sum()
    objective.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(logprobs.detach(), entropies.detach(), hidden.grad, weight.grad)


def reference(case: Case, *, temperature: float = 1.0) -> Outcome:
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    distribution = (hidden @ weight[: case.num_valid].t() / temperature).log_softmax(dim=-1)
    logprobs = distribution.gather(1, case.targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    objective = (logprobs * case.upstream.double()).sum()
    if case.entropy_upstream is not None:
        objective = objective + (entropy * case.entropy_upstream.double()).sum()
    objective.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)


def assert_near(actual: Outcome, expected: Outcome, case: Case, *, atol: float, grad_rtol: float = 1e-5) -> None:
    """Gradients are held against the size of what is summed up in their column, plus one rounding to their dtype."""
    torch.testing.assert_close(actual.logprobs.double(), expected.logprobs, rtol=1e-6, atol=atol)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=atol)
    for mine, theirs, summed in (
        (actual.grad_hidden, expected.grad_hidden, case.weight[: case.num_valid]),
        (actual.grad_weight, expected.grad_weight, case.hidden),
    ):
        rounding = torch.finfo(mine.dtype).eps / 2 * theirs.abs()
        limit = grad_rtol * summed.double().abs().amax(dim=0) + rounding
        assert ((mine.double() - theirs).abs() <= limit).all()


@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("num_padding", (0, 13))
@pytest.mark.parametrize("num_valid", VOCABULARIES)
def test_values_and_gradients(num_valid: int, num_padding: int, temperature: float) -> None:
    case = make_case(num_valid, num_padding=num_padding)
    actual = run(case, temperature=temperature)
    assert actual.logprobs.dtype == actual.entropy.dtype == torch.float32
    assert_near(actual, reference(case, temperature=temperature), case, atol=5e-6)
    assert torch.equal(actual.grad_weight[num_valid:], torch.zeros(num_padding, WIDTH))


@pytest.mark.parametrize("offset", (0.0, 100.0, 1000.0, -1000.0))
def test_a_common_offset_of_the_logits_costs_only_their_own_rounding(offset: float) -> None:
    """An entropy from the unshifted mean logit would lose its digits here; so would a target rebuilt from exp."""
    case = make_case(1001, num_padding=7, offset=offset)
    # float32 logits near 1000 / 0.7 are 1.2e-4 apart.
    rounding = abs(offset) / 0.7 * 2**-23
    actual, expected = run(case, temperature=0.7), reference(case, temperature=0.7)
    assert_near(actual, expected, case, atol=5e-6 + rounding, grad_rtol=1e-3)
    # The roundings of a thousand logits average out in the entropy, unless the offset enters it again.
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0, atol=5e-6 + rounding / 8)


def test_bfloat16_operands_give_float32_accuracy_and_bfloat16_gradients() -> None:
    case = make_case(1001, num_padding=7, dtype=torch.bfloat16)
    actual, expected = run(case, temperature=0.7), reference(case, temperature=0.7)
    assert actual.logprobs.dtype == torch.float32
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == torch.bfloat16
    assert_near(actual, expected, case, atol=5e-6)


def test_bfloat16_weight_gradients_do_not_depend_on_the_number_of_chunks() -> None:
    """They add up in float32 and are rounded once."""
    case = make_case(1000, num_tokens=64, dtype=torch.bfloat16)
    whole, split = run(case), run(case, chunk_bytes=1)
    torch.testing.assert_close(split.grad_weight, whole.grad_weight, rtol=2**-7, atol=0)
    assert (split.grad_weight != whole.grad_weight).float().mean() < 0.01


@pytest.mark.parametrize("scale", (30.0, 300.0))
def test_peaked_rows(scale: float) -> None:
    case = make_case(1001, num_padding=7, scale=scale)
    best = (case.hidden.double() @ case.weight[:1001].double().t()).argmax(dim=1)
    case = dataclasses.replace(case, targets=torch.where(torch.arange(37) % 2 == 0, best, case.targets))
    actual = run(case)
    assert_near(actual, reference(case), case, atol=scale * 2e-6, grad_rtol=scale * 1e-5)
    assert (actual.logprobs <= 0).all() and (actual.entropy >= 0).all()
    assert actual.logprobs.min() < -scale and actual.logprobs.max() > -1e-3


@pytest.mark.parametrize("num_valid", VOCABULARIES)
def test_a_logprob_is_never_positive(num_valid: int) -> None:
    """Padding columns in the log-sum-exp, or logits in reduced precision, once gave +123 elsewhere."""
    hot = make_case(num_valid, num_padding=13, num_tokens=200, scale=1000.0)
    logits = hot.hidden.double() @ hot.weight[:num_valid].double().t()
    assert (run(dataclasses.replace(hot, targets=logits.argmax(dim=1))).logprobs <= 0).all()


@pytest.mark.parametrize("rows", (1, 5, 36, 37, 100))
def test_chunks_change_nothing(rows: int) -> None:
    case = make_case(1001, num_padding=7)
    whole, split = run(case, temperature=0.7), run(case, temperature=0.7, chunk_bytes=rows * 4 * 1008)
    for mine, theirs in zip(vars(split).values(), vars(whole).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_company() -> None:
    case = make_case(4099, num_padding=13)
    together = run(case)
    for i in range(case.targets.numel()):
        row = slice(i, i + 1)
        alone = run(Case(case.hidden[row], case.weight, case.targets[row], case.upstream[row], case.num_valid))
        torch.testing.assert_close(alone.logprobs, together.logprobs[row], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone.entropy, together.entropy[row], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone.grad_hidden, together.grad_hidden[row], rtol=1e-5, atol=1e-6)


def test_the_same_call_gives_the_same_bits() -> None:
    """Old and current log-probs of unchanged weights must give a ratio of exactly one."""
    case = make_case(1001, num_padding=7)
    first, second = run(case), run(case)
    assert torch.equal(first.logprobs, second.logprobs) and torch.equal(first.grad_weight, second.grad_weight)


def test_entropy_is_optional_and_so_is_its_gradient() -> None:
    case = make_case(1000)
    without, value, gradient = run(case, entropy="none"), run(case), run(case, entropy="gradient")
    for one in (value, gradient):
        assert torch.equal(one.logprobs, without.logprobs)
        assert torch.equal(one.grad_hidden, without.grad_hidden)
        assert torch.equal(one.grad_weight, without.grad_weight)
    assert torch.equal(value.entropy, gradient.entropy)


def with_entropy_upstream(case: Case, *, only: bool = False) -> Case:
    """The same case whose entropies have a gradient of their own, as large as the log-probs'."""
    upstream = torch.randn(case.targets.numel(), generator=torch.Generator().manual_seed(5))
    kept = torch.zeros_like(case.upstream) if only else case.upstream
    return dataclasses.replace(case, upstream=kept, entropy_upstream=upstream)


@pytest.mark.parametrize("only", (True, False), ids=("entropy_alone", "with_logprobs"))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize(("num_valid", "num_padding"), [(1000, 0), (1001, 13), (4099, 29)])
def test_gradient_of_the_entropy(num_valid: int, num_padding: int, temperature: float, only: bool) -> None:
    case = with_entropy_upstream(make_case(num_valid, num_padding=num_padding, scale=2.0), only=only)
    expected = reference(case, temperature=temperature)
    for chunk_bytes in (1, 5 * 4 * (num_valid + num_padding), 1 << 22):
        actual = run(case, temperature=temperature, chunk_bytes=chunk_bytes, entropy="gradient")
        assert_near(actual, expected, case, atol=1e-5)
        assert torch.equal(actual.grad_weight[num_valid:], torch.zeros(num_padding, WIDTH))


def test_gradient_of_the_entropy_of_certain_and_of_uniform_rows() -> None:
    """Where probabilities underflow, p log p is 0, not NaN; where all are equal, the entropy is at its top."""
    case = make_case(1001, num_padding=7, scale=300.0)
    hidden = case.hidden.clone()
    hidden[::2] = 0.0
    case = with_entropy_upstream(dataclasses.replace(case, hidden=hidden), only=True)
    actual, expected = run(case, entropy="gradient"), reference(case)
    assert actual.grad_hidden.isfinite().all() and actual.grad_weight.isfinite().all()
    assert_near(actual, expected, case, atol=6e-4, grad_rtol=3e-3)
    assert actual.grad_hidden[::2].abs().max() < 1e-5


def test_without_its_gradient_an_entropy_moves_nothing() -> None:
    case = with_entropy_upstream(make_case(1001, num_padding=7))
    plain = run(make_case(1001, num_padding=7))
    silent = run(case)
    assert torch.equal(silent.grad_hidden, plain.grad_hidden) and torch.equal(silent.grad_weight, plain.grad_weight)


def test_strided_operands() -> None:
    case = make_case(1001)
    hidden = torch.stack((case.hidden, torch.full_like(case.hidden, 9.0)), dim=1)[:, 0]
    weight = case.weight.t().contiguous().t()
    assert not hidden.is_contiguous() and not weight.is_contiguous()
    strided = run(Case(hidden, weight, case.targets, case.upstream, 1001))
    assert_near(strided, reference(case), case, atol=5e-6)


class _NoTensorOf(TorchDispatchMode):
    """Fails on any operation that makes a tensor of `limit` elements or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            assert not isinstance(part, Tensor) or part.numel() < self.limit, f"{func} made a tensor of {part.shape}"
        return result


def test_nothing_of_the_size_of_all_logits_is_ever_held() -> None:
    """Forward and backward, and what autograd keeps: a chunked head whose chunks survive would bound nothing."""
    num_tokens, num_valid = 256, 1001
    case = make_case(num_valid, num_tokens=num_tokens)
    limit = num_tokens * num_valid // 4
    with _NoTensorOf(limit):
        run(case, chunk_bytes=16 * 4 * num_valid)
    with _NoTensorOf(limit), pytest.raises(AssertionError, match="made a tensor of"):
        run(case, chunk_bytes=num_tokens * 4 * num_valid)


def test_autograd_keeps_inputs_and_two_numbers_a_token() -> None:
    case = make_case(1001, num_tokens=64)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logprobs(
            case.hidden.clone().requires_grad_(), case.weight, case.targets, vocab=Vocabulary(0, 1001), chunk_bytes=1
        )
    # The targets, and the log-sum-exp and the entropy.
    assert sorted(kept) == sorted((case.hidden.numel(), case.weight.numel(), 64, 64, 64))


def test_logits_in_place_of_hidden_states_are_refused() -> None:
    case = make_case(1000)
    with pytest.raises(ValueError, match=r"width 1000 but the output weight has 24: hand over hidden states \[T, H\]"):
        linear_logprobs(torch.zeros(37, 1000), case.weight, case.targets, vocab=Vocabulary(0, 1000))
