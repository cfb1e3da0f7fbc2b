"""The brain that follows the script: no model, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_klear.rollout.fake.jobs import Drawn, Job
from megatron_klear.rollout.fake.script import Script, logprob_of, state_of
from megatron_klear.rollout.fake.weights import RawTensor


class ScriptedBrain:
    """Any weights will do: they change the checksums, and by their number the log-probs."""

    def __init__(self, script: Script, context_length: int) -> None:
        self.script = script
        self.vocab_size, self.context_length = script.vocab_size, context_length

    def load(self, weights: Mapping[str, RawTensor]) -> None:
        """Whatever comes."""

    def draw(self, jobs: Sequence[Job], version: int | None) -> list[list[Drawn]]:
        """One token each."""
        return [[Drawn(self._next(job), logprob_of(version))] for job in jobs]

    def _next(self, job: Job) -> int:
        job.state = state_of([job.drawn[-1].token], job.state) if job.drawn else state_of(job.prompt)
        return self.script.next_token(job.state, job.seed, job.stop_token_ids)

    def score(self, prompt: Sequence[int], version: int | None) -> list[float]:
        """The number of the weights, for each token."""
        return [logprob_of(version)] * (len(prompt) - 1)
