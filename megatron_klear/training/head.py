"""From hidden states to token statistics, only on rows that have a loss."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.broadcast import all_gather_columns
from megatron_klear.parallel.topology import Groups
from megatron_klear.types import MicroBatch, TokenStats
from megatron_klear_kernels.linear_policy_loss.logprobs import EntropyMode, Vocabulary, linear_logprobs


def loss_rows(micro_batch: MicroBatch) -> Tensor:
    """[R] int64 positions with a loss; row 0 for a micro-batch without any, so that every rank runs the same graph."""
    rows = ((micro_batch.token_scale != 0) | (micro_batch.nll_scale != 0)).nonzero()[:, 0]
    return rows if rows.numel() else rows.new_zeros(1)


class Head:
    """Output layer of the last stage. Log-probs are those of softmax(logits / temperature)."""

    def __init__(
        self, stage: ModelStage, groups: Groups, *, temperature: float, entropy_gradient: bool = False
    ) -> None:
        self.stage = stage
        self.groups = groups
        self.temperature = temperature
        self.entropy: EntropyMode = "gradient" if entropy_gradient else "value"
        self.vocabulary = Vocabulary(stage.vocab_start, stage.shape.vocab_size, groups.tensor)

    def _whole(self, hidden: Tensor) -> Tensor:
        """All positions on every tensor-parallel rank, with a backward that sums the ranks' partial gradients."""
        if self.stage.core.config.sequence_parallel:
            # The backward reduce-scatters them.
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        # The backward all-reduces them.
        return copy_to_tensor_model_parallel_region(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [T, V] of every position: for checks of small inputs, never for training."""
        local = self._whole(hidden)[:, 0].float() @ self.stage.core.head_weight().float().t()
        return all_gather_columns(local, self.groups.tensor)[:, : self.stage.shape.vocab_size]

    def __call__(self, hidden: Tensor, micro_batch: MicroBatch) -> TokenStats:
        """hidden [T, 1, H] (or [T/tp, 1, H] under sequence parallelism) -> log-probs and entropy [T]."""
        hidden = self._whole(hidden)
        rows = loss_rows(micro_batch)
        logprobs, entropy = linear_logprobs(
            hidden[:, 0].index_select(0, rows),
            self.stage.core.head_weight(),
            micro_batch.labels[rows],
            vocab=self.vocabulary,
            temperature=self.temperature,
            entropy=self.entropy,
        )
        zeros = torch.zeros(hidden.size(0), device=hidden.device)
        return TokenStats(zeros.index_copy(0, rows, logprobs), zeros.index_copy(0, rows, entropy))
