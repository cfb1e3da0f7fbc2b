"""megatron-klear checkpoint list | show | verify | prune."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fake_checkpoints import save, write_partial
from megatron_klear import cli
from megatron_klear.checkpoint.command import main
from megatron_klear.checkpoint.folder import (
    TRACKER,
    latest_step,
    leftovers,
    partial_folder,
    saved_steps,
    step_folder,
    write_tracker,
)
from megatron_klear.checkpoint.lock import LOCK, folder_lock
from megatron_klear.checkpoint.manifest import MANIFEST, FileEntry, read_manifest, write_manifest
from megatron_klear.errors import CheckpointError


@pytest.fixture(autouse=True)
def somewhere_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Local time is two hours ahead."""
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that saved three checkpoints; the first was the best."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step, accuracy in ((50, 0.75), (100, 0.5), (150, 0.625)):
        save(folder, step, metrics={"eval/accuracy": accuracy, "train/loss": 1 / 3})
    return folder


def leave(folder: Path, step: int, suffix: str) -> None:
    write_partial(folder, step, "stale")
    partial_folder(folder, step).rename(step_folder(folder, step).with_suffix(suffix))


def kilobytes(*folders: Path) -> str:
    """What lies in them."""
    total = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    return f"{total / 1000:.1f} kB"


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> list[str]:
    """The lines a command prints."""
    assert main(list(map(str, words))) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_list_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "list", folder)
    assert lines[0].split("  ")[0] == "step"
    assert "tp x pp x dp / ranks" in lines[0]
    start = lines[0].index("tp x")
    assert [line[start:].split("  ")[0] for line in lines[1:]] == ["2 x 1 x 4 / 8"] * 3
    assert lines[1].split() == [
        "50", "2026-11-30", "14:00:00", "rl", "920", "B", "2", "x", "1", "x", "4", "/", "8", "100", "0.75",
    ]  # fmt: skip
    assert [line.endswith("latest") for line in lines[1:]] == [False, False, True]
    assert len({line.index(value) for line, value in zip(lines[1:], ("0.75", "0.5", "0.625"), strict=True)}) == 1


def test_list_of_a_checkpoint_without_metrics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder, 200)
    assert said(capsys, "list", folder)[-1].split()[-2:] == ["-", "latest"]


def test_list_sees_damage_by_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step_folder(folder, 50) / "__0_0.distcp").write_bytes(b"short")
    (step_folder(folder, 100) / MANIFEST).write_text("{")
    write_tracker(folder, 100)
    # Of the right size: too dear to look for here.
    (step_folder(folder, 150) / "recipe.yaml").write_text("tag: FIRST\n")
    lines = said(capsys, "list", folder)
    assert lines[1].endswith("0.75           DAMAGED: __0_0.distcp has 5 bytes instead of 900")
    assert lines[2].split() == ["100", "-", "-", "1.0", "kB", "-", "-", "-", "latest", "DAMAGED"]
    assert "DAMAGED" not in lines[3]
    assert lines[4].startswith(f"{step_folder(folder, 100) / MANIFEST} cannot be read")
    assert len(lines) == 5


def test_list_says_what_the_leftovers_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, 100, ".replaced")
    leave(folder, 50, ".removed")
    leave(folder, 200, ".partial")
    lines = said(capsys, "list", folder)[4:]
    assert [line.split(" (")[0] for line in lines] == [
        "iter_0000050.removed was being deleted",
        "iter_0000100.replaced is the older one of its step; a newer one was taking its name",
        "iter_0000200.partial is being written, or an interrupted run left it",
    ]
    assert len(leftovers(folder)) == 3
    assert not (folder / LOCK).exists()


