"""The fused policy loss against the same loss written out in float64 and left to autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import (
    LinearCase,
    Outcome,
    Tokens,
    by_autograd,
    every_path,
    extra_tokens,
    gradient_tolerance,
    in_closed_form,
    linear_case,
    policy_objective,
    policy_tokens,
    relative_error,
)
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.policy_loss import FusedPolicyLoss, fused_linear_policy_loss

LOGPROB_TOLERANCE = 1e-5
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"method": "ppo", "eps_clip_high": 0.2},
    "clip_higher": {"method": "ppo"},
    "ppo_dual": {"method": "ppo", "eps_clip_c": 1.5},
    "gppo": {"method": "gppo"},
    "gppo_dual": {"method": "gppo", "eps_clip_c": 1.5},
    "ce_gppo": {"method": "ce_gppo", "gppo_beta_low": 0.75, "gppo_beta_high": 0.5},
    "ce_gppo_dual": {"method": "ce_gppo", "gppo_beta_low": 0.5, "eps_clip_c": 1.5},
    "cispo": {"method": "cispo"},
}


def run(
    case: LinearCase, tokens: Tokens, policy: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[FusedPolicyLoss, Outcome]:
    hidden, weight = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
    given: dict[str, Any] = {"vocab_size": case.num_valid, **settings, **(policy or {})}
    fused = fused_linear_policy_loss(hidden, weight, case.targets, *tokens.arguments(), **given)
    fused.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    found = fused.statistics
    return fused, Outcome(fused.loss.detach(), found.logprobs, found.entropy, hidden.grad, weight.grad)


def assert_near(actual: Outcome, expected: Outcome, case: LinearCase, path: str, *, factor: float = 1.0) -> None:
    assert actual.loss.dtype == actual.logprobs.dtype == actual.entropy.dtype == torch.float32
    assert actual.grad_hidden.dtype == actual.grad_weight.dtype == case.hidden.dtype
    for mine, theirs in ((actual.logprobs, expected.logprobs), (actual.entropy, expected.entropy)):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=factor * LOGPROB_TOLERANCE)
    assert abs(actual.loss.double() - expected.loss) <= 1e-5 * factor * max(1.0, abs(float(expected.loss)))
    limit = factor * gradient_tolerance(case.hidden.dtype, path)
    assert relative_error(actual.grad_hidden, expected.grad_hidden) <= limit
    assert relative_error(actual.grad_weight, expected.grad_weight) <= limit
    assert not actual.grad_weight[case.num_valid :].any(), "padding of the vocabulary got a gradient"
    assert (actual.logprobs <= 0).all() and (actual.entropy >= 0).all()


def check(case: LinearCase, policy: Mapping[str, Any], path: PathName, *, temperature: float = 1.0) -> FusedPolicyLoss:
    tokens = policy_tokens(case, temperature=temperature)
    fused, actual = run(case, tokens, policy, path=path, temperature=temperature)
    expected = by_autograd(case, policy_objective(tokens, policy), temperature=temperature)
    assert_near(actual, expected, case, path)
    assert fused.statistics.path.name == path
    return fused


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    found = check(linear_case(1001, num_padding=7, num_tokens=64), METHODS[method], "eager").statistics
    # The case is worth something only if every cell of the rule is met.
    assert found.clipped_low.any() and found.clipped_high.any()
    assert found.clipped_dual.any() == ("dual" in method)


EXTRAS: dict[str, dict[str, Any]] = {
    "nll": {"nll_scale": None},
    "kl_k1": {"reference_logprobs": None, "kl_coef": 0.3, "kl_type": "k1"},
    "kl_k2": {"reference_logprobs": None, "kl_coef": 0.3, "kl_type": "k2"},
    "kl_k3": {"reference_logprobs": None, "kl_coef": 0.3},
    "kl_k3+": {"reference_logprobs": None, "kl_coef": 0.3, "kl_type": "k3+"},
    "entropy_bonus": {"entropy_scale": None},
    "entropy_ratio_clipping": {"old_entropy": None, "erc_low": 0.1, "erc_high": 0.1},
    "policy_weights": {"policy_weights": None},
}
EVERYTHING: dict[str, Any] = {"eps_clip_c": 3.0} | {
    name: value for extra in EXTRAS.values() for name, value in extra.items()
}


def filled(case: LinearCase, extra: Mapping[str, Any], *, temperature: float = 1.0) -> dict[str, Any]:
    """The tensors that an entry of EXTRAS names."""
    tensors = vars(extra_tokens(case, policy_tokens(case, temperature=temperature), temperature=temperature))
    return {name: tensors[name] if value is None else value for name, value in extra.items()}


@pytest.mark.parametrize("method", ("gppo", "cispo"))
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_further_term(extra: str, method: str) -> None:
    case = linear_case(1000, num_tokens=64)
    fused = check(case, METHODS[method] | filled(case, EXTRAS[extra]), "eager")
    kept = fused.statistics.entropy_kept
    assert (kept is None) == (extra != "entropy_ratio_clipping")
    assert kept is None or kept.tolist() == [True, False] * 32


@every_path
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("num_valid", "num_padding"), [(1000, 24), (1001, 7), (4099, 0)])
def test_all_pieces_at_once(num_valid: int, num_padding: int, dtype: torch.dtype, path: PathName) -> None:
    case = linear_case(num_valid, num_padding=num_padding, num_tokens=32, dtype=dtype)
    check(case, METHODS["gppo"] | filled(case, EVERYTHING, temperature=0.7), path, temperature=0.7)


@every_path
@pytest.mark.parametrize(("num_valid", "num_padding", "num_tokens"), [(8192, 0, 32), (151_936, 128, 8)])
def test_large_vocabularies(num_valid: int, num_padding: int, num_tokens: int, path: PathName) -> None:
    case = linear_case(num_valid, num_padding=num_padding, num_tokens=num_tokens, dtype=torch.bfloat16)
    check(case, METHODS["gppo"] | filled(case, EVERYTHING, temperature=0.7), path, temperature=0.7)


@every_path
@pytest.mark.parametrize("offset", (100.0, 1000.0))
def test_a_common_offset_of_the_logits_costs_only_their_own_rounding(offset: float, path: PathName) -> None:
    """A logit near 1,000 is known to 6e-5 in float32; an entropy by lse - E[z] would be off by 0.06."""
    case = linear_case(1001, num_padding=7, offset=offset)
    tokens, policy = policy_tokens(case, temperature=0.7), filled(case, EXTRAS["entropy_bonus"], temperature=0.7)
    _, actual = run(case, tokens, policy, path=path, temperature=0.7)
    expected = by_autograd(case, policy_objective(tokens, policy), temperature=0.7)
    rounding = offset / 0.7 * 2**-23
    torch.testing.assert_close(actual.logprobs.double(), expected.logprobs, rtol=0, atol=1e-5 + rounding)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0, atol=1e-5 + rounding / 8)
    # The gradient of hidden is measured without the column that holds the offset: it is a difference of large numbers.
    assert relative_error(actual.grad_hidden[:, :-1], expected.grad_hidden[:, :-1]) < 2e-6 * offset**0.5
    assert relative_error(actual.grad_weight, expected.grad_weight) < 2e-6 * offset**0.5


def constant_tokens(case: LinearCase, advantage: float, old_logprobs: Tensor) -> Tokens:
    ones = torch.ones(case.num_tokens)
    return Tokens(old_logprobs, advantage * ones, 0.5 * ones)


@pytest.mark.parametrize("method", ("ppo", "gppo", "ce_gppo", "cispo"))
@pytest.mark.parametrize("advantage", (1.0, -1.0))
@pytest.mark.parametrize("distance", (25.0, 1000.0, torch.inf))
def test_ratios_that_underflow_or_overflow(distance: float, advantage: float, method: str) -> None:
    """Autograd over the stop-gradient form says NaN here; GPPO's weight is exactly the clip's edge."""
    case = linear_case(1001, num_padding=7, num_tokens=16)
    at_edge = 1.0 - 0.2 if advantage < 0 else 1.28
    weight = {"ppo": 0.0, "gppo": at_edge, "ce_gppo": 0.5 * at_edge, "cispo": at_edge}[method]
    policy: dict[str, Any] = {"method": method} | (
        {"gppo_beta_low": 0.5, "gppo_beta_high": 0.5} if method == "ce_gppo" else {}
    )
    logprobs = by_autograd(case, lambda logprobs, _: logprobs.sum()).logprobs.float()
    # Where the clip acts: a ratio of 0 of a bad token, of infinity of a good one.
    tokens = constant_tokens(case, advantage, logprobs - distance * advantage)
    fused, actual = run(case, tokens, policy)
    slope = torch.full((case.num_tokens,), -0.5 * weight * advantage)
    grad_hidden, grad_weight = in_closed_form(case, slope, torch.zeros_like(slope))
    assert fused.statistics.ratio.isfinite().all() and actual.loss.isfinite()
    assert (fused.statistics.clipped_low if advantage < 0 else fused.statistics.clipped_high).all()
    assert relative_error(actual.grad_hidden, grad_hidden) < 5e-6 or weight == 0.0 == actual.grad_hidden.abs().max()
    assert relative_error(actual.grad_weight, grad_weight) < 5e-6 or weight == 0.0 == actual.grad_weight.abs().max()


@pytest.mark.parametrize("method", ("ppo", "gppo"))
@pytest.mark.parametrize("advantage", (1.0, -1.0))
def test_on_the_open_side_an_endless_ratio_stays_a_number(advantage: float, method: str) -> None:
    case = linear_case(1000, num_tokens=16)
    _, actual = run(case, constant_tokens(case, advantage, torch.full((16,), advantage * 1000.0)), {"method": method})
    for tensor in vars(actual).values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize("method", ("ppo", "gppo", "cispo"))
@pytest.mark.parametrize("log_ratio", (-0.3, 0.3))
def test_a_ratio_exactly_at_the_edge_is_not_clipped(log_ratio: float, method: str) -> None:
    """The row has one token with all the probability, so that its log-prob is exactly 0."""
    case = linear_case(1000, num_tokens=1)
    hidden, weight = torch.zeros(1, 24), torch.zeros(1000, 24)
    hidden[0, 0], weight[7, 0] = 1.0, 1e4
    case = LinearCase(hidden, weight, torch.tensor([7]), 1000)
    ratio = torch.tensor(log_ratio).exp().item()
    width = abs(ratio - 1)
    assert ratio in (1 - width, 1 + width)
    tokens = Tokens(torch.tensor([-log_ratio]), torch.tensor([1.0 if log_ratio > 0 else -1.0]), torch.ones(1))
    for step, clipped in ((0.0, False), (2.0**-21, True)):
        policy = {"method": method, "eps_clip": width - step, "eps_clip_high": width - step}
        found = run(case, tokens, policy)[0].statistics
        assert found.ratio.item() == ratio and found.logprobs.item() == 0.0
        assert (found.clipped_low if log_ratio < 0 else found.clipped_high).item() == clipped


@every_path
def test_all_masked(path: PathName) -> None:
    case = linear_case(1001, num_padding=7)
    zeros = torch.zeros(case.num_tokens)
    tokens = Tokens(torch.full_like(zeros, -1000.0), torch.ones_like(zeros), zeros)
    extras = {
        "nll_scale": zeros, "entropy_scale": zeros, "kl_coef": 0.1, "reference_logprobs": torch.full_like(zeros, 500.0)
    }  # fmt: skip
    _, actual = run(case, tokens, extras, path=path)
    assert actual.loss == 0.0 and not actual.grad_hidden.any() and not actual.grad_weight.any()
    assert actual.logprobs.isfinite().all() and actual.entropy.isfinite().all()


@every_path
def test_strided_views(path: PathName) -> None:
    """Rows of a wider matrix, and a weight stored the other way round."""
    case = linear_case(1001)
    tokens = policy_tokens(case)
    plain = run(case, tokens, path=path)[1]
    hidden = torch.stack((case.hidden, torch.full_like(case.hidden, 9.0)), dim=1)[:, 0]
    weight = case.weight.t().contiguous().t()
    padded = torch.full((1001, 40), 9.0)
    padded[:, 8:32] = case.weight
    for strided in (replace(case, hidden=hidden, weight=weight), replace(case, weight=padded[:, 8:32])):
        assert not strided.weight.is_contiguous()
        actual = run(strided, tokens, path=path)[1]
        assert_near(actual, by_autograd(case, policy_objective(tokens, {})), case, path)
        assert torch.allclose(actual.logprobs, plain.logprobs, rtol=0, atol=2e-6)


@every_path
@pytest.mark.parametrize("rows", (1, 48))
def test_chunks_change_nothing_but_rounding(rows: int, path: PathName) -> None:
    case = linear_case(1001, num_padding=7, num_tokens=64)
    tokens = policy_tokens(case)
    whole, split = run(case, tokens, path=path)[1], run(case, tokens, path=path, chunk_bytes=rows * 4 * 1008)[1]
    for mine, theirs in ((split.logprobs, whole.logprobs), (split.entropy, whole.entropy)):
        assert torch.allclose(mine, theirs, rtol=0, atol=4e-6)
    assert relative_error(split.grad_hidden, whole.grad_hidden) < 2e-6
    assert relative_error(split.grad_weight, whole.grad_weight) < 2e-6


def test_the_reference_agrees_with_itself() -> None:
    """Autograd over stop-gradients, and the closed form of each token's slopes."""
    case = linear_case(500, num_padding=3)
    tokens = policy_tokens(case, temperature=0.7)
    bonus = torch.linspace(0, 1, case.num_tokens)
    objective = policy_objective(tokens, {"entropy_scale": bonus, "gppo_beta_low": 0.5, "method": "ce_gppo"})
    expected = by_autograd(case, objective, temperature=0.7)
    ratio = (expected.logprobs - tokens.old_logprobs.double()).exp()
    advantages = tokens.advantages.double()
    weights = torch.where((advantages > 0) & (ratio > 1.28), 1.28, ratio)
    weights = torch.where((advantages < 0) & (ratio < 0.8), 0.5 * 0.8, weights)
    found = in_closed_form(case, -tokens.token_scale.double() * advantages * weights, -bonus, temperature=0.7)
    assert relative_error(found[0], expected.grad_hidden) < 1e-12
    assert relative_error(found[1], expected.grad_weight) < 1e-12


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "trpo"}, r"method 'trpo' is none of ppo, gppo, ce_gppo, cispo$"),
    ({"method": "gspo"}, r"method 'gspo' is none of .*its ratio is of a sequence: use fused_linear_logprobs"),
    ({"gppo_beta_low": 0.5}, r"gppo_beta_low and gppo_beta_high act in ce_gppo alone, not in gppo; leave them at 1"),
    ({"method": "ppo", "gppo_beta_high": 0.5}, r"act in ce_gppo alone, not in ppo"),
    ({"method": "cispo", "eps_clip_c": 3.0}, r"cispo has no dual clip; leave eps_clip_c out"),
    ({"eps_clip": None}, r"gppo needs a lower clip width, got eps_clip None; only cispo can do without"),
    ({"kl_coef": 0.1}, r"kl_coef is 0.1, but there are no reference_logprobs \[T\]"),
    ({"nll_scale": torch.zeros(5)}, r"nll_scale is \[5\], but token_scale \[37\]: expected one shape"),
    (
        {"erc_low": 0.1},
        r"needs erc_low, erc_high and old_entropy \[T\]; got erc_low=0.1, erc_high=None, old_entropy mi",
    ),
    ({"erc_low": 0.1, "erc_high": 0.1}, r"got erc_low=0.1, erc_high=0.1, old_entropy missing"),
    ({"erc_low": 0.1, "old_entropy": torch.zeros(37)}, r"got erc_low=0.1, erc_high=None, old_entropy given"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    case = linear_case(1000)
    with pytest.raises(ValueError, match=message):
        run(case, policy_tokens(case), settings)


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = linear_case(1000)
    tokens = policy_tokens(case)
    with pytest.raises(ValueError, match=r"hidden states are \[37, 1000\] but the output weight is \[1000, 24\]: .*"):
        run(replace(case, hidden=torch.zeros(37, 1000)), tokens)
    with pytest.raises(ValueError, match=r"hidden states are torch.bfloat16 but the output weight is torch.float32"):
        run(replace(case, hidden=case.hidden.bfloat16()), tokens)
    with pytest.raises(ValueError, match=r"token_scale is \[1\], but there are \[37\] targets: expected one for each"):
        run(case, Tokens(*(row[:1] for row in tokens.arguments())))
    with pytest.raises(ValueError, match=r"expected one target for each of 37 rows, got targets \[36\]"):
        run(replace(case, targets=case.targets[:36]), Tokens(*(row[:36] for row in tokens.arguments())))
    with pytest.raises(ValueError, match=r"advantages is torch.float64: expected float32 \[T\], convert it"):
        run(case, replace(tokens, advantages=tokens.advantages.double()))


def test_cispo_can_do_without_a_lower_width() -> None:
    case = linear_case(1000, num_tokens=64)
    found = run(case, policy_tokens(case), {"method": "cispo", "eps_clip": None})[0].statistics
    assert found.clipped_high.any() and not found.clipped_low.any()


def test_statistics_carry_no_gradient() -> None:
    case = linear_case(1000)
    fused, _ = run(case, policy_tokens(case), filled(case, EXTRAS["entropy_ratio_clipping"]))
    found = asdict(fused.statistics) | {"path": None}
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in found.values())
