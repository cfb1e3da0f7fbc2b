"""Reads a recipe: YAML and overrides in, a frozen recipe or ONE error with every fault out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from megatron_klear.config.names import NOT_GIVEN, RECIPES, Kind, missing_path_hint, nearest
from megatron_klear.config.overrides import apply_overrides, parse_overrides
from megatron_klear.config.recipe import Recipe, RlRecipe, SftRecipe
from megatron_klear.config.rules import check_sections
from megatron_klear.config.sections import Built, build_sections
from megatron_klear.config.unused import unused_keys
from megatron_klear.config.yaml_text import Document, YamlError, dump, parse_document
from megatron_klear.errors import ConfigError, Fault

# The top-level key that only a recipe of this kind has.
_MARKS: Mapping[Kind, str] = {"sft": "train_iters", "rl": "rollout"}


def _error(path: Path, faults: Sequence[Fault]) -> ConfigError:
    ordered = sorted(faults, key=lambda fault: fault.key)
    count = f"{len(ordered)} fault{'s' if len(ordered) > 1 else ''}"
    return ConfigError("\n  ".join([f"{path}: {count}", *map(str, ordered)]), ordered)


def _read(path: Path) -> Document:
    if path.is_dir():
        raise _error(path, [Fault("recipe", str(path), "is a folder; expected a YAML file")])
    if not path.exists():
        raise _error(path, [Fault("recipe", str(path), "no such file", missing_path_hint(path))])
    try:
        return parse_document(path.read_text(encoding="utf-8"))
    except YamlError as error:
        raise _error(path, [Fault("recipe", str(path), str(error))]) from error
    except UnicodeDecodeError as error:
        raise _error(path, [Fault("recipe", str(path), f"is not UTF-8 text: {error}")]) from error


def infer_kind(raw: Mapping[str, Any]) -> Kind | Fault:
    """Which kind of recipe nested data is by its top-level keys, or why that cannot be told."""
    found: list[Kind] = [kind for kind, mark in _MARKS.items() if mark in raw]
    if len(found) == 1:
        return found[0]
    has = "both" if found else "neither"
    reason = f"a recipe with `rollout` is rl, one with `train_iters` is sft; this one has {has}"
    close = [f"{name} for {mark}" for mark in _MARKS.values() if (name := nearest(mark, raw))]
    hint = "leave one out" if found else f"did you write {' or '.join(close)}?" if close else ""
    return Fault("train_iters", raw.get("train_iters", NOT_GIVEN), reason, hint)


def _settle_kind(raw: Mapping[str, Any], wanted: Kind | None) -> Kind | Fault:
    inferred = infer_kind(raw)
    if wanted is None:
        return inferred
    if isinstance(inferred, Fault) or inferred == wanted:
        return wanted
    reason = f"needed for {wanted}; with `{_MARKS[inferred]}` this is a recipe for {inferred}"
    return Fault(_MARKS[wanted], NOT_GIVEN, reason, f"run it with `megatron-klear {inferred}`")


def _build(raw: Mapping[str, Any], kind: Kind, world_size: int | None) -> Built:
    built = build_sections(raw, kind)
    crossed = check_sections(built.sections, kind=kind, world_size=world_size)
    return Built(built.sections, built.faults + crossed)


def _faults_of_any_kind(raw: Mapping[str, Any], world_size: int | None) -> list[Fault]:
    """What is wrong whatever the kind turns out to be."""
    sft, rl = (_build(raw, kind, world_size).faults for kind in RECIPES)
    return [fault for fault in sft if fault in rl]


@overload
def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, kind: Literal["sft"], world_size: int | None = None
) -> SftRecipe: ...
@overload
def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, kind: Literal["rl"], world_size: int | None = None
) -> RlRecipe: ...
@overload
def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, kind: None = None, world_size: int | None = None
) -> Recipe: ...
def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, kind: Kind | None = None, world_size: int | None = None
) -> Recipe:
    """Read a recipe and everything it refers to. Raises ONE `ConfigError` that lists every fault, one a line, by key.

    `overrides` are the words of a command line after the recipe: `optimizer.lr=1e-6`, `--tensor-model-parallel-size 2`.
    Without `kind` it is inferred. With `world_size` (ranks in all) the layout is checked against it too.
    """
    path = Path(path)
    document = _read(path)
    parsed = parse_overrides(overrides)
    raw = document.data
    faults = [*document.duplicates, *parsed.faults, *apply_overrides(raw, parsed)]
    settled = _settle_kind(raw, kind)
    if isinstance(settled, Fault):
        raise _error(path, [*faults, settled, *_faults_of_any_kind(raw, world_size)])
    built = _build(raw, settled, world_size)
    if faults or built.faults:
        raise _error(path, faults + built.faults)
    return RECIPES[settled](**built.sections)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe, defaults included, as YAML that loads back to an equal recipe."""
    data = recipe.model_dump(mode="json")
    # Written out, a default without effect would be refused on the way back as a setting without effect.
    for key in unused_keys(dict(recipe)):
        section, name = key.split(".")
        if name not in dict(recipe)[section].model_fields_set:
            del data[section][name]
    return dump(data)


def world_size_from_env() -> int | None:
    """The number of ranks torchrun started (WORLD_SIZE), or None outside of torchrun."""
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE = {text!r}: expected a positive integer; start with torchrun, or unset it")
    return int(text)
