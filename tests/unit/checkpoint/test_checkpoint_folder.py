"""Whatever is named iter_* is whole and the tracker names one of them, whenever the process dies."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_checkpoints import dies_at, save, tag_of, write_partial
from megatron_klear.checkpoint.folder import (
    TRACKER,
    existing_step_folder,
    latest_step,
    leftovers,
    partial_folder,
    prunable,
    prune,
    publish,
    recover,
    remove,
    saved_steps,
    step_folder,
    write_tracker,
)
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.errors import CheckpointError


def tags(folder: Path) -> dict[int, str]:
    """All checkpoints by step, each of them whole."""
    return {step: tag_of(step_folder(folder, step)) for step in saved_steps(folder)}


def cut_in_half(path: Path) -> None:
    """What a deletion leaves that was killed."""
    (path / "manifest.json").unlink(missing_ok=True)
    (path / "recipe.yaml").unlink(missing_ok=True)


def leave(folder: Path, step: int, suffix: str, *, whole: bool = False) -> Path:
    """A leftover of an earlier death."""
    write_partial(folder, step, "stale")
    path = partial_folder(folder, step).rename(step_folder(folder, step).with_suffix(suffix))
    if not whole:
        cut_in_half(path)
    return path


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be written to a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_steps_are_found_by_name(tmp_path: Path) -> None:
    for name in ("iter_0000100", "iter_0000005", "iter_12345678", "iter_0000007.partial", "iter_0000008.replaced"):
        (tmp_path / name).mkdir()
    # Eight digits with a leading zero, a short name and other people's folders are none of ours.
    for name in (
        "iter_00000009",
        "iter_10",
        "iter_best",
        "iter_best.partial",
        "iter_0000003.bak",
        "iter_0000004.replaced.x",
    ):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [5, 100, 12345678]
    assert [path.name for path in leftovers(tmp_path)] == ["iter_0000007.partial", "iter_0000008.replaced"]
    assert saved_steps(tmp_path / "absent") == leftovers(tmp_path / "absent") == []
    assert step_folder(tmp_path, 5) == tmp_path / "iter_0000005"
    assert partial_folder(str(tmp_path), 5) == tmp_path / "iter_0000005.partial"


def test_the_tracker_says_which_is_the_newest(tmp_path: Path) -> None:
    assert latest_step(tmp_path) is None
    with pytest.raises(
        CheckpointError, match=r"holds no latest_checkpointed_iteration.txt; expected the folder that a"
    ):
        existing_step_folder(tmp_path)
    save(tmp_path, 5)
    assert save(tmp_path, 10) == step_folder(tmp_path, 10)
    assert (tmp_path / TRACKER).read_text() == "10"
    assert existing_step_folder(tmp_path) == step_folder(tmp_path, 10)
    assert existing_step_folder(str(tmp_path), 5) == step_folder(tmp_path, 5)
    with pytest.raises(CheckpointError, match="iter_0000007 does not exist; steps that do: 5, 10"):
        existing_step_folder(tmp_path, 7)
    write_tracker(tmp_path, 20)
    with pytest.raises(
        CheckpointError, match=r"iteration.txt names step 20, but .*iter_0000020 does not exist; .*5, 10"
    ):
        existing_step_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"release", b"-3", b"1.5", b"\xff\xfe"])
def test_a_tracker_without_a_number_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"latest_checkpointed_iteration.txt holds '.*'; expected the number of an"
    ):
        latest_step(tmp_path)


def test_publishing_replaces_the_older_one_of_that_step(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 5, "second")
    assert tags(tmp_path) == {5: "second"}
    assert leftovers(tmp_path) == []
    assert latest_step(tmp_path) == 5


Scene = Callable[[Path], None]
Operation = Callable[[Path], object]


def _publish(step: int) -> Operation:
    """Write it anew, then publish: what a run does that starts again after its death."""

    def operation(folder: Path) -> None:
        shutil.rmtree(partial_folder(folder, step), ignore_errors=True)
        write_partial(folder, step, "second")
        publish(folder, step)

    return operation


def _nothing(folder: Path) -> None:
    pass


def _three(folder: Path) -> None:
    for step in (5, 10, 15):
        save(folder, step)


def _three_and_leftovers(folder: Path) -> None:
    _three(folder)
    for step, suffix in ((15, ".replaced"), (15, ".removed"), (10, ".replaced"), (20, ".partial")):
        leave(folder, step, suffix)


def _went_back(folder: Path) -> None:
    _three(folder)
    write_tracker(folder, 10)


def _died_between_the_renames(folder: Path) -> None:
    _three(folder)
    write_partial(folder, 15, "second")
    step_folder(folder, 15).rename(step_folder(folder, 15).with_suffix(".replaced"))
    leave(folder, 10, ".removed")


SCENES: dict[str, tuple[Scene, Operation, dict[int, str], int | None]] = {
    # What is there, what is done, and what is there afterwards.
    "the first": (_nothing, _publish(5), {5: "second"}, 5),
    "the next": (_three, _publish(20), {5: "first", 10: "first", 15: "first", 20: "second"}, 20),
    "over the newest": (_three, _publish(15), {5: "first", 10: "first", 15: "second"}, 15),
    "over an older one": (_three, _publish(10), {5: "first", 10: "second", 15: "first"}, 10),
    "over a later one": (_went_back, _publish(15), {5: "first", 10: "first", 15: "second"}, 15),
    "over one with leftovers": (_three_and_leftovers, _publish(15), {5: "first", 10: "first", 15: "second"}, 15),
    "remove": (_three, lambda folder: remove(folder, 10), {5: "first", 15: "first"}, 15),
    "remove one with leftovers": (
        _three_and_leftovers,
        lambda folder: remove(folder, 10),
        {5: "first", 15: "first"},
        15,
    ),
    "retention": (_three, Retention(keep_last=1).apply, {15: "first"}, 15),
    "move the tracker": (_three, lambda folder: write_tracker(folder, 10), {5: "first", 10: "first", 15: "first"}, 10),
    "recover": (_three_and_leftovers, recover, {5: "first", 10: "first", 15: "first"}, 15),
    "recover between renames": (_died_between_the_renames, recover, {5: "first", 10: "first", 15: "first"}, 15),
}


def check_what_the_dead_left(folder: Path, before: int | None, after: int | None) -> None:
    """The law itself; then `recover` must find an orderly folder, and lose nothing that the tracker named."""
    left = tags(folder)
    tracked = latest_step(folder)
    assert tracked in (before, after)
    if tracked is not None and tracked not in left:
        assert step_folder(folder, tracked).with_suffix(".replaced").is_dir()
    recover(folder)
    assert leftovers(folder) == []
    recovered = tags(folder)
    assert recovered.items() >= left.items()
    assert latest_step(folder) == tracked
    if tracked is not None:
        assert existing_step_folder(folder).name == f"iter_{tracked:07d}"
        assert tracked in recovered


@pytest.mark.parametrize("name", SCENES)
def test_killed_at_any_moment(name: str, tmp_path: Path) -> None:
    scene, operation, wanted, tracked = SCENES[name]
    moment, dead = 0, True
    while dead:
        folder = tmp_path / str(moment)
        folder.mkdir()
        scene(folder)
        before = latest_step(folder)
        dead = dies_at(moment, lambda folder=folder: operation(folder))
        check_what_the_dead_left(folder, before, tracked)
        operation(folder)
        recover(folder)
        assert tags(folder) == wanted
        assert latest_step(folder) == tracked
        shutil.rmtree(folder)
        moment += 1
    assert moment > 4, "hardly an operation was seen: does the countdown still wrap what the code calls?"


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Deaths that pile up, in recovery too: the newest that was published is never lost."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    keep = Retention(keep_last=2)
    published: int | None = None

    def run() -> None:
        recover(tmp_path)
        start = latest_step(tmp_path) or 0
        for step in range(start + 1, start + 4):
            _publish(step)(tmp_path)
            keep.apply(tmp_path)

    for _ in range(60):
        dies_at(dice.randrange(120), run)
        left = tags(tmp_path)
        published = latest_step(tmp_path)
        if published is not None and published not in left:
            assert step_folder(tmp_path, published).with_suffix(".replaced").is_dir()
    assert published is not None
    assert published > 3
    recover(tmp_path)
    # One above the tracker may have got its name just before the end.
    assert tags(tmp_path).keys() - {published + 1} <= {published - 2, published - 1, published}
    assert existing_step_folder(tmp_path) == step_folder(tmp_path, published)


def test_recovery_says_what_it_did(tmp_path: Path) -> None:
    _died_between_the_renames(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"iteration.txt names step 15, but .* does not exist; steps that do: 5, 10"
    ):
        existing_step_folder(tmp_path)
    assert recover(tmp_path) == [
        f"deleted {tmp_path / 'iter_0000010.removed'}, which an interrupted run left",
        f"deleted {tmp_path / 'iter_0000015.partial'}, which an interrupted run left",
        f"gave {tmp_path / 'iter_0000015'} its name back",
    ]
    assert tags(tmp_path) == {5: "first", 10: "first", 15: "first"}
    assert recover(tmp_path) == []


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for name in ("iter_best.partial", "iter_0000005.bak", "notes.replaced"):
        (tmp_path / name).mkdir()
    assert recover(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        "iter_0000005", TRACKER, "iter_best.partial", "iter_0000005.bak", "notes.replaced",
    }  # fmt: skip


def busy(path: Any, *, dir_fd: int | None = None) -> None:
    raise OSError(errno.EBUSY, "Device or resource busy", str(path))


def test_half_of_a_replaced_checkpoint_never_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone still reads the older one (NFS), so deleting it fails half-way; later that step is pruned."""
    save(tmp_path, 5)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", busy)
        save(tmp_path, 5, "second")
    assert tags(tmp_path) == {5: "second"}
    save(tmp_path, 10)
    # By hand, and so without a look at what lies beside it.
    shutil.rmtree(step_folder(tmp_path, 5))
    recover(tmp_path)
    assert tags(tmp_path) == {10: "first"}
    assert leftovers(tmp_path) == []


