"""Output layers and tokens made up for the tests of the fused loss, and the same loss written out in float64.

Nothing here is taken from the kernels: clipping is written with stop-gradients, as the papers do, and left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_klear_kernels.linear_policy_loss.paths import PathName, choose_path

WIDTH = 24
CPU = torch.device("cpu")


def _path(name: PathName) -> Any:
    """A parameter; skipped where that path cannot run."""
    # The interpreter computes the lanes that a mask throws away, too.
    quiet = [
        pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
        for what in ("overflow", "invalid value", "divide by zero")
    ]
    try:
        choose_path(name, CPU)
    except ValueError as obstacle:
        return pytest.param(name, marks=pytest.mark.skip(reason=str(obstacle)))
    return pytest.param(name, marks=quiet)


EAGER, TRITON, TRITON_SCALED_EXP = _path("eager"), _path("triton"), _path("triton_scaled_exp")


def with_values(path: Any, *values: Any) -> Any:
    """A path's parameter with more of them."""
    return pytest.param(*path.values, *values, marks=path.marks)


every_path = pytest.mark.parametrize("path", [EAGER, TRITON, TRITON_SCALED_EXP])


@dataclass(frozen=True)
class LinearCase:
    """hidden [T, H], weight [V, H] with padding rows at its end, targets [T]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    num_valid: int

    @property
    def num_tokens(self) -> int:
        return self.targets.numel()

    def rows(self, index: Tensor | slice) -> LinearCase:
        return replace(self, hidden=self.hidden[index], targets=self.targets[index])


def linear_case(
    num_valid: int,
    *,
    num_tokens: int = 37,
    width: int = WIDTH,
    num_padding: int = 0,
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> LinearCase:
    """Random logits of standard deviation `scale` around a common `offset`; padding rows would win every softmax."""
    generator = torch.Generator().manual_seed(num_valid + num_tokens)
    hidden = torch.randn(num_tokens, width, generator=generator) * scale
    weight = torch.randn(num_valid + num_padding, width, generator=generator) * width**-0.5
    hidden[:, -1], weight[:, -1] = 1.0, offset
    weight[num_valid:] = 0.0
    weight[num_valid:, -1] = 1e4
    targets = torch.randint(num_valid, (num_tokens,), generator=generator)
    targets[:2] = torch.tensor([0, num_valid - 1])[:num_tokens]
    return LinearCase(hidden.to(dtype), weight.to(dtype), targets, num_valid)


@dataclass(frozen=True)
class Outcome:
    """Of one forward and backward. Log-probs and entropies [T], gradients like hidden and weight."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


Objective = Callable[[Tensor, Tensor], Tensor]
"""(log-probs [T], entropies [T]) -> scalar."""


