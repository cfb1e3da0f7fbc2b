from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest

from helpers.fleet_fakes import PACE, FakeEngine, FakeLauncher, fleet_of, run, until, wish
from megatron_klear.errors import EngineStale, EngineUnavailable, RequestRefused, RolloutError
from megatron_klear.types import Completion, Piece


async def every(tasks: Sequence[Awaitable[Completion]]) -> list[Completion]:
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 10))


# States


def test_a_server_that_a_dead_run_left_paused_draws_again() -> None:
    async def test() -> None:
        engine = FakeEngine("a", version=3)
        engine.is_paused = True
        async with fleet_of(engine) as bench:
            await bench.push(5)
            assert len(await every(bench.ask(2))) == 2

    run(test())


def test_nobody_serves_before_a_push_and_one_is_asked_for_once() -> None:
    async def test() -> None:
        async with fleet_of(FakeEngine("a"), FakeEngine("b")) as bench:
            tasks = bench.ask(3)
            await until(lambda: bench.num_asked > 0, "weights to be asked for")
            assert {bench.state("a"), bench.state("b")} <= {"starting", "stale"}
            assert not any(task.done() for task in tasks)
            assert sorted(await bench.push(5)) == ["a", "b"]
            done = await every(tasks)
            assert [one.request_id for one in done] == ["r0", "r1", "r2"]
            assert {one.logprobs for one in done} == {(-5.0,) * 4}
            assert bench.num_asked == 1
            assert [one.version for one in bench.fleet.status().engines] == [5, 5]

    run(test())


def test_the_first_push_waits_for_all_that_start() -> None:
    async def test() -> None:
        late = FakeEngine("late")
        late.is_up = False
        async with fleet_of(FakeEngine("a"), late) as bench:
            push = asyncio.create_task(bench.push(1))
            await bench.wait_state("a", "stale")
            await asyncio.sleep(0.03)
            assert not push.done()
            late.is_up = True
            assert sorted(await push) == ["a", "late"]

    run(test())


def test_a_later_push_does_not_wait_for_one_that_starts() -> None:
    async def test() -> None:
        engine = FakeEngine("b")
        launcher = FakeLauncher(engine)
        async with fleet_of(FakeEngine("a"), engine, launchers=[launcher]) as bench:
            await bench.push(1)
            launcher.start_error = EngineUnavailable("no port")
            launcher.die()
            await bench.wait_state("b", "dead")
            assert await bench.push(2) == ["a"]

    run(test())


def test_a_server_that_never_works_is_named_by_the_push() -> None:
    async def test() -> None:
        broken = FakeEngine("broken")
        broken.is_up = False
        async with fleet_of(broken, pace=replace(PACE, start_timeout_s=0.05)) as bench:
            with pytest.raises(RolloutError, match=r"no server is left.*broken \(dead.*within servers.start_timeout_s"):
                await bench.push(1)

    run(test())


def test_a_second_push_cannot_begin_nor_another_one_end() -> None:
    async def test() -> None:
        async with fleet_of(FakeEngine("a")) as bench:
            await bench.fleet.begin_push(1)
            with pytest.raises(RolloutError, match="begun while that of 1 has not ended"):
                await bench.fleet.begin_push(2)
            with pytest.raises(RolloutError, match="push of version 0, but the push that was begun is 1"):
                bench.fleet.end_push(0, {})
            bench.fleet.end_push(1, {})
            with pytest.raises(RolloutError, match="push of version 1, but the push that was begun is None"):
                bench.fleet.end_push(1, {})

    run(test())


# Routing


def test_requests_go_to_the_least_busy_and_no_more_than_it_may_have() -> None:
    async def test() -> None:
        a, b = FakeEngine("a", token_s=0.002), FakeEngine("b", token_s=0.002)
        async with fleet_of(a, b, pace=replace(PACE, max_requests_per_server=3)) as bench:
            await bench.push(1)
            tasks = bench.ask(20)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [one.num_running for one in bench.fleet.status().engines] == [3, 3]
            assert bench.fleet.status().num_waiting == 14
            await every(tasks)
            assert (a.most_running, b.most_running) == (3, 3)
            assert len(a.requests) + len(b.requests) == 20
            assert bench.fleet.status().num_tokens == 80
            assert [one.num_running for one in bench.fleet.status().engines] == [0, 0]

    run(test())


