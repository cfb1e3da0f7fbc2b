"""Rollouts from servers: prompts go out ahead of training as far as the recipe allows, groups come back as they end.

One buffer serves all ways to train. With `steps_ahead` 0 a step's prompts go out when the step asks for its rollout,
and nothing is on its way while the trainer trains. With k, so many groups are on their way or done that each is used at
most k steps after its prompt went out: a step waits for the oldest instead of taking those that happened to end first,
which would be the short ones. Only a step that over-samples takes what ends first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_klear.errors import CheckpointError, RolloutError
from megatron_klear.metrics import Metric, merge
from megatron_klear.rollout.jobs import Job, JobDone
from megatron_klear.rollout.sampler import SamplingPlan, group_requests
from megatron_klear.types import Completion, GenerationRequest, Prompt, RolloutBatch, SampleGroup

POLL_S = 1.0


class Worker(Protocol):
    """What the stream needs of the rollout process."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start jobs."""
        ...

    def receive(self, timeout_s: float) -> JobDone | None:
        """The next that ended; None after so many seconds. Raises `WeightsWanted` if only a push can help."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cut jobs short: they come back with what they have."""
        ...


class Mailbox:
    """Results of the rollout process, kept apart by who waits for them. One patience for both."""

    def __init__(self, worker: Worker, *, stall_timeout_s: float) -> None:
        self.worker = worker
        self.stall_timeout_s = stall_timeout_s
        self._groups: deque[JobDone] = deque()
        self._awaited: dict[str, JobDone | None] = {}

    def next_group(self) -> JobDone:
        """The next group that ended. Raises `WeightsWanted`; ask again after a push."""
        while not self._groups:
            self._wait("a group of samples")
        return self._groups.popleft()

    def put_back(self, done: Sequence[JobDone]) -> None:
        """Groups for the next who asks, in their order."""
        self._groups.extendleft(reversed(done))

    def complete(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Results of jobs, in their order. After an error, `WeightsWanted` among them, what still comes is nobody's."""
        self._awaited |= dict.fromkeys(job.job_id for job in jobs)
        self.worker.submit(jobs)
        try:
            for job in jobs:
                while self._awaited[job.job_id] is None:
                    self._wait("completions for an evaluation")
        except RolloutError:
            self.worker.cancel([job.job_id for job in jobs])
            raise
        found = [self._awaited.pop(job.job_id) for job in jobs]
        return [done for done in found if done is not None]

    def _wait(self, name: str) -> None:
        waited = 0.0
        while (done := self.worker.receive(POLL_S)) is None:
            waited += POLL_S
            if waited >= self.stall_timeout_s:
                raise RolloutError(
                    f"waited {waited:.0f} s for {name} and no request ended: expected one within"
                    " servers.request_timeout_s and a server's start; see the logs of rollout process and servers"
                )
        if done.job_id in self._awaited:
            self._awaited[done.job_id] = done
        else:
            self._groups.append(done)


class ServerEngine:
    """The servers as a `RolloutEngine` that waits for everything it is asked. For evaluations."""

    def __init__(self, mailbox: Mailbox, version: Callable[[], int]) -> None:
        self.mailbox = mailbox
        self._version = version
        self._count = 0

    @property
    def weight_version(self) -> int:
        """Version that was pushed last; -1 before."""
        return self._version()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in order. After `WeightsWanted` nothing of the call is left behind."""
        jobs = []
        for request in requests:
            self._count += 1
            jobs.append(Job(f"completion/{self._count}", (request,)))
        return [done.completions[0] for done in self.mailbox.complete(jobs)]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How many groups a step uses, and how far ahead they are made."""

    batch_size: int
    """Groups that a step trains on."""
    over_sampling: int
    """Prompts that go out for a step."""
    steps_ahead: int = 0
    max_replacements: int = 0
    """Prompts that may go out for groups that were left out, a step."""
    partial: bool = False
    """Groups that were not needed go on in the next step instead of being dropped."""
    max_staleness: int | None = None
    """Oldest weights of a sample, in updates; None for no limit beside `steps_ahead`."""

    def __post_init__(self) -> None:
        assert self.over_sampling >= self.batch_size


@dataclass(slots=True)
class _Pending:
    """A group on its way: the index of its prompt, to ask again after a restart, and the job."""

    index: int
    job: Job


@dataclass(slots=True)
class _Step:
    """What a step has got so far. Lives on when the step must stop to push weights."""

    oldest_version: int
    kept: list[SampleGroup] = field(default_factory=list)
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0
    num_replaced: int = 0


class PromptOrder(Protocol):
    """Indices of prompts in a resumable order."""

    def next(self, n: int) -> list[int]:
        """The next n."""
        ...


class GroupStream:
    """Groups of samples for one step after the other. Rank 0 only; its state belongs into checkpoints."""

    def __init__(
        self,
        mailbox: Mailbox,
        prompts: Sequence[Prompt],
        order: PromptOrder,
        settings: StreamSettings,
        plan: SamplingPlan,
    ) -> None:
        """`plan` without its step."""
        self.mailbox = mailbox
        self.prompts = prompts
        self.order = order
        self.settings = settings
        self.plan = plan
        self._pending: dict[str, _Pending] = {}
        # Done before older ones.
        self._early: dict[str, JobDone] = {}
        self._again: deque[int] = deque()
        self._unfinished: list[_Pending] = []
        self._serial = 0
        # Versions that the last steps began with: steps_ahead of them may be used.
        self._begun: deque[int] = deque(maxlen=settings.steps_ahead + 1)
        self._step: _Step | None = None

    @property
    def num_ahead(self) -> int:
        """Groups on their way or done, that no step has used yet."""
        return len(self._pending) + len(self._unfinished)

    def take(self, version: int) -> RolloutBatch:
        """The rollout of the next step, which begins with the weights `version`.

        Fewer groups than `batch_size` where too many were left out. After `WeightsWanted`, push and call again: what
        the step has so far is kept.
        """
        step = self._step
        if step is None:
            self._begun.append(version)
            step = self._step = _Step(self._oldest(version))
            self._submit(self._capacity())
        settings = self.settings
        while len(step.kept) < settings.batch_size and step.num_seen < settings.over_sampling + step.num_replaced:
            self._accept(self._next_done(), step, version)
            if step.num_replaced < settings.max_replacements and self._capacity() > len(step.kept):
                step.num_replaced += 1
                self._submit(1)
        if settings.steps_ahead == 0:
            self._cut_short(step)
        self._step = None
        step.metrics.append({"rollout/num_groups_ahead": Metric(float(self.num_ahead), "sum")})
        return RolloutBatch(tuple(step.kept), merge(step.metrics), step.dropped)

    def state(self) -> dict[str, Any]:
        """Prompts that no step has used: they go out again after a restart."""
        waiting = [*self._pending.values(), *self._unfinished]
        return {"serial": self._serial, "again": [*(one.index for one in waiting), *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        outside = [index for index in state["again"] if not 0 <= index < len(self.prompts)]
        if outside:
            raise CheckpointError(
                f"the checkpoint has prompt {outside[0]} on its way, of {len(self.prompts)}; resume with the same data"
            )
        self._serial, self._again = state["serial"], deque(state["again"])

    def _oldest(self, version: int) -> int:
        """Oldest weights that this step may use."""
        limits = [] if self.settings.partial else [self._begun[0]]
        if self.settings.max_staleness is not None:
            limits.append(version - self.settings.max_staleness)
        return max(limits, default=0)

    def _capacity(self) -> int:
        """Groups that may still go out before the step has ended."""
        return self.settings.steps_ahead * self.settings.batch_size + self.settings.over_sampling - self.num_ahead

    def _submit(self, count: int) -> None:
        """Send groups out: first those that were cut short, then those of before a restart, then new ones."""
        going = list(self._unfinished)
        self._unfinished.clear()
        for index in self._next_prompts(max(0, count)):
            self._serial += 1
            name = f"{self._serial}/{self.prompts[index].prompt_id}"
            requests = group_requests(self.prompts[index], name, self.plan)
            going.append(_Pending(index, Job(name, requests, self.prompts[index])))
        self._pending |= {one.job.job_id: one for one in going}
        if going:
            self.mailbox.worker.submit([one.job for one in going])

    def _next_prompts(self, count: int) -> list[int]:
        again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        return again + self.order.next(count - len(again))

    def _next_done(self) -> JobDone:
        if self.settings.steps_ahead == 0:
            return self.mailbox.next_group()
        oldest = next(iter(self._pending))
        while oldest not in self._early:
            done = self.mailbox.next_group()
            self._early[done.job_id] = done
        return self._early.pop(oldest)

    def _accept(self, done: JobDone, step: _Step, version: int) -> None:
        """Count a group, and keep it if it teaches something and is not too old."""
        del self._pending[done.job_id]
        step.num_seen += 1
        step.dropped += done.dropped
        step.metrics.append(done.metrics)
        if done.group is None:
            return
        versions = [sample.weight_version_min for sample in done.group.samples]
        ages = [version - oldest for oldest in versions if oldest is not None]
        if ages and version - max(ages) < step.oldest_version:
            step.dropped["stale"] += len(done.group.samples)
            return
        step.metrics.append(
            {
                "rollout/staleness_mean": Metric(float(sum(ages)), "sample_mean", float(len(ages))),
                "rollout/staleness_max": Metric(float(max(ages, default=0)), "max"),
            }
        )
        step.kept.append(done.group)

    def _cut_short(self, step: _Step) -> None:
        """End what is still on its way. With `partial` it goes on in the next step, finished groups are used there."""
        self.mailbox.worker.cancel(list(self._pending))
        finished = []
        while len(finished) < len(self._pending):
            done = self.mailbox.next_group()
            if self.settings.partial and not done.cancelled:
                finished.append(done)
                continue
            pending = self._pending.pop(done.job_id)
            if self.settings.partial:
                self._unfinished.append(_Pending(pending.index, replace(pending.job, started=done.completions)))
            else:
                step.dropped["cut_short"] += len(pending.job.requests)
        self.mailbox.put_back(finished)
