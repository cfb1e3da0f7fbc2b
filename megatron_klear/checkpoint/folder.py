"""A folder of checkpoints: iter_0000100/, latest_checkpointed_iteration.txt, and how they change. Needs no torch.

Whatever is named iter_* is whole, at every moment, and the tracker names one of them. So a checkpoint is written,
replaced and removed under other names, and every change that counts is one rename:

    iter_0000100.partial   being written; no one reads it
    iter_0000100.replaced  the older one of that step, while a newer one takes its name
    iter_0000100.removed   being deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_klear.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"

_STEP = re.compile(r"iter_(\d{7}|[1-9]\d{7,})", re.ASCII)
_LEFTOVER = re.compile(rf"{_STEP.pattern}\.(partial|replaced|removed)", re.ASCII)


def step_folder(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies."""
    return Path(folder) / f"iter_{step:07d}"


def partial_folder(folder: str | Path, step: int) -> Path:
    """Where a step's checkpoint lies while it is written."""
    return step_folder(folder, step).with_suffix(".partial")


def saved_steps(folder: str | Path) -> list[int]:
    """Steps of all checkpoints under a folder, rising; [] for a folder that does not exist."""
    names = (path.name for path in Path(folder).glob("iter_*"))
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def leftovers(folder: str | Path) -> list[Path]:
    """What a kill left under a folder of checkpoints, or a run is changing just now; by name."""
    return sorted(path for path in Path(folder).glob("iter_*.*") if _LEFTOVER.fullmatch(path.name))


def latest_step(folder: str | Path) -> int | None:
    """Step that the tracker names, or None where there is no tracker."""
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} holds {text!r}; expected the number of an iter_* folder beside it")
    return int(text)


def existing_step_folder(folder: str | Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, or the one that the tracker names. Raises `CheckpointError` if there is none."""
    folder = Path(folder)
    found = latest_step(folder) if step is None else step
    if found is None:
        raise CheckpointError(
            f"{folder} holds no {TRACKER}; expected the folder that a run saved into (the parent of iter_*)"
        )
    path = step_folder(folder, found)
    if not path.is_dir():
        others = ", ".join(map(str, saved_steps(folder))) or "none"
        named = f"{folder / TRACKER} names step {found}, but {path}" if step is None else f"{path}"
        raise CheckpointError(f"{named} does not exist; steps that do: {others}")
    return path


def fsync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, step: int) -> Path:
    """Give a finished partial checkpoint its name, then let the tracker name it.

    Raises `OSError`; then the tracker names what it named before.
    """
    final, partial = step_folder(folder, step), partial_folder(folder, step)
    old = final.with_suffix(".replaced")
    fsync_folder(partial)
    if final.exists():
        _discard(old)
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    fsync_folder(folder)
    write_tracker(folder, step)
    # The new one is in place. If someone still reads the older one (NFS), a later `remove` or `recover` deletes it.
    with contextlib.suppress(OSError):
        _discard(old)
    return final


def write_tracker(folder: Path, step: int) -> None:
    """Let the tracker name a step. Raises `OSError`."""
    draft = folder / f"{TRACKER}.partial"
    with draft.open("w") as out:
        out.write(str(step))
        out.flush()
        os.fsync(out.fileno())
    draft.rename(folder / TRACKER)
    fsync_folder(folder)


def remove(folder: Path, step: int) -> None:
    """Delete a checkpoint, if it is there. Raises `OSError`; a kill on the way leaves what `recover` deletes."""
    final = step_folder(folder, step)
    # First, or `recover` would give the older one its name back.
    _discard(final.with_suffix(".replaced"))
    _discard(final)


def _discard(path: Path) -> None:
    """Delete a folder, if it is there, under a name that no half of it can come back from."""
    doomed = path.with_suffix(".removed")
    _delete(doomed)
    if path != doomed and os.path.lexists(path):
        path.rename(doomed)
        # No deletion may be on disk before the new name is.
        fsync_folder(path.parent)
        _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def recover(folder: Path) -> list[str]:
    """Undo or finish what a kill interrupted; what was done, one line each. Only for the one who holds the lock."""
    done = []
    for path in leftovers(folder):
        final = path.with_suffix("")
        if path.suffix == ".replaced" and not final.exists():
            path.rename(final)
            done.append(f"gave {final} its name back")
        else:
            _discard(path)
            done.append(f"deleted {path}, which an interrupted run left")
    return done


def prune(folder: Path, keep: Callable[[list[int]], set[int]]) -> list[int]:
    """Delete what `prunable` names; the steps deleted. Raises `OSError`."""
    doomed = prunable(folder, keep)
    for step in doomed:
        remove(folder, step)
    return doomed


def prunable(folder: Path, keep: Callable[[list[int]], set[int]]) -> list[int]:
    """Steps up to the tracker's that `keep` (given them, rising) does not name.

    The tracker's own always stays. Later ones are of a branch that someone left by going back, and not ours to judge.
    """
    latest = latest_step(folder)
    if latest is None:
        return []
    steps = [step for step in saved_steps(folder) if step <= latest]
    return sorted(set(steps) - keep(steps) - {latest})