def test_ids_must_be_free() -> None:
    async def test() -> None:
        async with fleet_of(FakeEngine("a")) as bench:
            bench.ask(1)
            with pytest.raises(RolloutError, match="request r0 is already running"):
                bench.ask(1)

    run(test())


def test_a_refused_request_fails_alone() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(1)
            a.errors = [RequestRefused("a: token 99 is too large")]
            refused, fine = bench.ask(2)
            with pytest.raises(RequestRefused, match="token 99"):
                await refused
            assert (await fine).stop_reason == "length"
            assert bench.state("a") == "serving"

    run(test())


# Failures


def test_a_failed_request_goes_elsewhere_after_a_probe() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(1)
            probes = a.num_probes
            a.errors = [EngineUnavailable("a: status 500")]
            (done,) = await every(bench.ask(1))
            assert done.pieces == (Piece(4, 1, "b"),)
            assert a.num_probes == probes + 1 and bench.state("a") == "serving"
            status = bench.fleet.status()
            assert status.num_retried == 1 and status.engines[0].last_failure == "a: status 500"

    run(test())


def test_many_failures_at_once_are_one() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(1)
            a.errors = [EngineUnavailable("a: dropped") for _ in range(5)]
            await every(bench.ask(12))
            assert bench.state("a") == "serving"

    run(test())


def test_three_failures_in_a_row_end_a_member_whatever_its_probes_say() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a, pace=replace(PACE, pause_s=9.0, max_pause_s=9.0)) as bench:
            await bench.push(1)
            a.errors = [EngineUnavailable(f"a: failure {i}") for i in range(3)]
            bench.ask(1)
            await bench.wait_state("a", "dead")
            assert bench.fleet.status().engines[0].last_failure == "a: failure 2"

    run(test())


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(1)
            for i in range(4):
                a.errors = [EngineUnavailable("a: now and then")]
                await every(bench.ask(1, first=i))
            assert bench.state("a") == "serving"

    run(test())


def test_a_dead_foreign_server_that_comes_back_as_it_was_serves_at_once() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(3)
            a.is_up = False
            task = bench.ask(1)
            await bench.wait_state("a", "dead")
            a.is_up = True
            assert (await every(task))[0].pieces == (Piece(4, 3, "a"),)
            assert bench.num_asked == 0

    run(test())


def test_a_dead_foreign_server_that_comes_back_without_its_weights_is_stale_until_pushed() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(3)
            a.is_up = False
            task = bench.ask(1)
            await bench.wait_state("a", "dead")
            a.is_up, a.version = True, None
            await bench.wait_state("a", "stale")
            assert bench.num_asked == 1
            await bench.push(3)
            assert (await every(task))[0].pieces == (Piece(4, 3, "a"),)

    run(test())


def test_a_hanging_server_is_named_and_its_request_goes_elsewhere() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b, pace=replace(PACE, request_timeout_s=0.05, probe_timeout_s=0.05)) as bench:
            await bench.push(1)
            a.hangs = True
            (done,) = await every(bench.ask(1))
            assert done.pieces[0].engine == "b"
            await bench.wait_state("a", "dead")
            assert bench.fleet.status().engines[0].last_failure.startswith("a (http://a): no answer within 0.05 s")

    run(test())


def test_a_server_that_hangs_is_found_long_before_its_requests_time_out() -> None:
    async def test() -> None:
        a, b = FakeEngine("a", token_s=0.001), FakeEngine("b", token_s=0.001)
        async with fleet_of(a, b, pace=replace(PACE, request_timeout_s=99.0, quiet_s=0.02)) as bench:
            await bench.push(1)
            tasks = bench.ask(6, tokens=20)
            await asyncio.sleep(0.005)
            a.hangs = True
            done = await every(tasks)
            assert {piece.engine for one in done for piece in one.pieces} == {"b"}
            assert bench.state("a") == "dead" and bench.fleet.status().num_retried == 3

    run(test())


