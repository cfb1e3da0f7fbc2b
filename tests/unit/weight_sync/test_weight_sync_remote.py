"""A push to several servers: its order, its verdicts, and what is left after every kind of failure."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor

from helpers.shelf_servers import FACTS, Exported, ShelfControl, ShelfServer, mean
from megatron_klear.errors import WeightSyncError
from megatron_klear.types import PauseMode
from megatron_klear.weight_sync.crew import Crew
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync
from megatron_klear.weight_sync.tensor import TensorTransport
from megatron_klear.weight_sync.verify import Probe

TIMEOUT_S = 30.0


def remote(
    servers: list[ShelfServer],
    *,
    timeout_s: float = TIMEOUT_S,
    pause_mode: PauseMode = "abort",
    transport: Any = None,
) -> tuple[RemoteSync, ShelfControl]:
    control = ShelfControl(servers)
    by_name = {server.name: server for server in servers}
    setup = PushSetup(
        control=control,
        connect=lambda address: by_name[address.name],
        transport=transport or TensorTransport(bucket_bytes=32),
        pause_mode=pause_mode,
        timeout_s=timeout_s,
        max_probe_diff=1e-3,
    )
    return RemoteSync(setup), control


def probe_of(exported: Exported) -> Probe:
    return Probe((1, 2, 3), (mean(exported.tensors),) * 2)


def is_whole(server: ShelfServer, exported: Exported) -> bool:
    same = server.tensors.keys() == exported.tensors.keys()
    return same and all(server.tensors[name].equal(tensor) for name, tensor in exported.tensors.items())


def test_a_push_goes_its_way_in_order() -> None:
    servers = [ShelfServer("a"), ShelfServer("b")]
    exported = Exported(1.0)
    sync, control = remote(servers)
    with sync:
        report = sync.push(exported, 4, probe_of(exported))
    for server in servers:
        assert is_whole(server, exported) and server.version == 4 and not server.is_paused and server.is_closed
        # 3 tensors of 16 bytes in buckets of 32.
        assert server.calls == [
            *("facts", "pause", "begin_update", "update_from_tensors", "update_from_tensors", "end_update"),
            *("set_version", "flush_cache", "weight_version", "checksum", "resume", "score"),
        ]
    assert control.begun == [4] and control.ended == [(4, {})]
    assert (report.version, report.num_tensors, report.num_bytes, report.failed) == (4, 3, 48, {})
    assert report.seconds > 0 and exported.is_exhausted


def test_other_ranks_only_take_part_in_the_collective() -> None:
    exported = Exported()
    with RemoteSync(None) as sync:
        sync.release(3)
        report = sync.push(exported, 3)
    assert exported.is_exhausted and report.num_bytes == 48


@pytest.mark.parametrize(
    "call",
    [
        "facts",
        "pause",
        "begin_update",
        "update_from_tensors",
        "end_update",
        "set_version",
        "flush_cache",
        "weight_version",
        "checksum",
        "resume",
        "score",
    ],
)
def test_a_server_that_fails_is_named_with_its_phase_and_the_others_go_on(call: str) -> None:
    good, bad = ShelfServer("good"), ShelfServer("bad", breaks=[call])
    exported = Exported(1.0)
    sync, control = remote([bad, good])
    with sync:
        report = sync.push(exported, 4, probe_of(exported))
    phase = {"facts": "connect", "score": "probe"}.get(call, call)
    assert list(report.failed) == ["bad"]
    assert report.failed["bad"].startswith(f"{phase}: bad: {call} does not work")
    assert control.ended == [(4, dict(report.failed))]
    assert is_whole(good, exported) and good.version == 4 and not good.is_paused
    # It draws again only under a label that is not of these weights; otherwise it is reported as maybe paused.
    assert not bad.is_paused or "setting it aside" in report.failed["bad"]
    assert bad.version != 4 or bad.is_paused
    assert bad.is_closed


@pytest.mark.parametrize("call", ["pause", "update_from_tensors", "flush_cache", "score"])
def test_a_server_that_hangs_holds_the_others_up_for_half_of_the_time_at_most(call: str) -> None:
    good, bad = ShelfServer("good"), ShelfServer("bad", hangs=[call])
    exported = Exported(1.0)
    sync, _ = remote([bad, good], timeout_s=1.0)
    started = time.monotonic()
    with sync:
        report = sync.push(exported, 4, probe_of(exported))
    assert time.monotonic() - started < 0.9
    assert is_whole(good, exported) and not good.is_paused and good.version == 4
    assert "no answer within 0.5 s (push_timeout_s is 1 in all)" in report.failed["bad"]
    assert bad.version != 4 and not bad.is_paused


def test_a_single_slow_server_has_all_the_time() -> None:
    class Slow(ShelfServer):
        async def flush_cache(self) -> None:
            await asyncio.sleep(0.7)

    sync, _ = remote([Slow("slow")], timeout_s=1.0)
    with sync:
        assert sync.push(Exported(), 1).failed == {}


def test_no_server_left_is_an_error_that_names_each() -> None:
    servers = [ShelfServer("a", breaks=["pause"]), ShelfServer("b", breaks=["flush_cache"])]
    exported = Exported()
    sync, control = remote(servers)
    with sync, pytest.raises(WeightSyncError) as error:
        sync.push(exported, 4)
    text = str(error.value)
    assert "no server took the weights of version 4" in text
    assert "a: pause: a: pause does not work" in text and "b: flush_cache: b: flush_cache does not work" in text
    assert exported.is_exhausted and control.ended[0][1].keys() == {"a", "b"}
    assert not any(server.is_paused for server in servers)


def test_an_engine_that_does_not_confirm_is_named() -> None:
    class Deaf(ShelfServer):
        async def set_version(self, version: int) -> None:
            self.version = version if version < 0 else 3

    sync, _ = remote([Deaf("deaf"), ShelfServer("good")])
    with sync:
        report = sync.push(Exported(), 4)
    assert report.failed == {"deaf": "weight_version: deaf reports weight version 3 after a push of 4"}


def test_a_skipped_push_fails_the_probe() -> None:
    skipping = ShelfServer("skipping")
    # Without checksums, so that the probe alone must tell.
    skipping.known_facts = dataclasses.replace(FACTS, has_checksum=False)
    good = ShelfServer("good")
    first, second = Exported(1.0), Exported(2.0)
    sync, _ = remote([skipping, good])
    with sync:
        assert sync.push(first, 1, probe_of(first)).failed == {}
        skipping.skips_push = True
        report = sync.push(second, 2, probe_of(second))
    assert report.failed["skipping"].startswith("probe: skipping disagrees with the trainer on the probe")
    assert "expected 3.0000, found 2.0000" in report.failed["skipping"]
    assert list(report.failed) == ["skipping"] and skipping.version == -1


def test_a_skipped_push_fails_the_checksum_before_the_server_draws() -> None:
    skipping, good = ShelfServer("skipping"), ShelfServer("good")
    sync, _ = remote([skipping, good])
    with sync:
        assert sync.push(Exported(1.0), 1).failed == {}
        assert sync.push(Exported(1.0), 2).failed == {}
        skipping.skips_push = True
        skipping.calls.clear()
        report = sync.push(Exported(2.0), 3)
    assert "its checksum did not change" in report.failed["skipping"] and list(report.failed) == ["skipping"]
    assert skipping.calls.index("set_version", skipping.calls.index("checksum")) < skipping.calls.index("resume")


def test_a_transport_or_pause_mode_that_a_server_lacks_is_said_before_it_is_paused() -> None:
    old = ShelfServer("old", facts=dataclasses.replace(FACTS, transports=frozenset({"disk"})))
    rough = ShelfServer("rough", facts=dataclasses.replace(FACTS, pause_modes=frozenset({"abort"})))
    sync, _ = remote([old, rough, ShelfServer("good")], pause_mode="retract")
    with sync:
        report = sync.push(Exported(), 1)
    assert report.failed == {
        "old": "connect: it takes no weights by transport=tensor, only: disk",
        "rough": "connect: it knows no pause_mode=retract, only: abort",
    }
    assert old.calls == rough.calls == ["facts"]


def test_in_place_a_refused_flush_is_no_failure() -> None:
    sync, _ = remote([ShelfServer("a", breaks=["flush_cache"])], pause_mode="in_place")
    with sync:
        assert sync.push(Exported(), 1).failed == {}


def test_a_trainer_that_fails_leaves_no_server_paused_or_current() -> None:
    servers = [ShelfServer("a"), ShelfServer("b")]
    sync, control = remote(servers)
    with sync, pytest.raises(RuntimeError, match="a rank of the trainer is gone"):
        sync.push(Exported(fails_after=2), 4)
    assert all("the push broke off, not by this server's fault" in why for why in control.ended[0][1].values())
    assert control.ended[0][1].keys() == {"a", "b"}
    assert all(not server.is_paused and not server.is_updating and server.version == -1 for server in servers)


def test_the_collective_comes_to_its_end_when_rank_0_fails() -> None:
    class Broken(TensorTransport):
        async def send(self, crew: Crew, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
            next(iter(named_tensors))
            raise WeightSyncError("no way to send")

    exported = Exported()
    server = ShelfServer("a")
    sync, _ = remote([server], transport=Broken(bucket_bytes=1))
    with sync, pytest.raises(WeightSyncError, match="no way to send"):
        sync.push(exported, 1)
    assert exported.is_exhausted and not server.is_paused


def test_a_failed_server_is_connected_anew_and_may_come_back() -> None:
    server = ShelfServer("a", breaks=["flush_cache"])
    sync, _ = remote([server, ShelfServer("b")])
    with sync:
        assert list(sync.push(Exported(), 1).failed) == ["a"]
        server.breaks.clear()
        server.calls.clear()
        assert sync.push(Exported(), 2).failed == {}
    assert server.calls[0] == "facts" and server.version == 2


def test_a_server_that_cannot_be_marked_stays_paused_and_this_is_said() -> None:
    server = ShelfServer("a", breaks=["set_version"])
    sync, _ = remote([server, ShelfServer("b")])
    with sync:
        report = sync.push(Exported(), 1)
    assert server.is_paused and "paused or asleep as it may be, failed too: a: set_version" in report.failed["a"]


def test_servers_sleep_between_release_and_push() -> None:
    servers = [ShelfServer("a"), ShelfServer("wakeful", facts=dataclasses.replace(FACTS, sleeps=False))]
    exported = Exported(1.0)
    sync, control = remote(servers)
    with sync:
        sync.release(5)
        assert [server.is_asleep for server in servers] == [True, False]
        sync.release(5)
        assert servers[0].calls == ["facts", "pause", "flush_cache", "sleep"]
        assert control.begun == [5] and control.ended == []
        report = sync.push(exported, 5, probe_of(exported))
    assert servers[0].calls[3:7] == ["sleep", "wake", "begin_update", "update_from_tensors"]
    assert control.begun == [5] and control.ended == [(5, {})] and report.failed == {}
    assert all(is_whole(server, exported) and not server.is_paused and not server.is_asleep for server in servers)


@pytest.mark.parametrize("fault", ["breaks", "hangs"])
def test_a_server_that_does_not_wake_is_named_and_taken_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_klear.weight_sync.crew.CLEANUP_TIMEOUT_S", 0.2)
    sleeper, good = ShelfServer("sleeper"), ShelfServer("good")
    exported = Exported(1.0)
    sync, control = remote([sleeper, good], timeout_s=1.0)
    with sync:
        sync.release(5)
        vars(sleeper)[fault].add("wake")
        report = sync.push(exported, 5)
    assert report.failed["sleeper"].startswith("wake: ") and "setting it aside" in report.failed["sleeper"]
    assert list(report.failed) == ["sleeper"] and control.ended == [(5, dict(report.failed))]
    assert is_whole(good, exported) and not good.is_paused


def test_a_failure_between_release_and_push_leaves_no_server_asleep() -> None:
    server = ShelfServer("a")
    sync, _ = remote([server])
    with pytest.raises(RuntimeError, match="training failed"), sync:
        sync.release(5)
        raise RuntimeError("training failed")
    assert not server.is_asleep and not server.is_paused and server.version == -1 and server.is_closed


def test_a_server_that_does_not_sleep_is_named_by_the_push() -> None:
    sync, _ = remote([ShelfServer("a", breaks=["sleep"]), ShelfServer("b")])
    with sync:
        sync.release(5)
        report = sync.push(Exported(), 5)
    assert report.failed == {"a": "sleep: a: sleep does not work"}


def test_a_bug_in_a_server_class_is_raised_not_blamed_on_the_server() -> None:
    class Buggy(ShelfServer):
        async def flush_cache(self) -> None:
            raise TypeError("a bug")

    server, other = Buggy("a"), ShelfServer("b")
    sync, control = remote([server, other])
    with sync, pytest.raises(TypeError, match="a bug"):
        sync.push(Exported(), 1)
    assert not server.is_paused and not other.is_paused and control.ended[0][1].keys() == {"a", "b"}
