"""Errors of the fused policy loss against float64, by path and type, beside bfloat16 logits.

    python benchmarks/fused_loss_numerics.py [--tokens 512 --hidden 256 --vocab 16384]
    TRITON_INTERPRET=1 python benchmarks/fused_loss_numerics.py --tokens 64 ...     the Triton paths on a CPU

The reference takes the inputs as they are (bfloat16 values are exact in float64) and does the rest in float64: GPPO
with an entropy bonus, through autograd. Errors of log-probs, entropies and ratios are the largest of all tokens; those
of the gradients are relative to their norm.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from fused_loss import Case
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.paths import PathName, choose_path
from megatron_klear_kernels.linear_policy_loss.policy_loss import fused_linear_policy_loss

EPS, EPS_HIGH, TEMPERATURE, BONUS = 0.2, 0.28, 0.9, 0.01


@dataclass(frozen=True)
class Found:
    logprobs: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def make_case(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator) * (4 / hidden**0.5)).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    logprobs = (x.double() @ weight.double().t() / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old = (logprobs + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)).float()
    rows = (x, weight, targets, old, torch.randn(tokens, generator=generator), torch.full((tokens,), 1 / tokens))
    return Case(*(row.to(device) for row in rows))


def reference(case: Case, logits_dtype: torch.dtype = torch.float64) -> Found:
    """In float64, or with logits rounded to `logits_dtype` as a bfloat16 product leaves them."""
    hidden, weight = (tensor.double().requires_grad_() for tensor in (case.hidden, case.weight))
    logits = (hidden @ weight.t()).to(logits_dtype).double() / TEMPERATURE
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, case.targets[:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    ratio, advantages = (logprobs - case.old.double()).exp(), case.advantages.double()
    fixed = ratio.detach()
    high, low = (advantages > 0) & (fixed > 1 + EPS_HIGH), (advantages < 0) & (fixed < 1 - EPS)
    bound = torch.where(high, 1 + EPS_HIGH, torch.where(low, 1 - EPS, fixed))
    loss = -(bound / fixed * ratio * advantages + BONUS * entropy) * case.scale.double()
    loss.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return Found(logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)


def fused(case: Case, path: PathName) -> Found:
    hidden, weight = case.leaves()
    made = fused_linear_policy_loss(
        hidden,
        weight,
        case.targets,
        case.old,
        case.advantages,
        case.scale,
        eps_clip=EPS,
        eps_clip_high=EPS_HIGH,
        entropy_scale=BONUS * case.scale,
        temperature=TEMPERATURE,
        path=path,
    )
    made.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Found(made.statistics.logprobs, made.statistics.entropy, hidden.grad, weight.grad)


def errors(found: Found, wanted: Found, old: Tensor) -> str:
    def largest(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).abs().max())

    def relative(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    ratios = ((found.logprobs.double() - old.double()).exp(), (wanted.logprobs - old.double()).exp())
    values = (
        largest(found.logprobs, wanted.logprobs),
        largest(found.entropy, wanted.entropy),
        largest(*ratios),
        relative(found.d_hidden, wanted.d_hidden),
        relative(found.d_weight, wanted.d_weight),
    )
    return "".join(f"{value:>11.1e}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (arguments.tokens, arguments.hidden, arguments.vocab)
    print(f"T {sizes[0]}, H {sizes[1]}, V {sizes[2]}, {device}, torch {torch.__version__}")
    print(f"{'':<30}{'log-prob':>11}{'entropy':>11}{'ratio':>11}{'dh':>11}{'dW':>11}")
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(*sizes, dtype, device)
        wanted, name = reference(case), str(dtype).removeprefix("torch.")
        paths: tuple[PathName, ...] = ("eager", "triton", "triton_scaled_exp")
        for path in paths:
            try:
                choose_path(path, torch.device(device))
            except ValueError:
                continue
            print(f"{name} {path:<{29 - len(name)}}{errors(fused(case, path), wanted, case.old)}")
    rounded = reference(case, torch.bfloat16)
    print(f"{'bfloat16 logits, rest exact':<30}{errors(rounded, wanted, case.old)}")


if __name__ == "__main__":
    main()
