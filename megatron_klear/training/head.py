"""From hidden states to token statistics or straight to a loss, only on rows that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from megatron_klear.losses.terms import RlLoss, SftLoss
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.broadcast import all_gather_columns
from megatron_klear.parallel.topology import Groups
from megatron_klear.protocols import PolicyLoss
from megatron_klear.types import LossOutput, MicroBatch, TokenStats
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.one_pass import MainGrad, fused_linear_loss
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.rows import RowPlan, plan_rows
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How the output layer of a run works. Log-probs are those of softmax(logits / temperature)."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    """The loss has an entropy bonus, or is of the user's own."""
    advantage_decides: bool = False
    """A token of advantage 0 has no policy gradient: no KL penalty or bonus stands in the loss, and advantages do not
    change after packing."""
    path: PathName = "auto"
    chunk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A loss, and the statistics (without gradient, where the loss was fused) that it is of."""

    output: LossOutput
    stats: TokenStats


class Head:
    """Output layer of the last stage."""

    def __init__(self, stage: ModelStage, groups: Groups, settings: HeadSettings) -> None:
        self.stage = stage
        self.groups = groups
        self.settings = settings
        self.linear = LinearSettings(
            Vocabulary(stage.vocab_start, stage.shape.vocab_size, groups.tensor),
            settings.temperature,
            settings.path,
            settings.chunk_bytes,
        )

    def __call__(self, hidden: Tensor, micro_batch: MicroBatch) -> TokenStats:
        """hidden [T, 1, H] (or [T/tp, 1, H] under sequence parallelism) -> log-probs and entropy [T]."""
        weight = self.stage.core.head_weight()
        # The kernel adds to it in the backward, which is when Megatron's layers do.
        main_grad = _main_grad(weight)
        found = fused_linear_logprobs(
            self._whole(hidden)[:, 0],
            weight,
            micro_batch.labels,
            self.linear,
            rows=self._rows(micro_batch),
            entropy_gradient=self.settings.entropy_gradient,
            main_grad=main_grad,
        )
        _mark(weight, added=main_grad is not None)
        return TokenStats(found.logprobs, found.entropy)

    def judge(self, hidden: Tensor, micro_batch: MicroBatch, loss: PolicyLoss) -> Judged:
        """The loss of a micro-batch: in one pass where it is one of ours and separable over tokens."""
        ours = loss if isinstance(loss, (RlLoss, SftLoss)) else None
        tokens = ours.token_loss(micro_batch) if ours is not None else None
        if ours is None or tokens is None:
            stats = self(hidden, micro_batch)
            return Judged(loss(stats, micro_batch), stats)
        weight = self.stage.core.head_weight()
        main_grad = _main_grad(weight)
        fused = fused_linear_loss(
            self._whole(hidden)[:, 0],
            weight,
            micro_batch.labels,
            tokens,
            self.linear,
            rows=self._rows(micro_batch),
            # Losses are sums and Megatron multiplies them by exactly 1: parallel/scale.py.
            main_grad=MainGrad(main_grad, upstream_scale=1.0) if main_grad is not None else None,
        )
        _mark(weight, added=fused.added_to_main_grad)
        stats = TokenStats(fused.logprobs, fused.entropy)
        return Judged(LossOutput(fused.loss, ours.metrics(stats, micro_batch)), stats)

    def choose_rows(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set each micro-batch's rows, on the host: one transfer for all of them, before anything runs."""
        scales = [torch.stack((mb.token_scale, mb.nll_scale, mb.advantages)) for mb in micro_batches]
        sizes = [scale.size(1) for scale in scales]
        on_host = torch.cat(scales, dim=1).cpu().split(sizes, dim=1)
        for micro_batch, (token_scale, nll_scale, advantages) in zip(micro_batches, on_host, strict=True):
            plan = plan_rows(
                token_scale, nll_scale, advantages, every_loss_row_has_gradient=not self.settings.advantage_decides
            )
            micro_batch.loss_rows = plan.index.to(micro_batch.labels.device, non_blocking=True)
            micro_batch.num_gradient_rows = plan.num_gradient

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [T, V] of every position: for checks of small inputs, never for training."""
        local = self._whole(hidden)[:, 0].float() @ self.stage.core.head_weight().float().t()
        return all_gather_columns(local, self.groups.tensor)[:, : self.stage.shape.vocab_size]

    def _rows(self, micro_batch: MicroBatch) -> RowPlan:
        if micro_batch.loss_rows is None:
            self.choose_rows([micro_batch])
        assert micro_batch.loss_rows is not None
        return RowPlan(micro_batch.loss_rows, micro_batch.num_gradient_rows)

    def _whole(self, hidden: Tensor) -> Tensor:
        """All positions on every tensor-parallel rank, with a backward that sums the ranks' partial gradients."""
        if self.stage.core.config.sequence_parallel:
            # The backward reduce-scatters them.
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        # The backward all-reduces them.
        return copy_to_tensor_model_parallel_region(hidden)


def _main_grad(weight: Tensor) -> Tensor | None:
    """Megatron's gradient buffer of the weight; None before the model is wrapped, and where nothing is trained."""
    found: Tensor | None = vars(weight).get("main_grad")
    return found if found is not None and found.dtype == torch.float32 and torch.is_grad_enabled() else None


def _mark(weight: Tensor, *, added: bool) -> None:
    """Tell Megatron's hook whether main_grad has the gradient; it adds what autograd brings only if not."""
    if torch.is_grad_enabled():
        setattr(weight, "grad_added_to_main_grad", added)  # noqa: B010  an attribute Megatron reads