def test_a_server_without_requests_is_left_alone() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a, pace=replace(PACE, quiet_s=0.005)) as bench:
            await bench.push(1)
            probes = a.num_probes
            a.hangs = True
            await asyncio.sleep(0.05)
            assert a.num_probes == probes and bench.state("a") == "serving"

    run(test())


def test_a_request_that_fails_everywhere_ends_by_its_name() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b, pace=replace(PACE, pause_s=0.001, max_pause_s=0.001)) as bench:
            await bench.push(1)
            a.errors = [EngineUnavailable("a: poisoned") for _ in range(50)]
            b.errors = [EngineUnavailable("b: poisoned") for _ in range(50)]
            with pytest.raises(RolloutError, match=r"request r0 failed 10 times.*poisoned"):
                await every(bench.ask(1))

    run(test())


# Restarts


def test_an_own_server_that_dies_in_a_request_is_restarted_and_stale_until_pushed() -> None:
    async def test() -> None:
        a, b = FakeEngine("a", token_s=0.002), FakeEngine("b", token_s=0.002)
        launcher = FakeLauncher(a)
        async with fleet_of(a, b, launchers=[launcher]) as bench:
            await bench.push(1)
            tasks = bench.ask(4, tokens=10)
            await asyncio.sleep(0.006)
            launcher.die()
            done = await every(tasks)
            assert {piece.engine for one in done for piece in one.pieces} == {"b"}
            await bench.wait_state("a", "stale")
            status = bench.fleet.status().engines[0]
            assert (status.num_restarts, status.version) == (1, None)
            assert "exit code 1" in status.last_failure
            assert sorted(await bench.push(2)) == ["a", "b"]
            assert bench.state("a") == "serving" and launcher.num_starts == 2 and bench.num_asked == 0

    run(test())


def test_restarts_pause_longer_and_longer_and_end() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        launcher = FakeLauncher(a)
        async with fleet_of(a, launchers=[launcher], pace=replace(PACE, max_restarts=3)) as bench:
            await bench.push(1)
            launcher.start_error = EngineUnavailable("a: port 1 is not free")
            task = bench.ask(1)[0]
            clock = asyncio.get_running_loop().time
            begin = clock()
            launcher.die()
            with pytest.raises(RolloutError, match=r"no server is left.*a \(dead, 3 restarts\): a: port 1 is not free"):
                await task
            # 0.01 + 0.02 + 0.04
            assert clock() - begin > 0.07
            with pytest.raises(RolloutError, match="no server is left"):
                await bench.ask(1)[0]
            with pytest.raises(RolloutError, match="no server is left"):
                await bench.push(2)

    run(test())


def test_pauses_are_short_again_once_a_server_has_served() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        launcher = FakeLauncher(a)
        async with fleet_of(a, launchers=[launcher], pace=replace(PACE, max_restarts=9, max_pause_s=9.0)) as bench:
            await bench.push(0)
            for version in range(1, 9):
                launcher.die()
                await bench.wait_state("a", "stale")
                await bench.push(version)
            # Doubled each time, 0.01 s would have become 2.5 s.
            assert bench.fleet.status().engines[0].num_restarts == 8

    run(test(), 2.0)


def test_the_end_of_the_fleet_ends_its_servers_and_connections() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        launcher = FakeLauncher(a)
        async with fleet_of(a, b, launchers=[launcher]) as bench:
            await bench.push(1)
        assert launcher.num_stops == 1 and a.is_closed and b.is_closed and b.is_up

    run(test())


# Versions


def test_answers_of_somebody_elses_weights_are_thrown_away() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(1)
            a.version = None
            done = await every(bench.ask(4))
            assert {piece for one in done for piece in one.pieces} == {Piece(4, 1, "b")}
            assert bench.state("a") == "stale" and bench.fleet.status().num_discarded >= 1
            assert bench.fleet.status().num_retried == 0
            assert a.is_up and sorted(await bench.push(2)) == ["a", "b"]

    run(test())