def test_a_removed_step_takes_its_older_self_along(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    leave(tmp_path, 5, ".replaced", whole=True)
    remove(tmp_path, 5)
    recover(tmp_path)
    assert tags(tmp_path) == {10: "first"}


def test_what_cannot_be_deleted_raises_and_stays_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", busy)
        with pytest.raises(OSError, match="busy"):
            remove(tmp_path, 5)
    assert tags(tmp_path) == {10: "first"}
    recover(tmp_path)
    assert leftovers(tmp_path) == []


def test_a_rename_that_fails_leaves_the_older_one_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)
    write_partial(tmp_path, 5, "second")
    rename = os.rename

    def no_space_for_the_new_name(source: Path, target: Path) -> None:
        if Path(source).suffix == ".partial":
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", no_space_for_the_new_name)
    with pytest.raises(OSError, match="No space left"):
        publish(tmp_path, 5)
    assert tags(tmp_path) == {5: "first"}
    assert latest_step(tmp_path) == 5


def test_a_full_disk_leaves_the_tracker_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 5)
    write_partial(tmp_path, 10)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        publish(tmp_path, 10)
    assert latest_step(tmp_path) == 5
    assert tags(tmp_path) == {5: "first", 10: "first"}
    _publish(10)(tmp_path)
    assert latest_step(tmp_path) == 10


