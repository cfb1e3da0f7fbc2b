"""The folder of a version: what a server reads is whole, whatever happens to the writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.fresh_process import number_of
from helpers.shelf_servers import Exported, ShelfControl, ShelfServer
from megatron_klear.errors import WeightSyncError
from megatron_klear.weight_sync.disk import DiskTransport
from megatron_klear.weight_sync.remote import PushSetup, RemoteSync

ROOT = Path(__file__).resolve().parents[3]
MIB = 1024**2


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (folder / name).write_text("weights of the past")
    return folder


def transport(template: Path, *, keep: int = 2, max_shard_bytes: int = MIB) -> DiskTransport:
    return DiskTransport(template.parent / "weights", template=template, keep=keep, max_shard_bytes=max_shard_bytes)


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_holds_the_tensors_and_the_templates_companions(template: Path) -> None:
    disk = transport(template)
    exported = Exported(1.5)
    disk.stage(exported, 7)
    folder = disk.version_folder(7)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert same(read(folder), exported.tensors)
    assert names(disk.folder) == ["version_0000007"]


def test_several_shards_have_an_index_and_standard_names(template: Path) -> None:
    disk = transport(template, max_shard_bytes=32)
    exported = Exported(1.5, num=5)
    disk.stage(exported, 1)
    folder = disk.version_folder(1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = [f"model-{i}-of-00003.safetensors" for i in ("00001", "00002", "00003")]
    assert sorted(set(index["weight_map"].values())) == files and index["metadata"] == {"total_size": 80}
    for file in files:
        held = load_file(folder / file)
        assert set(held) == {name for name, place in index["weight_map"].items() if place == file}
        assert sum(tensor.nbytes for tensor in held.values()) <= 32
    assert same(read(folder), exported.tensors)


def test_views_of_one_storage_and_dtypes_are_written_as_they_are(template: Path) -> None:
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    tensors = {"q": whole[:2], "k": whole[2:], "t": whole.t()}
    disk = transport(template)
    disk.stage(tensors.items(), 1)
    assert same(read(disk.version_folder(1)), tensors)


def test_the_newest_stay_also_after_a_run_went_back(template: Path) -> None:
    disk = transport(template, keep=2)
    for version in (7, 8, 9):
        disk.stage(Exported(), version)
        time.sleep(0.01)
    assert names(disk.folder) == ["version_0000008", "version_0000009"]
    (disk.folder / "notes").mkdir()
    disk.stage(Exported(), 3)
    assert names(disk.folder) == ["notes", "version_0000003", "version_0000009"]


def test_a_version_that_is_pushed_again_replaces_the_older_one(template: Path) -> None:
    disk = transport(template)
    disk.stage(Exported(1.0), 1)
    disk.stage(Exported(2.0), 1)
    assert same(read(disk.version_folder(1)), Exported(2.0).tensors)
    assert names(disk.folder) == ["version_0000001"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_write_that_fails_leaves_the_old_folder_and_nothing_else(template: Path, version: int) -> None:
    disk = transport(template, max_shard_bytes=16)
    disk.stage(Exported(1.0), 1)
    with pytest.raises(RuntimeError, match="a rank of the trainer is gone"):
        disk.stage(Exported(2.0, fails_after=2), version)
    assert same(read(disk.version_folder(1)), Exported(1.0).tensors)
    assert names(disk.folder) == ["version_0000001"]


KILLED = """
import sys, time, torch
from megatron_klear.weight_sync.disk import DiskTransport
def tensors():
    yield "w0", torch.ones(4)
    yield "w1", torch.ones(4)
    print("half", flush=True)
    time.sleep(60)
DiskTransport(sys.argv[1], template=sys.argv[2], max_shard_bytes=16).stage(tensors(), 1)
"""


def test_a_kill_in_the_middle_leaves_the_old_folder_and_the_next_push_cleans_up(template: Path) -> None:
    disk = transport(template)
    disk.stage(Exported(1.0), 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", KILLED, str(disk.folder), str(template)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "half\n"
        assert names(disk.folder) == ["version_0000001", "version_0000001.partial"]
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()
    assert same(read(disk.version_folder(1)), Exported(1.0).tensors)
    disk.stage(Exported(2.0), 2)
    assert names(disk.folder) == ["version_0000001", "version_0000002"]


def test_a_kill_between_the_renames_gives_the_older_one_its_name_back(template: Path) -> None:
    disk = transport(template)
    disk.stage(Exported(1.0), 1)
    disk.version_folder(1).rename(disk.folder / "version_0000001.replaced")
    (disk.folder / "version_0000000.removed").mkdir()
    disk.stage(Exported(2.0), 2)
    assert same(read(disk.version_folder(1)), Exported(1.0).tensors)
    assert names(disk.folder) == ["version_0000001", "version_0000002"]


def test_what_cannot_be_written_is_named(template: Path) -> None:
    with pytest.raises(WeightSyncError, match="no tensors came"):
        transport(template).stage([], 1)
    file = template.parent / "file"
    file.write_text("")
    with pytest.raises(WeightSyncError, match=r"cannot write the weights of version 1 under .*file"):
        DiskTransport(file, template=template).stage(Exported(), 1)
    with pytest.raises(WeightSyncError, match=r"holds no config\.json"):
        DiskTransport(file, template=template.parent)


def test_a_failed_write_disturbs_no_server(template: Path) -> None:
    server = ShelfServer("a")
    exported = Exported()
    with RemoteSync(setup(transport(template), [server])) as sync:
        (template.parent / "weights").write_text("")
        with pytest.raises(WeightSyncError, match="cannot write the weights"):
            sync.push(exported, 1)
    assert server.calls == [] and exported.is_exhausted


def test_servers_load_the_folder_and_name_it(template: Path) -> None:
    servers = [ShelfServer("a"), ShelfServer("b", breaks=["update_from_disk"])]
    exported = Exported(3.0)
    with RemoteSync(setup(transport(template), servers)) as sync:
        report = sync.push(exported, 5)
    assert same(servers[0].tensors, exported.tensors) and servers[0].version == 5
    # The version came with the folder: the check of it has power.
    assert servers[0].calls[:3] == ["facts", "pause", "update_from_disk"] and "set_version" not in servers[0].calls
    assert list(report.failed) == ["b"] and report.failed["b"].startswith("update_from_disk: ")


def setup(disk: DiskTransport, servers: list[ShelfServer]) -> PushSetup:
    by_name = {server.name: server for server in servers}
    return PushSetup(
        control=ShelfControl(servers),
        connect=lambda address: by_name[address.name],
        transport=disk,
        pause_mode="abort",
        timeout_s=30.0,
        max_probe_diff=1e-3,
    )


def fresh_tensors(value: int) -> Iterator[tuple[str, Tensor]]:
    """32 MiB in tensors of 4."""
    for i in range(8):
        yield f"w{i}", torch.full((MIB,), float(value + i))


def growth_over_writes(template: str, folder: str) -> float:
    """MiB that 20 writes of 32 MiB left, after the first four."""
    disk = DiskTransport(folder, template=template, max_shard_bytes=8 * MIB)
    process = psutil.Process()
    used = []
    for version in range(24):
        disk.stage(fresh_tensors(version), version)
        used.append(process.memory_info().rss)
    return (max(used[-4:]) - max(used[:4])) / MIB


def test_memory_does_not_grow_over_20_writes(template: Path, tmp_path: Path) -> None:
    assert number_of(__file__, "growth_over_writes", str(template), str(tmp_path / "weights")) < 24
