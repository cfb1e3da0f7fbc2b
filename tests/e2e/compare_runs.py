"""Whether two runs left the same behind, whatever happened to one of them on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from helpers.checkpoints import tensors_of
from megatron_klear.checkpoint.folder import latest_step, saved_steps, step_folder
from megatron_klear.checkpoint.manifest import find_damage, read_manifest
from megatron_klear.errors import CheckpointError
from megatron_klear.report.record import read_metrics


def whole_or_not(checkpoints: Path) -> list[str]:
    """Whatever has a checkpoint's name must be a whole one, and the tracker names one of them, if anything."""
    faults, steps = [], saved_steps(checkpoints)
    for step in steps:
        folder = step_folder(checkpoints, step)
        try:
            faults += [f"{folder.name}: {fault}" for fault in find_damage(folder, read_manifest(folder))]
        except CheckpointError as error:
            faults.append(f"{folder.name}: {error}")
    try:
        named = latest_step(checkpoints)
    except CheckpointError as error:
        return [*faults, str(error)]
    if named is not None and named not in steps:
        faults.append(f"the tracker names {named}, there is {steps}")
    return faults


def differences(folder: Path, steps: int) -> Iterator[str]:
    """What the killed run left and the unbroken one did not, or the other way round."""
    whole, killed = folder / "whole", folder / "killed"
    wanted, found = (_metrics(run) for run in (whole, killed))
    logged = Counter(line["step"] for line in found if "train/num_updates" in line)
    if logged != Counter(range(1, steps + 1)):
        yield f"metrics.jsonl: steps {_odd(logged, steps)}"
    if found != wanted:
        first = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), "the end")
        yield f"metrics.jsonl: {len(found)} lines, {len(wanted)} wanted; they differ from line {first} on"
    if (whole / "samples.jsonl").read_bytes() != (killed / "samples.jsonl").read_bytes():
        yield "samples.jsonl differs"
    curve = Counter(_curve(killed / "tensorboard"))
    if curve != Counter(range(1, steps + 1)):
        yield f"TensorBoard shows steps {_odd(curve, steps)}"
    yield from _file_differences(whole / "hf", killed / "hf", folder)
    last = f"checkpoints/iter_{steps:07d}"
    yield from _checkpoint_differences(whole / last, killed / last, folder)
    kept, there = (set(saved_steps(run / "checkpoints")) for run in (whole, killed))
    if kept != there:
        yield f"the checkpoints are those of {sorted(there)}, {sorted(kept)} wanted"


def _odd(counts: Counter[int], steps: int) -> str:
    missing = [step for step in range(1, steps + 1) if not counts[step]]
    return f"missing {missing}, more than once {[step for step, count in counts.items() if count > 1]}"


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "time" and not key.startswith("perf/")}
        for line in read_metrics(run)
    ]


def _curve(folder: Path) -> list[int]:
    """Steps that TensorBoard would show of a metric that every step has, purges respected."""
    files = [list(EventFileLoader(str(path)).Load()) for path in folder.iterdir()]
    steps: list[int] = []
    for events in sorted(filter(None, files), key=lambda events: events[0].wall_time):
        for event in events:
            if event.HasField("session_log"):
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == "train/num_updates"]
    return steps


def _file_differences(wanted: Path, found: Path, folder: Path) -> Iterator[str]:
    names = sorted(str(path.relative_to(wanted)) for path in wanted.rglob("*") if path.is_file())
    there = sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())
    if names != there:
        yield f"{found.relative_to(folder)} holds {there}, {names} wanted"
        return
    for name in names:
        if (wanted / name).read_bytes() != (found / name).read_bytes():
            yield f"{found.relative_to(folder)}/{name} differs"


def _checkpoint_differences(wanted: Path, found: Path, folder: Path) -> Iterator[str]:
    for companion in ("", "critic", "reference"):
        one, other = (tensors_of(path / companion) for path in (wanted, found))
        if len(one) < 10 or one.keys() != other.keys():
            yield f"tensors of {companion or 'policy'}: {sorted(one.keys() ^ other.keys())} only in one of two"
        shared = sorted(one.keys() & other.keys())
        if changed := [name for name in shared if not torch.equal(one[name], other[name])]:
            yield f"{companion or 'policy'}: {len(changed)} of {len(shared)} tensors differ, first {changed[0]}"
    if json.loads((wanted / "state.json").read_text()) != json.loads((found / "state.json").read_text()):
        yield "state.json differs"
    for path in sorted(wanted.glob("rng_*.pt")):
        one, other = (repr(torch.load(file, weights_only=True)) for file in (path, found / path.name))
        if one != other:
            yield f"{path.name} differs"
    one, other = read_manifest(wanted), read_manifest(found)
    if (one.models, one.step, one.tokenizer) != (other.models, other.step, other.tokenizer):
        yield "manifest.json differs"