def test_a_vanished_folder_is_named(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with pytest.raises(FileNotFoundError, match=r"iter_0000010\.partial"):
        publish(tmp_path, 10)
    assert tags(tmp_path) == {5: "first"}
    with pytest.raises(FileNotFoundError, match="gone"):
        write_tracker(tmp_path / "gone", 5)


def test_a_checkpoint_on_another_disk_is_unlinked_only(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    folder.mkdir()
    save(folder, 5).rename(elsewhere)
    step_folder(folder, 5).symlink_to(elsewhere)
    save(folder, 10)
    assert tags(folder) == {5: "first", 10: "first"}
    remove(folder, 5)
    assert leftovers(folder) == []
    assert tags(folder) == {10: "first"}
    assert tag_of(elsewhere) == "first"


def test_pruning_asks_only_for_what_is_not_later_than_the_tracker(tmp_path: Path) -> None:
    _three(tmp_path)
    write_tracker(tmp_path, 10)
    asked: list[list[int]] = []

    def keep_none(steps: list[int]) -> set[int]:
        asked.append(steps)
        return set()

    assert prunable(tmp_path, keep_none) == [5]
    assert saved_steps(tmp_path) == [5, 10, 15]
    assert prune(tmp_path, keep_none) == [5]
    assert asked == [[5, 10], [5, 10]]
    assert saved_steps(tmp_path) == [10, 15]
    (tmp_path / TRACKER).unlink()
    assert prune(tmp_path, keep_none) == []
