"""Greedy accuracy on held-out problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_klear.config.recipe import EvalConfig, PromptDataConfig, RewardConfig
from megatron_klear.data.prompts import PromptSet, load_prompts, validate_answers
from megatron_klear.data.template import ChatTokenizer
from megatron_klear.errors import RewardError
from megatron_klear.protocols import RewardFn, RolloutEngine
from megatron_klear.rewards.registry import can_parse_golds
from megatron_klear.rollout.sampler import SamplingPlan, draw
from megatron_klear.types import Prompt, RewardRequest


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers among all, and the reasons of the rest."""

    num_correct: int
    num_problems: int
    reasons: Counter[str]

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        return self.num_correct / self.num_problems


class Evaluator:
    """Holds the held-out problems. Lives on rank 0, beside the engine."""

    def __init__(
        self, prompts: tuple[Prompt, ...], reward_fn: RewardFn, tokenizer: ChatTokenizer, config: EvalConfig
    ) -> None:
        self.prompts = prompts
        self.reward_fn = reward_fn
        self.tokenizer = tokenizer
        self.max_response_len = config.max_response_len

    def run(self, engine: RolloutEngine) -> Accuracy:
        """Greedy answers of all problems with the engine's current weights.

        An answer is right when the reward's reason is "correct". A failed verification is an error: an accuracy over
        a part of the problems could not be compared with another.
        """
        plan = SamplingPlan(1, self.max_response_len, 0.0, self.tokenizer.stop_token_ids, seed=0, step=0)
        drawn = draw(engine, self.prompts, plan)
        requests = [
            RewardRequest(p, self.tokenizer.decode_response(c.token_ids), truncated=c.stop_reason == "length")
            for p, c in drawn
        ]
        scores = self.reward_fn(requests)
        failures = Counter(s.failure for s in scores if s.failure)
        if failures:
            raise RewardError(
                f"evaluation could not verify {sum(failures.values())} of {len(scores)} answers: {failures}"
            )
        reasons = Counter(s.reason for s in scores)
        return Accuracy(reasons["correct"], len(scores), reasons)


def load_evaluator(
    config: EvalConfig, reward: RewardConfig, reward_fn: RewardFn, tokenizer: ChatTokenizer, *, max_context: int
) -> Evaluator | None:
    """The recipe's evaluator, or None where it names no held-out problems."""
    if config.prompt_data is None:
        return None
    data = PromptDataConfig(
        prompt_data=config.prompt_data, max_prompt_len=max_context - config.max_response_len, overlong="error"
    )
    prompts = readable_prompts(data, reward, tokenizer)
    return Evaluator(prompts.prompts, reward_fn, tokenizer, config)


def readable_prompts(data: PromptDataConfig, reward: RewardConfig, tokenizer: ChatTokenizer) -> PromptSet:
    """Prompts whose answers the reward can read; the others are dropped and counted."""
    loaded = load_prompts(data, tokenizer)
    flags = can_parse_golds([prompt.answer for prompt in loaded.prompts], reward)
    readable = dict(zip((prompt.prompt_id for prompt in loaded.prompts), flags, strict=True))
    return validate_answers(loaded, lambda prompt: readable[prompt.prompt_id])
