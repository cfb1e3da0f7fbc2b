"""The policy losses by name, from hidden states to loss and gradients in one pass over the tokens.

This is what a trainer that knows nothing of megatron_klear calls. GSPO's ratio is of a sequence, so it is not separable
over tokens: take `fused_linear_logprobs` and its loss on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule
from megatron_klear_kernels.linear_policy_loss.from_logits import linear_loss_from_logits
from megatron_klear_kernels.linear_policy_loss.kl import KlType
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.one_pass import LinearLoss, MainGrad, fused_linear_loss
from megatron_klear_kernels.linear_policy_loss.paths import PathChoice, PathName
from megatron_klear_kernels.linear_policy_loss.rows import RowPlan
from megatron_klear_kernels.linear_policy_loss.token_terms import Terms, TokenInputs, TokenLoss, token_terms
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

Method = Literal["ppo", "gppo", "ce_gppo", "cispo"]
METHODS: tuple[Method, ...] = ("ppo", "gppo", "ce_gppo", "cispo")


class PolicyArguments(TypedDict, total=False):
    """Keyword arguments of `policy_token_loss`, with its defaults."""

    method: Method
    eps_clip: float | None
    eps_clip_high: float
    gppo_beta_low: float
    gppo_beta_high: float
    eps_clip_c: float | None
    policy_weights: Tensor | None
    nll_scale: Tensor | None
    reference_logprobs: Tensor | None
    kl_coef: float
    kl_type: KlType
    entropy_scale: Tensor | None
    old_entropy: Tensor | None
    erc_low: float | None
    erc_high: float | None


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """float32 [T] and bool [T] per token, without gradient; meaningless where a token has no loss."""

    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor
    entropy_kept: Tensor | None
    """False where entropy-ratio clipping took the policy's gradient away; None without it."""
    path: PathChoice


@dataclass(frozen=True, slots=True)
class FusedPolicyLoss:
    """Scalar with gradient to hidden states and weight, and what is known of each token."""

    loss: Tensor
    statistics: TokenStatistics


def clip_rule(
    method: str,
    *,
    eps_clip: float | None,
    eps_clip_high: float,
    gppo_beta_low: float = 1.0,
    gppo_beta_high: float = 1.0,
    eps_clip_c: float | None = None,
) -> ClipRule:
    """The clip rule of a method, as coefficients.py tells it. PPO with two widths is DAPO's clip-higher.

    Raises ValueError for an unknown method, for GSPO, and for settings the method does not have.
    """
    if method not in METHODS:
        hint = "; its ratio is of a sequence: use fused_linear_logprobs" if method == "gspo" else ""
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}{hint}")
    if method != "ce_gppo" and (gppo_beta_low, gppo_beta_high) != (1.0, 1.0):
        raise ValueError(f"gppo_beta_low and gppo_beta_high act in ce_gppo alone, not in {method}; leave them at 1")
    if method == "cispo":
        if eps_clip_c is not None:
            raise ValueError("cispo has no dual clip; leave eps_clip_c out")
        return ClipRule(eps_clip, eps_clip_high, two_sided=True)
    if eps_clip is None:
        raise ValueError(f"{method} needs a lower clip width, got eps_clip None; only cispo can do without")
    keep_low, keep_high = (0.0, 0.0) if method == "ppo" else (gppo_beta_low, gppo_beta_high)
    value_low, value_high = (gppo_beta_low, gppo_beta_high) if method == "ce_gppo" else (1.0, 1.0)
    return ClipRule(
        eps_clip,
        eps_clip_high,
        value_low=value_low,
        value_high=value_high,
        keep_low=keep_low,
        keep_high=keep_high,
        dual_clip=eps_clip_c,
    )


def policy_token_loss(
    old_logprobs: Tensor,
    advantages: Tensor,
    token_scale: Tensor,
    *,
    method: Method = "gppo",
    eps_clip: float | None = 0.2,
    eps_clip_high: float = 0.28,
    gppo_beta_low: float = 1.0,
    gppo_beta_high: float = 1.0,
    eps_clip_c: float | None = None,
    policy_weights: Tensor | None = None,
    nll_scale: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: KlType = "k3",
    entropy_scale: Tensor | None = None,
    old_entropy: Tensor | None = None,
    erc_low: float | None = None,
    erc_high: float | None = None,
) -> TokenLoss:
    """Klear-Reasoner's whole recipe for tokens [T]: policy term, joint SFT term, KL penalty, entropy bonus.

    L = sum_t [ -token_scale policy_weights value A  -nll_scale l  +kl_coef token_scale KL  -entropy_scale H ]

    Args:
        old_logprobs, advantages, token_scale: [T] float32. `token_scale` is mask, aggregation weight and global count
            in one number; a token of 0 counts nothing, but its numbers must be finite unless `rows` leaves it out.
        method: "ppo" (also GRPO; with eps_clip_high DAPO), "gppo", "ce_gppo" or "cispo", see coefficients.py.
        eps_clip, eps_clip_high: clip widths. `eps_clip_c`: dual clip of negative advantages, None for none.
        gppo_beta_low, gppo_beta_high: CE-GPPO's weights of clipped tokens.
        policy_weights: [T] float32, corrections of an engine's probabilities on the policy term; None for 1.
        nll_scale: [T] float32, alpha and the weight of tokens in the joint SFT term; None for none.
        reference_logprobs, kl_coef, kl_type: KL penalty, see kl.py; `kl_coef` 0 for none.
        entropy_scale: [T] float32 weight of an entropy bonus; None for none.
        old_entropy, erc_low, erc_high: entropy-ratio clipping (arXiv 2512.05591); both bounds, or None for none.

    Raises:
        ValueError: settings or shapes that do not fit.
    """
    rule = clip_rule(
        method,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        gppo_beta_low=gppo_beta_low,
        gppo_beta_high=gppo_beta_high,
        eps_clip_c=eps_clip_c,
    )
    if kl_coef < 0:
        raise ValueError(f"kl_coef is {kl_coef}: a penalty cannot be negative; give 0 or more")
    if kl_coef > 0 and reference_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef}, but there are no reference_logprobs [T]")
    inputs = TokenInputs(
        advantages=advantages,
        old_logprobs=old_logprobs,
        policy_scale=token_scale if policy_weights is None else token_scale * policy_weights,
        old_entropy=old_entropy,
        nll_scale=nll_scale,
        kl_scale=token_scale * kl_coef if kl_coef > 0 else None,
        reference_logprobs=reference_logprobs,
        entropy_scale=entropy_scale,
    )
    for name, row in inputs.given():
        if row.shape != token_scale.shape:
            raise ValueError(
                f"{name} is {list(row.shape)}, but token_scale {list(token_scale.shape)}: expected one shape"
            )
        if row.dtype != torch.float32:
            raise ValueError(f"{name} is {row.dtype}: expected float32 [T], convert it")
    return TokenLoss(inputs, Terms(rule, erc=_erc(erc_low, erc_high, old_entropy), kl_type=kl_type))


