"""`megatron-klear checkpoint`: list, show, verify and prune the checkpoints of a run. Needs no torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from megatron_klear.checkpoint.folder import (
    TRACKER,
    existing_step_folder,
    latest_step,
    leftovers,
    prunable,
    recover,
    remove,
    saved_steps,
    step_folder,
)
from megatron_klear.checkpoint.lock import folder_lock
from megatron_klear.checkpoint.manifest import POLICY, Manifest, ModelEntry, find_damage, read_manifest
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.config.check import num_parameters
from megatron_klear.errors import CheckpointError

ACCURACY = "eval/accuracy"
_HEADER = ("step", "saved", "kind", "size", "tp x pp x dp / ranks", "version", ACCURACY, "")
_LEFTOVERS = {
    ".partial": "is being written, or an interrupted run left it",
    ".replaced": "is the older one of its step; a newer one was taking its name",
    ".removed": "was being deleted",
}


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 if `verify` found damage. Raises `CheckpointError`."""
    args = _parser().parse_args(argv)
    action: Callable[[Path, argparse.Namespace], int] = args.action
    try:
        return action(_checkpoints_folder(Path(args.folder)), args)
    except OSError as error:
        raise CheckpointError(f"{error}; expected a folder that this user may read, and write to for prune") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-klear checkpoint", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _action(actions, "list", _list, "one line a checkpoint; damage is looked for by file size only")
    show = _action(actions, "show", _show, "all that is known of a checkpoint")
    _add_step(show)
    show.add_argument("--json", action="store_true", help="print the manifest")
    verify = _action(actions, "verify", _verify, "compare every file with its checksum; exit code 1 if any differs")
    which = verify.add_mutually_exclusive_group()
    _add_step(which)
    which.add_argument("--all", action="store_true", help="all checkpoints of the folder")
    prune = _action(actions, "prune", _prune, "delete checkpoints and what interrupted runs left; not the newest")
    prune.add_argument("--keep-last", type=_positive, required=True, metavar="K", help="so many of the newest stay")
    prune.add_argument("--keep-every", type=_positive, metavar="N", help="multiples of N stay too")
    prune.add_argument("--keep-best", type=_positive, metavar="B", help="so many with the best metric stay too")
    prune.add_argument("--metric", help=f"what --keep-best goes by (default: {ACCURACY})")
    prune.add_argument("--mode", choices=("max", "min"), help="which is best (default: max)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    return parser


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[Path, argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="the parent of iter_*, or the output_dir of a run")
    parser.set_defaults(action=run)
    return parser


def _add_step(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--step", type=_step, metavar="N", help=f"which checkpoint; the one {TRACKER} names if not given"
    )


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected the number of a step, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _checkpoints_folder(folder: Path) -> Path:
    """The parent of iter_*: the folder itself, or checkpoints/ in it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; expected the parent of iter_*, or the output_dir of a run")
    if re.fullmatch(r"iter_\d+(\.\w+)?", folder.resolve().name):
        raise CheckpointError(
            f"{folder} is one checkpoint; expected its parent, {folder.resolve().parent} (and --step to choose it)"
        )
    for candidate in (folder, folder / "checkpoints"):
        if (candidate / TRACKER).exists() or saved_steps(candidate) or leftovers(candidate):
            return candidate
    raise CheckpointError(
        f"{folder} holds neither {TRACKER} nor iter_* (nor does checkpoints/ in it);"
        " expected the folder that a run saved into"
    )


def _list(folder: Path, args: argparse.Namespace) -> int:
    latest, notes = _tracker(folder)
    rows: list[tuple[str, ...]] = [_HEADER]
    for step in saved_steps(folder):
        path = step_folder(folder, step)
        mark = "latest" if step == latest else ""
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            rows.append((str(step), "-", "-", _size(_bytes_of(path)), "-", "-", "-", f"{mark} DAMAGED".strip()))
            notes.append(str(error))
            continue
        rows.append(_row(path, manifest, mark))
    print(_table(rows) if len(rows) > 1 else "no checkpoints")
    notes += [f"{path.name} {_LEFTOVERS[path.suffix]} ({_size(_bytes_of(path))})" for path in leftovers(folder)]
    for note in notes:
        print(note)
    return 0


def _tracker(folder: Path) -> tuple[int | None, list[str]]:
    """Step that the tracker names, and what is wrong with that."""
    try:
        latest = latest_step(folder)
    except CheckpointError as error:
        return None, [str(error)]
    if latest is None:
        return None, [f"{TRACKER} is missing: no run would find these checkpoints"]
    if not step_folder(folder, latest).is_dir():
        return latest, [f"{TRACKER} names step {latest}, which is not here"]
    return latest, []


def _row(path: Path, manifest: Manifest, mark: str) -> tuple[str, ...]:
    faults = find_damage(path, manifest, by_size=True)
    accuracy = manifest.metrics.get(ACCURACY)
    damage = f"DAMAGED: {'; '.join(faults)}" if faults else ""
    return (
        str(manifest.step),
        _local_time(manifest.saved_at),
        manifest.kind,
        _size(manifest.num_bytes),
        _layout(manifest),
        str(manifest.models[POLICY].version),
        "-" if accuracy is None else f"{accuracy:.4g}",
        f"{mark} {damage}".strip(),
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _layout(manifest: Manifest) -> str:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    sizes = " x ".join(str(manifest.parallel.get(name, "?")) for name in names)
    return f"{sizes} / {manifest.world_size}"


def _local_time(saved_at: str) -> str:
    return datetime.fromisoformat(saved_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _size(num_bytes: int) -> str:
    """Like 34.5 MB; powers of 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _chosen(folder: Path, step: int | None) -> Path:
    if step is None and latest_step(folder) is None:
        raise CheckpointError(
            f"{folder} holds no {TRACKER} that would say which one is meant; choose it with --step:"
            f" {', '.join(map(str, saved_steps(folder))) or 'there is none'}"
        )
    return existing_step_folder(folder, step)


def _show(folder: Path, args: argparse.Namespace) -> int:
    path = _chosen(folder, args.step)
    manifest = read_manifest(path)
    print(manifest.model_dump_json(indent=2) if args.json else _description(path, manifest))
    return 0


def _description(path: Path, manifest: Manifest) -> str:
    recipe = path / "recipe.yaml"
    topics = [
        ("checkpoint", str(path)),
        ("step", f"{manifest.step}, saved {_local_time(manifest.saved_at)} by a run of kind {manifest.kind}"),
        *((name, _model(entry, manifest.params_dtype)) for name, entry in manifest.models.items()),
        ("layout", f"{_layout(manifest)} (tensor x pipeline x data / ranks)"),
        ("tokenizer", manifest.tokenizer or "-"),
        ("recipe", str(recipe) if recipe.name in manifest.files else "-"),
        ("packages", ", ".join(f"{name} {version}" for name, version in manifest.packages.items())),
        *((name, f"{value:.6g}") for name, value in manifest.metrics.items()),
        ("files", f"{len(manifest.files)}, {_size(manifest.num_bytes)}"),
    ]
    width = max(len(topic) for topic, _ in topics)
    lines = [f"{topic:<{width}}  {text}" for topic, text in topics]
    return "\n".join(lines + [f"  {_size(entry.bytes):>8}  {name}" for name, entry in sorted(manifest.files.items())])


def _model(entry: ModelEntry, dtype: str) -> str:
    shape = entry.shape
    optimizer = "weights only" if entry.optimizer is None else f"with {entry.optimizer} optimizer"
    return (
        f"{shape.model_type}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, vocabulary"
        f" {shape.vocab_size}, {num_parameters(shape):,} parameters in {dtype}, version {entry.version}, {optimizer}"
    )


def _verify(folder: Path, args: argparse.Namespace) -> int:
    steps = saved_steps(folder) if args.all else []
    paths = [step_folder(folder, step) for step in steps] or [_chosen(folder, args.step)]
    read = {path: _manifest_or_fault(path) for path in paths}
    total = sum(found.num_bytes for found in read.values() if isinstance(found, Manifest))
    any_damage = False
    # disable=None: no bar where stderr is not a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, disable=None, leave=False) as bar:
        for path, found in read.items():
            faults = _faults(path, found, bar.update) if isinstance(found, Manifest) else [found]
            any_damage |= bool(faults)
            tqdm.write(_verdict(path, found, faults), file=sys.stdout)
    return int(any_damage)


def _manifest_or_fault(path: Path) -> Manifest | str:
    try:
        return read_manifest(path)
    except CheckpointError as error:
        return str(error)


def _faults(path: Path, manifest: Manifest, advance: Callable[[int], object]) -> list[str]:
    faults: list[str] = []
    for name, entry in sorted(manifest.files.items()):
        faults += find_damage(path, manifest, [name])
        advance(entry.bytes)
    return faults


def _verdict(path: Path, found: Manifest | str, faults: Sequence[str]) -> str:
    if isinstance(found, Manifest) and not faults:
        return f"OK {path.name} {len(found.files)} files, {_size(found.num_bytes)}"
    return f"DAMAGED {path.name}: {'; '.join(faults)}"


def _prune(folder: Path, args: argparse.Namespace) -> int:
    if args.keep_best is None and (args.metric or args.mode):
        raise CheckpointError("--metric and --mode have no effect without --keep-best; add it, or leave them out")
    rule = Retention(args.keep_last, args.keep_every, args.keep_best, args.metric or ACCURACY, args.mode or "max")
    if latest_step(folder) is None:
        raise CheckpointError(
            f"{folder} holds no {TRACKER}, so which checkpoint must stay is not known; write its step into that file"
        )
    if args.dry_run:
        _say_what_prune_would_do(folder, rule)
        return 0
    with folder_lock(folder):
        before = _bytes_of(folder)
        for line in recover(folder):
            print(line)
        for step in _doomed(folder, rule):
            size = _size(_bytes_of(step_folder(folder, step)))
            remove(folder, step)
            print(f"deleted {step_folder(folder, step).name} ({size})")
        print(f"freed {_size(before - _bytes_of(folder))}; {len(saved_steps(folder))} checkpoints stay")
    return 0


def _say_what_prune_would_do(folder: Path, rule: Retention) -> None:
    doomed = [step_folder(folder, step) for step in _doomed(folder, rule)]
    back = [path for path in leftovers(folder) if path.suffix == ".replaced" and not path.with_suffix("").exists()]
    doomed += [path for path in leftovers(folder) if path not in back]
    for path in back:
        print(f"would give {path.name} its name back, and then judge it")
    for path in doomed:
        print(f"would delete {path.name} ({_size(_bytes_of(path))})")
    print(f"would free {_size(sum(map(_bytes_of, doomed)))}")


def _doomed(folder: Path, rule: Retention) -> list[int]:
    return prunable(folder, lambda steps: rule.kept(folder, steps))
