"""Groups from servers: how far ahead prompts go out, what is left out, what goes on, what a restart remembers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megatron_klear.data.prompts import ItemStream
from megatron_klear.errors import CheckpointError, RolloutError, WeightsWanted
from megatron_klear.metrics import results
from megatron_klear.rollout.jobs import Job, JobDone
from megatron_klear.rollout.sampler import SamplingPlan, to_sample
from megatron_klear.rollout.stream import GroupStream, Mailbox, ServerEngine, StreamSettings
from megatron_klear.types import Completion, GenerationRequest, Piece, Prompt, SampleGroup

PROMPTS = [Prompt(f"p{i}", (1, i)) for i in range(40)]
PLAN = SamplingPlan(2, 4, 1.0, (0,), seed=3, step=0)


def completion(request: GenerationRequest, version: int, length: int, reason: str = "stop") -> Completion:
    return Completion(request.request_id, (7,) * length, (-1.0,) * length, reason, (Piece(length, version),))  # type: ignore[arg-type]


class Servers:
    """Ends jobs in the order they came; those in `slow` only when cancelled. `judge` leaves groups out."""

    def __init__(self, judge: Callable[[Job], bool] = lambda job: True, slow: Sequence[str] = ()) -> None:
        self.judge, self.slow = judge, slow
        self.version = 0
        self.jobs: list[Job] = []
        self.results: deque[JobDone] = deque()
        self.running: dict[str, Job] = {}
        self.want_weights_after: int | None = None
        # Jobs that end once everything else has been taken.
        self.late: list[str] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs += jobs
        for job in jobs:
            if job.prompt is not None and job.prompt.prompt_id in self.slow:
                self.running[job.job_id] = job
            else:
                self.results.append(self.finish(job))

    def finish(self, job: Job) -> JobDone:
        completions = tuple(completion(request, self.version, 2) for request in job.requests)
        if job.prompt is None:
            return JobDone(job.job_id, completions)
        samples = tuple(to_sample(job.prompt, one) for one in completions)
        if self.judge(job):
            return JobDone(job.job_id, completions, SampleGroup(job.prompt, samples))
        return JobDone(job.job_id, completions, dropped=Counter(zero_std=2))

    def receive(self, timeout_s: float) -> JobDone | None:
        if self.want_weights_after == 0:
            raise WeightsWanted("nobody serves")
        if not self.results and self.late:
            self.results.append(self.finish(self.running.pop(self.late.pop())))
        if not self.results:
            return None
        if self.want_weights_after is not None:
            self.want_weights_after -= 1
        return self.results.popleft()

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            if job_id in self.running:
                job = self.running.pop(job_id)
                partial = tuple(completion(request, self.version, 1, "abort") for request in job.requests)
                self.results.append(JobDone(job_id, partial, cancelled=True))


def stream(servers: Servers, **settings: int | bool | None) -> GroupStream:
    whole = {"batch_size": 4, "over_sampling": 4, **settings}
    order = ItemStream(len(PROMPTS), seed=5)
    return GroupStream(
        Mailbox(servers, stall_timeout_s=2.0),
        PROMPTS,
        order,
        StreamSettings(**whole),
        PLAN,  # type: ignore[arg-type]
    )


def ids(groups: Sequence[SampleGroup]) -> list[str]:
    return [group.prompt.prompt_id for group in groups]


def order(count: int) -> list[str]:
    return [PROMPTS[i].prompt_id for i in ItemStream(len(PROMPTS), seed=5).next(count)]


def test_without_steps_ahead_a_steps_prompts_go_out_when_it_asks() -> None:
    servers = Servers()
    source = stream(servers)
    assert servers.jobs == []
    taken = source.take(0)
    assert ids(taken.groups) == order(4) and len(servers.jobs) == 4 and source.num_ahead == 0
    servers.version = 1
    assert ids(source.take(1).groups) == order(8)[4:]
    names = [request.request_id for job in servers.jobs for request in job.requests]
    assert len(set(names)) == 16 and len({request.seed for job in servers.jobs for request in job.requests}) == 16


@pytest.mark.parametrize("ahead", [1, 3])
def test_with_steps_ahead_so_many_groups_are_under_way_and_none_is_older(ahead: int) -> None:
    servers = Servers()
    source = stream(servers, steps_ahead=ahead)
    for step in range(6):
        # Two updates a step: ages are counted in updates, the bound in steps.
        servers.version = 2 * step
        taken = source.take(2 * step)
        assert source.num_ahead == 4 * ahead and len(taken.groups) == 4 and not taken.dropped
        oldest = min(sample.weight_version_min or 0 for sample in taken.samples)
        assert oldest == max(0, 2 * (step - ahead))
        assert results(taken.metrics)["rollout/staleness_max"] == 2 * step - oldest
    assert len(servers.jobs) == 4 * (6 + ahead)


def test_a_step_ahead_waits_for_the_oldest_instead_of_taking_what_ended_first() -> None:
    servers = Servers()
    source = stream(servers, steps_ahead=1)
    servers.slow = order(6)[4:]
    source.take(0)
    servers.version, servers.late = 1, list(servers.running)
    assert len(servers.late) == 2
    assert ids(source.take(1).groups) == order(8)[4:] and not servers.late


def test_max_staleness_is_in_updates_and_narrower_than_the_steps() -> None:
    servers = Servers()
    source = stream(servers, steps_ahead=2, max_staleness=1)
    source.take(0)
    servers.version = 3
    taken = source.take(3)
    assert taken.groups == () and taken.dropped == {"stale": 8}


def test_without_replacements_a_step_trains_on_what_is_left() -> None:
    bad = order(2)
    servers = Servers(judge=lambda job: job.prompt is not None and job.prompt.prompt_id not in bad)
    taken = stream(servers).take(0)
    assert ids(taken.groups) == order(4)[2:] and taken.dropped == {"zero_std": 4} and len(servers.jobs) == 4


def test_groups_left_out_are_replaced_so_often_and_no_more() -> None:
    bad = order(40)[:3]
    servers = Servers(judge=lambda job: job.prompt is not None and job.prompt.prompt_id not in bad)
    taken = stream(servers, max_replacements=2).take(0)
    assert ids(taken.groups) == order(6)[3:] and len(servers.jobs) == 6 and taken.dropped == {"zero_std": 6}


def test_over_sampling_ends_at_the_batch_and_cuts_the_rest_short() -> None:
    servers = Servers(slow=order(2))
    taken = stream(servers, over_sampling=6).take(0)
    assert ids(taken.groups) == order(6)[2:] and taken.dropped == {"cut_short": 4} and not servers.running


def test_with_partial_rollout_what_was_cut_short_goes_on_from_its_tokens() -> None:
    servers = Servers(slow=order(2))
    source = stream(servers, over_sampling=7, partial=True)
    first = source.take(0)
    assert ids(first.groups) == order(6)[2:] and not first.dropped
    servers.slow, servers.version = (), 1
    second = source.take(1)
    # The one that ended beyond the batch is used first, as it is; the two unfinished ones go on.
    assert ids(second.groups)[0] == order(7)[6] and set(order(2)) <= set(ids(second.groups))
    going_on = [job for job in servers.jobs if job.started]
    assert [[one.token_ids for one in job.started if one] for job in going_on] == [[(7,), (7,)]] * 2
    assert len({job.job_id for job in servers.jobs}) == len(servers.jobs) - 2


def test_when_weights_are_wanted_the_step_goes_on_after_the_push() -> None:
    servers = Servers()
    source = stream(servers)
    servers.want_weights_after = 2
    with pytest.raises(WeightsWanted):
        source.take(0)
    servers.want_weights_after = None
    assert ids(source.take(0).groups) == order(4) and len(servers.jobs) == 4


def test_prompts_that_no_step_used_go_out_again_after_a_restart() -> None:
    source = stream(Servers(), steps_ahead=1)
    used = ids(source.take(0).groups)
    saved, position = source.state(), source.order
    servers = Servers()
    again = stream(servers, steps_ahead=1)
    again.order = position
    again.restore(saved)
    servers.version = 1
    taken = ids(again.take(1).groups)
    assert used + taken == order(8) and len({job.job_id for job in servers.jobs}) == 8
    assert not {job.job_id for job in servers.jobs} & {f"{i}/{name}" for i, name in enumerate(order(8), start=1)}


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(CheckpointError, match="prompt 40 on its way, of 40; resume with the same data"):
        stream(Servers()).restore({"serial": 3, "again": [1, 40]})


def test_evaluation_and_training_do_not_take_each_others_results() -> None:
    servers = Servers()
    source = stream(servers, steps_ahead=1)
    source.take(0)
    engine = ServerEngine(source.mailbox, lambda: 5)
    requests = [GenerationRequest(f"e{i}", (1,), 2) for i in range(3)]
    assert [one.request_id for one in engine.generate(requests)] == ["e0", "e1", "e2"]
    assert engine.weight_version == 5
    assert ids(source.take(1).groups) == order(8)[4:]


def test_silence_ends_with_the_name_of_what_was_waited_for() -> None:
    servers = Servers(slow=order(4))
    with pytest.raises(RolloutError, match=r"waited 2 s for a group of samples and no request ended: .*request_timeou"):
        stream(servers).take(0)


def test_the_stop_reason_of_pieces_is_that_of_the_whole() -> None:
    request = GenerationRequest("r", (1, 2), 4)
    whole = replace(completion(request, 3, 3), pieces=(Piece(1, 3, "a"), Piece(2, 4, "b")))
    sample = to_sample(PROMPTS[0], whole)
    assert (sample.weight_version_min, sample.weight_version_max, sample.stop_reason) == (3, 4, "stop")
    assert [piece.engine for piece in sample.pieces] == ["a", "b"] and len(sample.response_ids) == 3
