"""The scheduler of the fake server: one thread draws for all running requests, the others wait for it.

What is true here is true of SGLang 0.5.23 as read and measured; two labels of the version are kept as there are two
processes that each have their own in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition

from megatron_klear.errors import WeightSyncError
from megatron_klear.rollout.fake.faults import Faults, die
from megatron_klear.rollout.fake.jobs import Brain, Job
from megatron_klear.rollout.fake.script import number_of
from megatron_klear.rollout.fake.weights import RawTensor

POLL_S = 0.05
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """See command.py."""

    token_seconds: float = 0.0
    max_running_requests: int = 256
    weight_version: str = "default"
    brackets_updates: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an update of weights ended."""

    success: bool
    message: str


class Engine:
    """Requests, weights and pauses. Every method may be called from any thread."""

    def __init__(
        self, brain: Brain, faults: Faults, settings: EngineSettings, weights: Mapping[str, RawTensor]
    ) -> None:
        self.brain, self.faults, self.settings = brain, faults, settings
        self.changed = Condition()
        self.jobs: list[Job] = []
        self.weights = dict(weights)
        brain.load(weights)
        self.label = self.reported = settings.weight_version
        # Number of the weights that are really there, whatever they are called.
        self.version: int | None = number_of(self.label)
        self.is_session_open = False
        self.is_asleep = False
        self._is_unnamed = False
        self._holds_new = self._is_updating = False
        self._frozen = ""
        self._cache: dict[tuple[int, ...], int | None] = {}

    def run(self) -> None:
        """Draw for ever."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs and not self._frozen)
                self._advance(self.jobs[: self.settings.max_running_requests])
            # Never 0: without a pause this thread would take the lock again before the others wake.
            time.sleep(max(self.settings.token_seconds, 1e-5))

    def _advance(self, jobs: list[Job]) -> None:
        if self.is_asleep:
            die("drew a token while its memory was released")
        for job in jobs:
            if not job.drawn:
                self._start(job)
        going = [job for job in jobs if not job.done.is_set()]
        for job, drawn in zip(going, self.brain.draw(going, self.version), strict=True):
            if job.is_deadly:
                die("die_after came")
            job.extend(drawn)
        self.jobs = [job for job in self.jobs if not job.done.is_set()]
        self.changed.notify_all()

    def _start(self, job: Job) -> None:
        """What is done for the prompt."""
        cached = job.prompt in self._cache
        job.num_cached = len(job.prompt) - 1 if cached else 0
        filled_by = self._cache.setdefault(job.prompt, self.version)
        if job.wants_scores:
            job.scores = self.brain.score(job.prompt, filled_by)
        if job.max_new_tokens == 0:
            job.end(type="length", length=0)

    def submit(self, job: Job, is_gone: Callable[[], bool]) -> bool:
        """Run a request to its end. False if the client went away first; the request is then ended too."""
        with self.changed:
            while self._holds_new or self._is_updating:
                self.changed.wait(POLL_S)
                if is_gone():
                    return False
            job.label = self.label
            self.jobs.append(job)
            self.changed.notify_all()
        while not job.done.wait(POLL_S):
            if is_gone():
                self.abort(lambda other: other is job)
                return False
        return True

    def abort(self, chosen: Callable[[Job], bool]) -> None:
        """End requests with what they have."""
        with self.changed:
            for job in [job for job in self.jobs if chosen(job)]:
                self.jobs.remove(job)
                job.end(type="abort", message="Abort in waiting queue" if not job.drawn else "Aborted")
            self.changed.notify_all()

    def pause(self, mode: str) -> None:
        """New requests wait until `resume`; the running ones end (abort), or stand still."""
        with self.changed:
            self._holds_new = True
            if mode == "abort":
                self.abort(lambda job: True)
                return
            self._frozen = mode
            self.changed.notify_all()
            if mode == "retract":
                for job in self.jobs:
                    job.num_retractions += 1

    def resume(self) -> None:
        """Draw again."""
        with self.changed:
            self._holds_new, self._frozen = False, ""
            self.changed.notify_all()

    def flush(self) -> bool:
        """Forget cached prompts; False, and nothing is forgotten, while requests run. Retracted ones only wait."""
        with self.changed:
            if self.jobs and self._frozen != "retract":
                return False
            if not self.faults.settings.stale_cache:
                self._cache.clear()
            return True

    def update(self, tensors: Mapping[str, RawTensor], label: str | None, *, flush: bool) -> Outcome:
        """Take weights, by any way. `label` None: they have no name until `rename`.

        Unless paused, only after all running requests have ended, new ones waiting meanwhile.
        """
        with self.changed:
            self._is_updating = True
            self.changed.wait_for(lambda: self._holds_new or not self.jobs)
            outcome = self._take(tensors, label, flush)
            self._is_updating = False
            self.changed.notify_all()
            return outcome

    def _take(self, tensors: Mapping[str, RawTensor], label: str | None, flush: bool) -> Outcome:
        if not self.faults.settings.skip_push:
            try:
                self.brain.load(self.weights | dict(tensors))
            except WeightSyncError as error:
                return Outcome(False, f"Failed to update parameter online: {error}")
            self.weights |= tensors
            self.version, self._is_unnamed = None, True
        if label is not None:
            self._name(label)
        if flush and not self.flush():
            return Outcome(False, NOT_FLUSHED)
        self.reported = label or self.reported
        return Outcome(True, "Succeeded to update model weights.")

    def rename(self, label: str) -> None:
        """Call the weights so."""
        with self.changed:
            self._name(label)
            self.reported = label

    def _name(self, label: str) -> None:
        if label != self.label:
            for job in self.jobs:
                job.versions_left.append((self.label, len(job.drawn)))
                job.label = label
        self.label = label
        if self._is_unnamed:
            self.version, self._is_unnamed = number_of(label), False

    def sleep(self, tags: list[str]) -> None:
        """Release memory. What a GPU does: weights are lost, and requests that run are the end of the process."""
        with self.changed:
            if self.jobs and self._frozen != "retract":
                die("memory was released while requests ran")
            self.is_asleep = True
            if "weights" in tags or not tags:
                self.weights.clear()
                self.version, self._is_unnamed = None, False

    def wake(self) -> None:
        """Take memory again; the weights must come again too."""
        with self.changed:
            self.is_asleep = False
            self.changed.notify_all()
