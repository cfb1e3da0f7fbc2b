"""From rewards to one advantage a sample. Each estimator sees all groups of a step.

R_ij is the reward of sample j of prompt i, G_i the size of its group:
    grpo                    (R_ij - mean_j R_ij) / (std_j R_ij + eps)       arXiv 2402.03300; Klear-Reasoner Eq. 4
                            without the std: Dr.GRPO, arXiv 2503.20783
    rloo                    R_ij - mean of the OTHER samples of the group    arXiv 2402.14740
    reinforce_pp            (R_ij - mean R) / (std R + eps), over the step   arXiv 2501.03262
    reinforce_pp_baseline   (R_ij - mean_j R_ij), then divided by its std over the step
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_klear.config.loss import AdvantageConfig
from megatron_klear.protocols import AdvantageFn
from megatron_klear.types import SampleGroup


class GroupAdvantage:
    """grpo."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.std = config.std
        self.eps = config.eps

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """Rewards that are all equal give zeros, a group of one gives zero."""
        return [self._group(rewards_of(group)) for group in groups]

    def _group(self, rewards: list[float]) -> list[float]:
        centred = centre(rewards)
        return centred if self.std == "none" or not any(centred) else normalise(centred, self.std, self.eps)


class LeaveOneOutAdvantage:
    """rloo."""

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """A group of one has no others: zero."""
        return [self._group(rewards_of(group)) for group in groups]

    def _group(self, rewards: list[float]) -> list[float]:
        if len(rewards) == 1:
            return [0.0]
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


class StepAdvantage:
    """reinforce_pp, and with `baseline` reinforce_pp_baseline."""

    def __init__(self, config: AdvantageConfig, *, baseline: bool) -> None:
        self.std = config.std
        self.eps = config.eps
        self.baseline = baseline

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """Normalised over all samples of the step; all equal gives zeros."""
        rows = [rewards_of(group) for group in groups]
        if self.baseline:
            rows = [centre(row) for row in rows]
        flat = [value for row in rows for value in row]
        if not flat or min(flat) == max(flat):
            return [[0.0] * len(row) for row in rows]
        centred = flat if self.baseline else centre(flat)
        scaled = iter(centred if self.std == "none" else normalise(centred, self.std, self.eps))
        return [[next(scaled) for _ in row] for row in rows]


def rewards_of(group: SampleGroup) -> list[float]:
    """Rewards of a group; every one must be set."""
    rewards = []
    for sample in group.samples:
        reward = sample.training_reward
        if reward is None:
            raise ValueError(f"sample {sample.sample_id} has no reward; score and select before advantages")
        rewards.append(reward)
    return rewards


def centre(values: Sequence[float]) -> list[float]:
    """Minus their mean; exact zeros where all are equal."""
    # Values such as 0.1 leave rounding noise around their mean, which a tiny std would blow up to full advantages.
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def normalise(centred: Sequence[float], std: str, eps: float) -> list[float]:
    """Divided by their root mean square over n (population) or n - 1 (unbiased)."""
    divisor = len(centred) - (1 if std == "unbiased" else 0)
    scale = math.sqrt(math.fsum(c * c for c in centred) / divisor) + eps
    return [c / scale for c in centred]


def build_advantage(config: AdvantageConfig) -> AdvantageFn | None:
    """The estimator a recipe names; None for gae, which needs the critic's values."""
    match config.type:
        case "grpo":
            return GroupAdvantage(config)
        case "rloo":
            return LeaveOneOutAdvantage()
        case "reinforce_pp":
            return StepAdvantage(config, baseline=False)
        case "reinforce_pp_baseline":
            return StepAdvantage(config, baseline=True)
        case "gae":
            return None
