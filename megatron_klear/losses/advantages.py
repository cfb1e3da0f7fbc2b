"""Group advantages (GRPO): how much better than its siblings a sample did."""

from __future__ import annotations

import math

from megatron_klear.config.recipe import AdvantageConfig
from megatron_klear.types import SampleGroup


class GroupAdvantage:
    """A_j = (R_j - mean R) / (std R + eps) over the samples of one prompt (Klear-Reasoner Eq. 4, population std)."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.std = config.std
        self.eps = config.eps

    def __call__(self, group: SampleGroup) -> list[float]:
        """One advantage a sample. Rewards that are all equal give zeros, a group of one gives zero."""
        rewards = []
        for sample in group.samples:
            if sample.reward is None:
                raise ValueError(f"sample {sample.sample_id} has no reward; score and select before advantages")
            rewards.append(sample.reward)
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        # Rewards such as 0.1 leave rounding noise around the mean, which a tiny std would blow up to full advantages.
        if min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        if self.std == "none":
            return centred
        divisor = len(rewards) - (1 if self.std == "unbiased" else 0)
        std = math.sqrt(math.fsum(c * c for c in centred) / divisor)
        return [c / (std + self.eps) for c in centred]