def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_scale: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    hidden_grad_reduce: bool = False,
    rows: RowPlan | None = None,
    main_grad: Tensor | None = None,
    upstream_scale: float = 1.0,
    chunk_bytes: int | None = None,
    path: PathName = "auto",
    **policy: Unpack[PolicyArguments],
) -> FusedPolicyLoss:
    """Summed policy loss straight from hidden states; the logits [T, V] never exist.

    Args:
        hidden: [T, H] float32, bfloat16 or float16, the same on every rank of `group`.
        weight: [V/tp, H] of that type: rows `vocab_start` onwards of the output layer.
        target: [T] int64, global ids of the tokens whose log-probs l are taken.
        old_logprobs, advantages, token_scale, policy: the loss; see `policy_token_loss`.
        group, vocab_start, vocab_size: the ranks that share the vocabulary, where this one's part begins, and how many
            tokens there are (columns beyond are padding); `vocab_size` None: no padding, and no other rank.
        temperature: logits are divided by it.
        hidden_grad_reduce: sum the gradient of `hidden` over `group` here; otherwise it is this rank's part.
        rows: which rows to work on, and which of them may have a gradient (`plan_rows`); None for all.
        main_grad, upstream_scale: see `MainGrad`. [V/tp, H] float32.
        chunk_bytes: most bytes of logits held at a time; None: 48 MiB on a CPU, 2400 MiB on a GPU.
        path: "auto", "eager", "triton" or "triton_scaled_exp".

    Raises:
        ValueError: settings, shapes or types that do not fit.
    """
    loss = policy_token_loss(old_logprobs, advantages, token_scale, **policy)
    _check_one_for_each(token_scale, target)
    vocab = _vocabulary(group, vocab_start, vocab_size, weight.size(0))
    settings = LinearSettings(vocab, temperature, path, chunk_bytes, hidden_grad_reduce)
    held = MainGrad(main_grad, upstream_scale) if main_grad is not None else None
    fused = fused_linear_loss(hidden, weight, target, loss, settings, rows=rows, main_grad=held)
    return FusedPolicyLoss(fused.loss, _statistics(fused, loss))


def policy_loss_from_logits(
    logits: Tensor,
    target: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_scale: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    inplace: bool = False,
    path: PathName = "auto",
    **policy: Unpack[PolicyArguments],
) -> FusedPolicyLoss:
    """The same loss from logits [T, V/tp] that are there already, of any float type and any strides.

    With `inplace` the backward writes their gradient over them: nothing of their size is allocated, and autograd
    refuses a later backward that would need the logits as they were. Other arguments and errors as
    `fused_linear_policy_loss`.
    """
    loss = policy_token_loss(old_logprobs, advantages, token_scale, **policy)
    _check_one_for_each(token_scale, target)
    vocab = _vocabulary(group, vocab_start, vocab_size, logits.size(-1))
    fused = linear_loss_from_logits(logits, target, loss, vocab, temperature=temperature, inplace=inplace, path=path)
    return FusedPolicyLoss(fused.loss, _statistics(fused, loss))


def _check_one_for_each(token_scale: Tensor, target: Tensor) -> None:
    if token_scale.shape != target.shape:
        raise ValueError(
            f"token_scale is {list(token_scale.shape)}, but there are {list(target.shape)} targets: expected one for"
            " each"
        )


def _vocabulary(group: dist.ProcessGroup | None, start: int, size: int | None, num_columns: int) -> Vocabulary:
    if size is None:
        if group is not None and group.size() > 1:
            raise ValueError("vocab_size is needed where ranks share the vocabulary: which of the columns are padding?")
        size = start + num_columns
    return Vocabulary(start, size, group)


def _statistics(fused: LinearLoss, loss: TokenLoss) -> TokenStatistics:
    found = token_terms(fused.logprobs, fused.entropy, loss.inputs, loss.terms)
    c = found.coefficients
    assert c is not None
    return TokenStatistics(
        fused.logprobs, fused.entropy, c.ratio, c.clipped_low, c.clipped_high, c.clipped_dual, found.kept, fused.path
    )


def _erc(low: float | None, high: float | None, old_entropy: Tensor | None) -> tuple[float, float] | None:
    if low is None and high is None:
        return None
    if low is None or high is None or old_entropy is None:
        raise ValueError(
            "entropy-ratio clipping needs erc_low, erc_high and old_entropy [T]; got"
            f" erc_low={low}, erc_high={high}, old_entropy {'missing' if old_entropy is None else 'given'}"
        )
    return low, high
