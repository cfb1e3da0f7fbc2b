"""From a recipe's `reward` section to a reward function."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megatron_klear.config.recipe import RewardConfig
from megatron_klear.errors import ConfigError, Fault
from megatron_klear.protocols import RewardFn
from megatron_klear.rewards.arithmetic import ArithmeticReward, is_canonical_integer
from megatron_klear.rewards.format import FormatGate
from megatron_klear.rewards.maths import MathReward
from megatron_klear.rewards.user import UserReward, load_function

REWARD_TYPES = ("arithmetic", "math")


def build_reward(cfg: RewardConfig) -> FormatGate:
    """The reward of a recipe, behind its format. Raises `ConfigError` for a type that does not exist or import."""
    return FormatGate(_build_judge(cfg), think=cfg.format == "think", incorrect=cfg.incorrect)


def _build_judge(cfg: RewardConfig) -> RewardFn:
    if cfg.type == "math":
        return _build_math(cfg)
    if cfg.type == "arithmetic":
        return ArithmeticReward(correct=cfg.correct, incorrect=cfg.incorrect)
    if ":" in cfg.type:
        return UserReward(load_function(cfg.type), cfg.type, correct=cfg.correct)
    raise _unknown_type(cfg.type)


def _build_math(cfg: RewardConfig) -> MathReward:
    return MathReward(
        correct=cfg.correct, incorrect=cfg.incorrect, timeout_s=cfg.timeout_s, num_workers=cfg.num_workers
    )


def _unknown_type(name: str) -> ConfigError:
    nearest = difflib.get_close_matches(name, REWARD_TYPES, n=1)
    suggestion = f"did you mean {nearest[0]}?" if nearest else ""
    fault = Fault("reward.type", name, "expected arithmetic, math, or package.module:function", suggestion)
    return ConfigError(str(fault), [fault])


def can_parse_gold(answer: str, cfg: RewardConfig) -> bool:
    """True if `answer` can serve as a label of this reward; a prompt with another one is a data error, not a 0."""
    return can_parse_golds([answer], cfg)[0]


def can_parse_golds(answers: Sequence[str], cfg: RewardConfig) -> list[bool]:
    """`can_parse_gold` for a whole data set: worker processes start once, not once an answer."""
    if cfg.type == "math":
        with _build_math(cfg) as reward:
            return reward.parses_all(answers)
    if cfg.type == "arithmetic":
        return [is_canonical_integer(answer.strip()) for answer in answers]
    _build_judge(cfg)  # raises if there is no such reward
    return [True] * len(answers)