def test_list_says_what_is_wrong_with_the_tracker(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tracker(folder, 200)
    assert said(capsys, "list", folder)[-1] == f"{TRACKER} names step 200, which is not here"
    (folder / TRACKER).write_text("release")
    assert "holds 'release'; expected" in said(capsys, "list", folder)[-1]
    (folder / TRACKER).unlink()
    assert said(capsys, "list", folder)[-1] == f"{TRACKER} is missing: no run would find these checkpoints"


def test_list_of_a_first_checkpoint_that_is_being_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_partial(tmp_path, 50)
    lines = said(capsys, "list", tmp_path)
    assert lines[0] == "no checkpoints"
    assert lines[-1].startswith("iter_0000050.partial is being written")


@pytest.mark.parametrize("size", ["999 B", "1.0 kB", "34.5 MB", "1.2 GB", "3.0 TB", "5000.0 TB"])
def test_sizes_are_for_people(size: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number, unit = size.split()
    num_bytes = round(float(number) * 1000 ** ["B", "kB", "MB", "GB", "TB"].index(unit))
    path = step_folder(folder, 150)
    files = {"__0_0.distcp": FileEntry(bytes=num_bytes, sha256="0")}
    write_manifest(path, read_manifest(path).model_copy(update={"files": files}))
    assert f"  {size}  " in said(capsys, "list", folder)[3]


def test_show_tells_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "show", folder)
    topics = dict(line.split(maxsplit=1) for line in lines if not line.startswith(" "))
    assert topics["checkpoint"] == str(step_folder(folder, 150))
    assert topics["step"] == "150, saved 2026-11-30 14:00:00 by a run of kind rl"
    # embedding and head 2 x 32 x 16, last norm 16; each layer q, o 2 x 32 x 16, k, v 2 x 16 x 16, MLP 3 x 24 x 16,
    # norms 2 x 16 + 2 x 8
    parameters = 2 * 32 * 16 + 16 + 2 * (2 * 32 * 16 + 2 * 16 * 16 + 3 * 24 * 16 + 2 * 16 + 2 * 8)
    assert topics["policy"] == (
        f"qwen3, 2 layers, hidden 16, vocabulary 32, {parameters:,} parameters in bfloat16, version 300,"
        " with distributed optimizer"
    )
    assert topics["reference"].endswith("version 0, weights only")
    assert topics["layout"] == "2 x 1 x 4 / 8 (tensor x pipeline x data / ranks)"
    assert topics["tokenizer"] == "abc123"
    assert topics["recipe"] == str(step_folder(folder, 150) / "recipe.yaml")
    assert topics["packages"] == "megatron-klear 0.1.0, torch 2.13.0"
    assert topics["eval/accuracy"] == "0.625"
    assert topics["train/loss"] == "0.333333"
    assert topics["files"] == "3, 1.0 kB"
    assert [line.split() for line in lines[-3:]] == [
        ["1.0", "kB", "__0_0.distcp"], ["11", "B", "recipe.yaml"], ["9", "B", "reference/common.pt"],
    ]  # fmt: skip


def test_show_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "show", folder, "--step", "50", "--json")
    assert json.loads("\n".join(lines)) == read_manifest(step_folder(folder, 50)).model_dump(mode="json")


def test_show_of_a_damaged_manifest(folder: Path) -> None:
    (step_folder(folder, 150) / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"iter_0000150/manifest.json cannot be read"):
        main(["show", str(folder)])


def test_verify_compares_every_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", folder) == ["OK iter_0000150 3 files, 1.0 kB"]
    assert said(capsys, "verify", folder, "--step", "50") == ["OK iter_0000050 3 files, 920 B"]
    assert [line.split()[:2] for line in said(capsys, "verify", folder, "--all")] == [
        ["OK", "iter_0000050"], ["OK", "iter_0000100"], ["OK", "iter_0000150"],
    ]  # fmt: skip


def test_verify_finds_what_list_cannot_see(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = step_folder(folder, 100)
    (path / "recipe.yaml").write_text("tag: FIRST\n")
    (path / "reference" / "common.pt").unlink()
    (step_folder(folder, 150) / MANIFEST).write_text("{")
    lines = said(capsys, "verify", folder, "--all", code=1)
    assert lines[0].startswith("OK iter_0000050 ")
    assert lines[1] == (
        "DAMAGED iter_0000100: recipe.yaml has changed since it was written (its checksum differs);"
        " reference/common.pt cannot be read (No such file or directory)"
    )
    assert lines[2].startswith(f"DAMAGED iter_0000150: {step_folder(folder, 150) / MANIFEST} cannot be read")
    assert said(capsys, "verify", folder, "--step", "50")[0].startswith("OK")
    assert said(capsys, "verify", folder, code=1) == lines[2:]
    # The damaged one before the whole one decides too.
    save(folder, 200)
    assert said(capsys, "verify", folder, "--all", code=1)[-1].startswith("OK iter_0000200")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_verify_shows_its_progress_on_a_terminal_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["verify", str(folder)]) == 0
    assert "/1.02k" in terminal.getvalue()
    assert capsys.readouterr().out == "OK iter_0000150 3 files, 1.0 kB\n"


def test_prune_keeps_what_it_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = kilobytes(step_folder(folder, 100))
    assert said(capsys, "prune", folder, "--keep-last", "1", "--keep-best", "1") == [
        f"deleted iter_0000100 ({size})", f"freed {size}; 2 checkpoints stay",
    ]  # fmt: skip
    assert saved_steps(folder) == [50, 150]
    words = ("prune", folder, "--keep-last", "1", "--keep-every", "100", "--keep-best", "1")
    assert said(capsys, *words, "--metric", "train/loss", "--mode", "min") == ["freed 0 B; 2 checkpoints stay"]
    assert said(capsys, "prune", folder, "--keep-last", "1")[0].startswith("deleted iter_0000050 ")
    assert saved_steps(folder) == [150]


def test_prune_deletes_leftovers_and_not_the_trackers_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, 200, ".partial")
    write_tracker(folder, 100)
    size = kilobytes(partial_folder(folder, 200), step_folder(folder, 50))
    lines = said(capsys, "prune", folder, "--keep-last", "1")
    assert lines[0] == f"deleted {folder / 'iter_0000200.partial'}, which an interrupted run left"
    assert lines[1].startswith("deleted iter_0000050 (")
    assert lines[2] == f"freed {size}; 2 checkpoints stay"
    assert saved_steps(folder) == [100, 150]
    assert latest_step(folder) == 100