@pytest.mark.parametrize("drawn", [1, 3])
def test_answers_of_another_version_than_was_pushed_are_thrown_away(drawn: int) -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(2)
            a.version = drawn
            done = await every(bench.ask(2))
            assert {piece.weight_version for one in done for piece in one.pieces} == {2}
            assert bench.state("a") == "stale"
            assert f"drew tokens from version {drawn}; expected 2 to 2" in bench.fleet.status().engines[0].last_failure

    run(test())


def test_a_request_that_a_push_aborts_goes_on_from_its_tokens() -> None:
    async def test() -> None:
        a = FakeEngine("a", token_s=0.002)
        async with fleet_of(a) as bench:
            await bench.push(1)
            tasks = bench.ask(2, tokens=20)
            await asyncio.sleep(0.02)
            await bench.push(2)
            for done in await every(tasks):
                first, second = done.pieces
                assert (first.weight_version, second.weight_version) == (1, 2)
                assert done.token_ids == tuple(range(3, 23)) and done.stop_reason == "length"
                assert done.logprobs == (-1.0,) * first.num_tokens + (-2.0,) * second.num_tokens
            assert bench.fleet.status().num_continued == 2
            begun, rest = (one for one in a.requests if one.request_id.startswith("r0#"))
            assert rest.token_ids == (0, 1, 2, *range(3, 3 + 20 - rest.max_new_tokens))
            assert begun.request_id != rest.request_id and begun.seed == 7 != rest.seed

    run(test())


def test_tokens_drawn_across_a_push_keep_their_versions() -> None:
    async def test() -> None:
        a = FakeEngine("a", token_s=0.002)
        async with fleet_of(a) as bench:
            await bench.push(1)
            (task,) = bench.ask(1, tokens=20)
            await asyncio.sleep(0.02)
            await bench.fleet.begin_push(2)
            a.version = 2
            bench.fleet.end_push(2, {})
            done = (await every([task]))[0]
            assert [piece.weight_version for piece in done.pieces] == [1, 2] and len(a.requests) == 1
            assert bench.fleet.status().num_discarded == 0

    run(test())


def test_nothing_is_given_out_during_a_push() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(1)
            await bench.fleet.begin_push(2)
            tasks = bench.ask(2)
            await asyncio.sleep(0.02)
            assert a.requests == [] and bench.num_asked == 0
            a.version = 2
            bench.fleet.end_push(2, {})
            await every(tasks)

    run(test())


def test_a_member_that_fails_a_push_is_dead_and_not_trusted_by_its_label() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(1)
            await bench.push(2, {"a": "probe: log-probs differ by 3"})
            assert bench.state("a") == "dead" and bench.state("b") == "serving"
            assert bench.fleet.status().engines[0].last_failure == "push of version 2: probe: log-probs differ by 3"
            await bench.wait_state("a", "stale")
            await every(bench.ask(3))
            assert a.requests == [] and bench.num_asked == 0
            await bench.push(3)
            assert bench.state("a") == "serving"

    run(test())


def test_a_member_that_dies_during_a_push_does_not_serve_after_it() -> None:
    async def test() -> None:
        a, b = FakeEngine("a"), FakeEngine("b")
        launcher = FakeLauncher(a)
        async with fleet_of(a, b, launchers=[launcher]) as bench:
            await bench.push(1)
            await bench.fleet.begin_push(2)
            b.version = 2
            launcher.die()
            await bench.wait_state("a", "stale")
            bench.fleet.end_push(2, {})
            assert bench.state("a") == "stale" and bench.state("b") == "serving"

    run(test())


def test_a_push_that_all_fail_asks_for_another_once_one_is_back() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(1)
            await bench.push(2, {"a": "load: disk full"})
            task = bench.ask(1)
            assert bench.num_asked == 0
            await until(lambda: bench.num_asked == 1, "weights to be asked for")
            await bench.push(2)
            assert (await every(task))[0].pieces == (Piece(4, 2, "a"),)

    run(test())


def test_unasked_aborts_without_a_token_are_failures() -> None:
    async def test() -> None:
        a, b = FakeEngine("a", token_s=0.005), FakeEngine("b")
        async with fleet_of(a, b) as bench:
            await bench.push(1)
            (task,) = bench.ask(1)
            await asyncio.sleep(0.002)
            a.num_aborts += 1
            done = (await every([task]))[0]
            assert done.pieces == (Piece(4, 1, "b"),) and bench.fleet.status().num_retried == 1
            assert "a aborted r0 without being asked" in bench.fleet.status().engines[0].last_failure

    run(test())