def by_autograd(case: LinearCase, objective: Objective, *, temperature: float = 1.0) -> Outcome:
    """In float64, with the logits at full length."""
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    distribution = (hidden @ weight[: case.num_valid].t() / temperature).log_softmax(dim=-1)
    logprobs = distribution.gather(1, case.targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    loss = objective(logprobs, entropy)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Outcome(loss.detach(), logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)


def in_closed_form(
    case: LinearCase, d_logprob: Tensor, d_entropy: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(gradient of hidden, of weight) in float64 where the slopes [T] of each token's loss are known.

    dz_v = (d_logprob ([v is target] - p_v) - d_entropy p_v (log p_v + H)) / temperature
    """
    hidden, weight = case.hidden.double(), case.weight.double()[: case.num_valid]
    log_p = (hidden @ weight.t() / temperature).log_softmax(dim=-1)
    p = log_p.exp()
    surprise = log_p - (p * log_p).sum(dim=-1, keepdim=True)
    is_target = torch.zeros_like(p).scatter_(1, case.targets[:, None], 1.0)
    d_logits = d_logprob.double()[:, None] * (is_target - p) - d_entropy.double()[:, None] * p * surprise
    grad_weight = torch.zeros_like(case.weight, dtype=torch.float64)
    grad_weight[: case.num_valid] = d_logits.t() @ hidden / temperature
    return d_logits @ weight / temperature, grad_weight


@dataclass(frozen=True)
class Tokens:
    """What a policy loss knows of each token, float32 [T]."""

    old_logprobs: Tensor
    advantages: Tensor
    token_scale: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.old_logprobs, self.advantages, self.token_scale


def policy_tokens(case: LinearCase, *, temperature: float = 1.0, spread: float = 0.7) -> Tokens:
    """Ratios on all sides of every clip, advantages of both signs and 0, some tokens masked."""
    generator = torch.Generator().manual_seed(case.num_tokens)
    logprobs = by_autograd(case, lambda logprobs, _: logprobs.sum(), temperature=temperature).logprobs.float()
    noise, advantages, scale = torch.randn(3, case.num_tokens, generator=generator)
    advantages[3::7], scale[4::5] = 0.0, 0.0
    return Tokens(logprobs - spread * noise, advantages, scale.abs() / case.num_tokens)


@dataclass(frozen=True)
class Extras:
    """Tensors [T] of every further term."""

    policy_weights: Tensor
    nll_scale: Tensor
    reference_logprobs: Tensor
    entropy_scale: Tensor
    old_entropy: Tensor


def extra_tokens(case: LinearCase, tokens: Tokens, *, temperature: float = 1.0) -> Extras:
    """Half of the old entropies are so far off that entropy-ratio clipping at 0.1 acts, on either side."""
    generator = torch.Generator().manual_seed(1)
    weights, nll, bonus = torch.rand(3, case.num_tokens, generator=generator)
    entropy = by_autograd(case, lambda logprobs, _: logprobs.sum(), temperature=temperature).entropy.float()
    factor = torch.tensor([1.0, 0.5, 1.0, 1.5]).repeat(case.num_tokens)[: case.num_tokens]
    reference = tokens.old_logprobs + 0.3 * torch.randn(case.num_tokens, generator=generator)
    n = case.num_tokens
    return Extras(0.5 + weights, nll / n, reference, bonus / n, entropy * factor)


def policy_objective(tokens: Tokens, policy: Mapping[str, Any]) -> Objective:
    """The sum over tokens that `fused_linear_policy_loss` documents, for autograd in float64."""

    def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
        given = {name: value.double() if isinstance(value, Tensor) else value for name, value in policy.items()}
        scale = tokens.token_scale.double()
        clipped = _clipped(logprobs, tokens.old_logprobs.double(), tokens.advantages.double(), given)
        if given.get("erc_low") is not None:
            ratio = entropy.detach() / given["old_entropy"]
            kept = (ratio > 1 - given["erc_low"]) & (ratio < 1 + given["erc_high"])
            clipped = torch.where(kept, clipped, clipped.detach())
        loss = scale * given.get("policy_weights", 1.0) * clipped
        loss = loss - given.get("nll_scale", 0.0) * logprobs - given.get("entropy_scale", 0.0) * entropy
        if given.get("kl_coef", 0.0) > 0:
            difference = logprobs - given["reference_logprobs"]
            loss = loss + scale * given["kl_coef"] * _kl(difference, str(given.get("kl_type", "k3")))
        return loss.sum()

    return objective


def _clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, given: Mapping[str, Any]) -> Tensor:
    method, low, high = given.get("method", "gppo"), given.get("eps_clip", 0.2), given.get("eps_clip_high", 0.28)
    ratio = (logprobs - old_logprobs).exp()
    if method == "cispo":
        return -ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs
    # One in value, the ratio's own relative slope in gradient: what is clipped moves as much as the bound is worth.
    moving = torch.ones_like(ratio) if method == "ppo" else ratio / ratio.detach()
    lower, upper = (1 - low) * moving, (1 + high) * moving
    bounded = torch.where(ratio < 1 - low, lower, torch.where(ratio > 1 + high, upper, ratio))
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    if method == "ce_gppo":
        for acts, beta in (
            ((advantages < 0) & (ratio < 1 - low), given.get("gppo_beta_low", 1.0)),
            ((advantages > 0) & (ratio > 1 + high), given.get("gppo_beta_high", 1.0)),
        ):
            loss = torch.where(acts, beta * loss, loss)
    dual = given.get("eps_clip_c")
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)


def _kl(difference: Tensor, kind: str) -> Tensor:
    k2, k3 = difference.square() / 2, (-difference).exp() - 1 + difference
    return {"k1": difference, "k2": k2, "k3": k3, "k3+": k2 + (k3 - k2).detach()}[kind]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def gradient_tolerance(dtype: torch.dtype, path: str) -> float:
    """Relative error of a gradient of that type; Triton's interpreter truncates where others round."""
    rounding = {torch.float32: 5e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    return rounding if path == "eager" or dtype == torch.float32 else 3 * rounding


class NoTensorOf(TorchDispatchMode):
    """Fails on any operation that makes a tensor of `limit` elements or more, views of `given` excepted."""

    def __init__(self, limit: int, given: Tensor | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.given = None if given is None else given.untyped_storage()._cdata

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            # Triton's interpreter copies whole storages as bytes; no kernel asks for such a tensor.
            if isinstance(part, Tensor) and part.dtype != torch.uint8 and part.untyped_storage()._cdata != self.given:
                assert part.numel() < self.limit, f"{func} made a tensor of {part.shape}"
        return result