def test_a_dry_run_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, 200, ".partial")
    leave(folder, 25, ".replaced")
    before = sorted(folder.rglob("*"))
    lines = said(capsys, "prune", folder, "--keep-last", "1", "--keep-every", "100", "--dry-run")
    assert sorted(folder.rglob("*")) == before
    assert [line.split(" (")[0] for line in lines] == [
        "would give iter_0000025.replaced its name back, and then judge it",
        "would delete iter_0000050",
        "would delete iter_0000200.partial",
        f"would free {kilobytes(partial_folder(folder, 200), step_folder(folder, 50))}",
    ]
    # And then it does what it said.
    assert main(["prune", str(folder), "--keep-last", "1", "--keep-every", "100"]) == 0
    assert saved_steps(folder) == [100, 150]
    assert leftovers(folder) == []


def test_prune_stays_away_from_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(folder, 200, ".partial")
    words = ["prune", str(folder), "--keep-last", "1"]
    with folder_lock(folder):
        with pytest.raises(CheckpointError, match=f"is in use by process {os.getpid()} "):
            main(words)
        # Looking is allowed.
        assert main([*words, "--dry-run"]) == 0
        assert said(capsys, "list", folder)
    assert saved_steps(folder) == [50, 100, 150]
    assert len(leftovers(folder)) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--keep-best", "1", "--metric", "eval/acuracy"],
            r"holds the metric 'eval/acuracy', .*eval/accuracy, train/loss",
        ),
        (["--metric", "train/loss"], "--metric and --mode have no effect without --keep-best"),
        (["--mode", "min"], "--metric and --mode have no effect without --keep-best"),
    ],
)
def test_prune_refuses_what_would_delete_the_wrong_ones(folder: Path, words: list[str], reason: str) -> None:
    for more in ([], ["--dry-run"]):
        with pytest.raises(CheckpointError, match=reason):
            main(["prune", str(folder), "--keep-last", "1", *words, *more])
    assert saved_steps(folder) == [50, 100, 150]


def test_without_a_tracker_the_newest_is_not_guessed(folder: Path) -> None:
    (folder / TRACKER).unlink()
    for words in (["show"], ["verify"]):
        with pytest.raises(CheckpointError, match=r"no latest_.*; choose it with --step: 50, 100, 150"):
            main([*words, str(folder)])
    with pytest.raises(CheckpointError, match=r"no latest_.*, so which checkpoint must stay is not known; write"):
        main(["prune", str(folder), "--keep-last", "1"])
    assert main(["verify", str(folder), "--all"]) == 0
    assert main(["show", str(folder), "--step", "50"]) == 0


def test_the_folder_of_a_run_will_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "list", folder.parent) == said(capsys, "list", folder)
    assert said(capsys, "prune", folder.parent, "--keep-last", "1")[-1].endswith("1 checkpoints stay")
    assert (folder / LOCK).exists()
    assert not (folder.parent / LOCK).exists()


def test_a_folder_that_is_not_of_a_run_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = f"expected its parent, {folder}"
    with pytest.raises(CheckpointError, match=rf"iter_0000050 is one checkpoint; {parent} \(and --step"):
        main(["list", str(step_folder(folder, 50))])
    monkeypatch.chdir(step_folder(folder, 50))
    with pytest.raises(CheckpointError, match=rf"^\. is one checkpoint; {parent}"):
        main(["verify", "."])
    with pytest.raises(CheckpointError, match="absent is not a folder; expected the parent of"):
        main(["list", str(folder / "absent")])
    (folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty holds neither latest_checkpointed_iteration.txt nor iter_\*"):
        main(["list", str(folder / "empty")])
    with pytest.raises(CheckpointError, match="iter_0000007 does not exist; steps that do: 50, 100, 150"):
        main(["show", str(folder), "--step", "7"])


def test_what_the_disk_says_is_an_error_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "__0_0.distcp")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(
        CheckpointError, match=r"Permission denied: '__0_0.distcp'; expected a folder that this user may"
    ):
        main(["prune", str(folder), "--keep-last", "1"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "required: ACTION"),
        (["lst", "x"], "invalid choice: 'lst'"),
        (["show", "x", "--step", "-1"], "--step"),
        (["show", "x", "--step", "one"], "expected the number of a step, got 'one'"),
        (["verify", "x", "--all", "--step", "1"], "not allowed with argument"),
        (["prune", "x"], "required: --keep-last"),
        (["prune", "x", "--keep-last", "0"], "expected a positive integer, got '0'"),
        (["prune", "x", "--keep", "1"], "required: --keep-last"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_it_is_a_command_of_megatron_klear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    assert cli.main(["checkpoint", "list", str(folder / "absent")]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("OK iter_0000150")
    assert err.startswith("megatron-klear checkpoint: ")
    assert "Traceback" not in err
