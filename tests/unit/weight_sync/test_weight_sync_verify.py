"""The verdicts: version, probe, checksums, and the fingerprint of what was pushed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_klear.errors import WeightSyncError
from megatron_klear.weight_sync.verify import (
    Checksums,
    Held,
    Probe,
    PushedTensors,
    check_probe,
    check_version,
    content_sum,
)

PROBE = Probe((5, 6, 7), (-1.0, -2.0))


def print_of(tensors: dict[str, Tensor]) -> str:
    pushed = PushedTensors(tensors.items())
    assert [name for name, _ in pushed] == list(tensors)
    return pushed.fingerprint()


def held(server: str, value: str, layout: str = "one") -> Held:
    return Held(server, layout, {"a": "same", "b": value})


@pytest.mark.parametrize(("found", "said"), [(3, "3"), (None, "none of this run")])
def test_another_version_is_named(found: int | None, said: str) -> None:
    check_version("s", 4, 4)
    with pytest.raises(WeightSyncError, match=f"s reports weight version {said} after a push of 4"):
        check_version("s", 4, found)


def test_the_probe_allows_the_limit_and_no_more() -> None:
    check_probe("s", PROBE, [-1.25, -2.0], 0.25)
    with pytest.raises(WeightSyncError, match=r"token 2 expected -2.0000, found -2.5000 \(1 of 2 tokens differ"):
        check_probe("s", PROBE, [-1.0, -2.5], 0.25)


def test_a_probe_that_is_not_finite_or_of_another_length_fails() -> None:
    with pytest.raises(WeightSyncError, match="found nan"):
        check_probe("s", PROBE, [-1.0, float("nan")], 0.25)
    with pytest.raises(WeightSyncError, match="s scored 1 tokens of the probe; expected 2"):
        check_probe("s", PROBE, [-1.0], 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_change_of_one_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.arange(100).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8)[37] ^= 1
    assert print_of({"a": tensor}) == print_of({"a": tensor.clone()}) != print_of({"a": changed})


def test_the_fingerprint_sees_places_names_shapes_and_later_chunks() -> None:
    tensor = torch.zeros((1 << 20) + 8)
    first, last = tensor.clone(), tensor.clone()
    first[3], last[-1] = 1, 1
    prints = {print_of({"a": one}) for one in (tensor, first, last, first.flip(0), first.view(2, -1), first[:-8])}
    assert len(prints) == 6
    assert print_of({"a": first}) != print_of({"b": first})
    assert int(content_sum(torch.empty(0))) == 0


def test_a_view_is_fingerprinted_as_its_copy() -> None:
    whole = torch.arange(24.0).view(4, 6)
    assert int(content_sum(whole[:, 1:3])) == int(content_sum(whole[:, 1:3].clone()))


def test_what_goes_through_is_counted() -> None:
    pushed = PushedTensors({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}.items())
    next(pushed)
    assert (pushed.num_tensors, pushed.num_bytes) == (1, 24)
    pushed.exhaust()
    assert list(pushed) == []


def test_checksums_change_exactly_if_the_tensors_did() -> None:
    sums = Checksums()
    assert sums.faults([held("s", "1"), held("t", "1")], "x") == {}
    assert sums.faults([held("s", "1"), held("t", "1")], "x") == {}
    assert sums.faults([held("s", "2"), held("t", "2")], "y") == {}
    wrong = sums.faults([held("s", "2"), held("t", "3")], "z")
    assert list(wrong) == ["s"]
    assert "other weights were pushed than last time, but its checksum did not change" in wrong["s"]
    wrong = sums.faults([held("s", "3"), held("t", "4")], "z")
    assert list(wrong) == ["t"] and "the same weights were pushed as last time, but its checksum changed" in wrong["t"]


def test_the_server_that_differs_from_most_is_named_with_the_tensor() -> None:
    wrong = Checksums().faults([held("s", "1"), held("t", "2"), held("u", "1")], "x")
    assert list(wrong) == ["t"]
    assert "as on 2 servers" in wrong["t"] and "first that differs: b" in wrong["t"]
    expected, found = held("s", "1").digest, held("t", "2").digest
    assert f"expected {expected}" in wrong["t"] and f"found {found}" in wrong["t"]


def test_without_a_majority_all_are_wrong() -> None:
    wrong = Checksums().faults([held("s", "1"), held("t", "2")], "x")
    assert wrong.keys() == {"s", "t"} and "no majority says which are right" in wrong["s"]


def test_servers_of_different_layouts_are_not_compared() -> None:
    assert Checksums().faults([held("s", "1"), held("t", "2", "another")], "x") == {}


def test_a_wrong_server_is_not_remembered() -> None:
    sums = Checksums()
    sums.faults([held("s", "1"), held("t", "2"), held("u", "1")], "x")
    assert sums.faults([held("s", "1"), held("t", "1"), held("u", "1")], "x") == {}
