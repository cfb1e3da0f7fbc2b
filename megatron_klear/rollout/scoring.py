"""Judges finished groups inside the rollout process, one after the other, beside generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_klear.config.recipe import RewardConfig, SelectionConfig
from megatron_klear.data.template import ChatTokenizer, load_tokenizer
from megatron_klear.protocols import RewardFn
from megatron_klear.rewards.registry import build_reward
from megatron_klear.rollout.jobs import ProcessSettings
from megatron_klear.rollout.sampler import SelectionContext, score, select, to_sample
from megatron_klear.types import Completion, Prompt, RolloutBatch, SampleGroup


class Scorer:
    """A run's reward and selection rules, in a thread of their own: the reward's processes answer to one thread.

    Both reward and tokenizer are made when the first group comes.
    """

    def __init__(
        self, reward: RewardConfig, selection: SelectionConfig, *, model_dir: str, max_response_len: int
    ) -> None:
        self._reward = reward
        self._selection = selection
        self._model_dir = model_dir
        self._max_response_len = max_response_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._tools: tuple[RewardFn, ChatTokenizer] | None = None

    async def judge(self, prompt: Prompt, completions: Sequence[Completion], weight_version: int) -> RolloutBatch:
        """The group scored and selected, or none, with what was dropped. Raises what the reward raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._judge, prompt, completions, weight_version)

    async def close(self) -> None:
        """Wait for the group that is being judged, and end the reward's processes."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(cancel_futures=True)

    def _judge(self, prompt: Prompt, completions: Sequence[Completion], weight_version: int) -> RolloutBatch:
        if self._tools is None:
            self._tools = build_reward(self._reward), load_tokenizer(self._model_dir)
        reward_fn, tokenizer = self._tools
        group = SampleGroup(prompt, tuple(to_sample(prompt, completion) for completion in completions))
        scored = score(RolloutBatch((group,)), reward_fn, tokenizer.decode_response)
        # The seed is of shuffle_rewards alone, which needs whole steps and is refused with servers.
        return select(scored, self._selection, SelectionContext(weight_version, self._max_response_len, seed=0))

    def _close(self) -> None:
        if self._tools is not None:
            self._tools[0].close()


def make_scorer(settings: ProcessSettings) -> Scorer:
    """That of a rollout process with a reward."""
    assert settings.reward is not None
    return Scorer(
        settings.reward,
        settings.selection,
        model_dir=settings.model_dir,
        max_response_len=settings.max_response_len,
    )
