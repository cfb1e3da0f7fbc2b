"""Pushes to server processes: broadcasts over gloo above all, and the other ways, against a true model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.fake_servers import FakeServer, fake_servers, free_port
from helpers.shelf_servers import ShelfControl
from helpers.tiny_qwen3 import hf_config, hf_model, random_tensors, tiny_shape
from megatron_klear.errors import WeightSyncError
from megatron_klear.parallel.engine_group import EngineGroup, EngineStore
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.weight_sync.broadcast import BroadcastTransport
from megatron_klear.weight_sync.crew import WeightTransport
from megatron_klear.weight_sync.disk import DiskTransport
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync
from megatron_klear.weight_sync.tensor import TensorTransport
from megatron_klear.weight_sync.verify import Probe

SHAPE = tiny_shape(tied=True)
PROMPT = (1, 2, 3, 30, 4)
BUCKET = 8192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file(random_tensors(SHAPE, 0), folder / "model.safetensors")
    hf_config(SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[FakeServer]]:
    with fake_servers(2, model=str(model)) as running:
        yield running


def remote(servers: list[FakeServer], transport: WeightTransport, timeout_s: float = 60.0) -> RemoteSync:
    labels = VersionLabels()
    setup = PushSetup(
        control=ShelfControl(servers),
        connect=lambda address: SglangServer(
            address, labels, timeout_s=60.0, max_connections=4, limits=ModelLimits(SHAPE.vocab_size, 128)
        ),
        transport=transport,
        pause_mode="abort",
        timeout_s=timeout_s,
        max_probe_diff=1e-3,
    )
    return RemoteSync(setup)


def gloo() -> BroadcastTransport:
    return BroadcastTransport(host="127.0.0.1", port=free_port(), backend="gloo", bucket_bytes=BUCKET)


def weights(seed: int) -> tuple[dict[str, Tensor], Probe]:
    """The model's tensors and what transformers says of the probe with them."""
    tensors = random_tensors(SHAPE, seed)
    with torch.no_grad():
        logits = hf_model(SHAPE, tensors)(torch.tensor([PROMPT])).logits[0]
    logprobs = logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    return tensors, Probe(PROMPT, tuple(logprobs.tolist()))


def push(sync: RemoteSync, seed: int, version: int) -> dict[str, str]:
    tensors, probe = weights(seed)
    return dict(sync.push(tensors.items(), version, probe).failed)


@pytest.mark.parametrize("kind", ["disk", "tensor", "broadcast"])
def test_server_processes_hold_what_was_pushed(
    kind: str, servers: list[FakeServer], model: Path, tmp_path: Path
) -> None:
    made: dict[str, WeightTransport] = {
        "disk": DiskTransport(tmp_path / "weights", template=model),
        "tensor": TensorTransport(bucket_bytes=BUCKET),
        "broadcast": gloo(),
    }
    # The probe is transformers' own: weights that were loaded wrongly, or not at all, would fail it.
    with remote(servers, made[kind]) as sync:
        for version, seed in enumerate((1, 2, 2, 3)):
            assert push(sync, seed, version) == {}
    joins = [server.calls().count("/init_weights_update_group") for server in servers]
    assert joins == ([1, 1] if kind == "broadcast" else joins)


@pytest.mark.parametrize("with_probe", [True, False])
def test_a_skipped_push_is_found_by_probe_and_by_checksum(servers: list[FakeServer], with_probe: bool) -> None:
    with remote(servers, TensorTransport(bucket_bytes=BUCKET)) as sync:
        assert push(sync, 4, 1) == {}
        servers[1].faults(skip_push=True)
        try:
            tensors, probe = weights(5)
            if with_probe:
                # Unknown to the checksums, which so have nothing to compare: the probe alone tells.
                sync._main._checksums.faults = lambda held, fingerprint, **_: {}  # type: ignore[union-attr, method-assign]
            failed = sync.push(tensors.items(), 2, probe if with_probe else None).failed
        finally:
            servers[1].faults(skip_push=False)
    assert list(failed) == ["fake1"]
    assert ("disagrees with the trainer" if with_probe else "its checksum did not change") in failed["fake1"]


def test_a_server_that_dies_in_a_broadcast_is_dropped_and_the_other_gets_all(model: Path) -> None:
    with fake_servers(2, model=str(model)) as pair, remote(pair, gloo()) as sync:
        assert push(sync, 1, 1) == {}
        pair[0].faults(die_in_push=True)
        failed = push(sync, 2, 2)
        assert list(failed) == ["fake0"] and failed["fake0"].startswith("update_from_broadcast: ")
        # It comes back without the group, under the same address.
        pair[0].restart()
        assert push(sync, 3, 3) == {}


def test_a_server_that_refuses_broadcasts_is_dropped_and_the_other_gets_all(servers: list[FakeServer]) -> None:
    servers[1].faults(refuse_push=True)
    try:
        with remote(servers, gloo()) as sync:
            failed = push(sync, 6, 1)
    finally:
        servers[1].faults(refuse_push=False)
    assert list(failed) == ["fake1"] and "refuse_push" in failed["fake1"]


def test_a_server_that_was_restarted_behind_our_back_joins_again(model: Path) -> None:
    with fake_servers(1, model=str(model)) as one, remote(one, gloo()) as sync:
        assert push(sync, 1, 1) == {}
        one[0].restart()
        assert push(sync, 2, 2) == {}


def test_a_port_that_is_taken_is_named() -> None:
    port = free_port()
    store = EngineStore("127.0.0.1", port)
    try:
        group = EngineGroup(store, "a", world_size=2, backend="gloo", timeout_s=5)
        assert group.absent([1]) == [1]
        with pytest.raises(WeightSyncError, match=f"cannot listen on 127.0.0.1:{port} .*broadcast_port"):
            EngineStore("127.0.0.1", port)
    finally:
        store.close()