# Cancelling


def test_cancelled_requests_keep_their_tokens_and_others_go_on() -> None:
    async def test() -> None:
        a = FakeEngine("a", token_s=0.002)
        async with fleet_of(a, pace=replace(PACE, max_requests_per_server=2)) as bench:
            await bench.push(1)
            running, other, waiting = bench.ask(3, tokens=30)
            await asyncio.sleep(0.02)
            await bench.fleet.cancel(["r0", "r2", "unknown"])
            cut, unbegun, whole = await every([running, waiting, other])
            assert cut.stop_reason == "abort" and 0 < len(cut.token_ids) < 30
            assert cut.token_ids == tuple(range(3, 3 + len(cut.token_ids)))
            assert unbegun == Completion("r2", (), (), "abort", ())
            assert whole.token_ids == tuple(range(3, 33)) and whole.stop_reason == "length"
            assert bench.fleet.status().num_retried == 0 and bench.state("a") == "serving"

    run(test())


def test_a_request_goes_on_from_what_it_was_given() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a) as bench:
            await bench.push(4)
            begun = Completion("r", (3, 4), (-2.0, -2.0), "abort", (Piece(2, 2, "old"),))
            whole = Completion("s", (3, 4), (-2.0, -2.0), "stop", (Piece(2, 2, "old"),))
            done, same = await every([bench.fleet.generate(wish("r"), begun), bench.fleet.generate(wish("s"), whole)])
            assert done.token_ids == (3, 4, 5, 6) and done.pieces == (Piece(2, 2, "old"), Piece(2, 4, "a"))
            assert same == whole and len(a.requests) == 1

    run(test())


def test_a_server_that_does_not_abort_cannot_hold_a_cancelled_request() -> None:
    async def test() -> None:
        a = FakeEngine("a")
        async with fleet_of(a, pace=replace(PACE, cancel_timeout_s=0.02)) as bench:
            await bench.push(1)
            a.hangs = True
            (task,) = bench.ask(1)
            await asyncio.sleep(0.01)
            await bench.fleet.cancel(["r0"])
            assert (await every([task]))[0].stop_reason == "abort"

    run(test())


# Behind a router


def test_with_a_router_requests_go_to_it_and_pushes_to_the_members() -> None:
    async def test() -> None:
        a, b, router = FakeEngine("a"), FakeEngine("b"), FakeEngine("router", version=1)
        async with fleet_of(a, b, router=router, pace=replace(PACE, max_requests_per_server=2)) as bench:
            assert await bench.push(1) == ["a", "b"]
            done = await every(bench.ask(9))
            assert {piece.engine for one in done for piece in one.pieces} == {"router"}
            assert a.requests == b.requests == [] and router.most_running == 4

    run(test())


def test_a_stale_member_closes_the_router_until_a_push() -> None:
    async def test() -> None:
        a, b, router = FakeEngine("a"), FakeEngine("b"), FakeEngine("router", version=1)
        async with fleet_of(a, b, router=router) as bench:
            await bench.push(1)
            router.errors = [EngineStale("router: weights of somebody else")]
            b.version = None
            task = bench.ask(1)
            await until(lambda: bench.num_asked == 1, "weights to be asked for")
            assert (bench.state("a"), bench.state("b")) == ("serving", "stale")
            assert "reports weights None, expected 1" in bench.fleet.status().engines[1].last_failure
            router.version = 2
            await bench.push(2)
            assert (await every(task))[0].pieces == (Piece(4, 2, "router"),)

    run(test())


def test_a_dead_router_is_asked_again() -> None:
    async def test() -> None:
        a, router = FakeEngine("a"), FakeEngine("router", version=1)
        async with fleet_of(a, router=router) as bench:
            await bench.push(1)
            router.is_up = False
            task = bench.ask(1)
            await asyncio.sleep(0.05)
            router.is_up = True
            assert (await every(task))[0].stop_reason == "length"

    run(test())
