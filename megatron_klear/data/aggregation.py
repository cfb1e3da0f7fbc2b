"""How much one trained token of a sample counts. Every division of a loss happens here, over the whole update.

With N trained tokens in S samples that have any, T_j of them in sample j, and a constant C:
    token-mean               1 / N            every token the same (DAPO, Klear-Reasoner Eq. 7)
    seq-mean-token-sum       1 / S
    seq-mean-token-mean      1 / (S T_j)      every sample the same (GRPO)
    seq-mean-token-sum-norm  1 / (S C)        a constant instead of the length (Dr.GRPO)
A sample without trained tokens counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_klear.config.loss import LossAggMode


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A mode and, for seq-mean-token-sum-norm, its constant."""

    mode: LossAggMode = "token-mean"
    factor: float | None = None

    def token_weights(self, lengths: Sequence[int]) -> list[float]:
        """Weight of each trained token of each sample, by the samples' numbers of trained tokens; 0 for none."""
        num_samples = sum(length > 0 for length in lengths)
        num_tokens = sum(lengths)
        return [self._weight(length, num_samples, num_tokens) if length else 0.0 for length in lengths]

    def _weight(self, length: int, num_samples: int, num_tokens: int) -> float:
        match self.mode:
            case "token-mean":
                return 1.0 / num_tokens
            case "seq-mean-token-sum":
                return 1.0 / num_samples
            case "seq-mean-token-mean":
                return 1.0 / (num_samples * length)
            case "seq-mean-token-sum-norm":
                assert self.factor is not None, "seq-mean-token-sum-norm needs its constant"
                return 1.0 / (num_samples * self.factor)
