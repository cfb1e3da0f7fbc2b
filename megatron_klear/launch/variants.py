"""The same recipe with other settings, as far as the rules of recipes allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_klear.config.load import infer_kind, load_recipe
from megatron_klear.config.names import RECIPES
from megatron_klear.config.overrides import apply_overrides, parse_overrides
from megatron_klear.config.recipe import Recipe
from megatron_klear.config.rules import check_recipe
from megatron_klear.config.sections import build_sections
from megatron_klear.config.yaml_text import parse_document
from megatron_klear.errors import ConfigError, Fault

Changes = Mapping[str, Any]
"""New values by dotted key; None takes the default."""

_FILES = ("data.prompt_data", "data.path", "eval.prompt_data", "model.load", "kl.ref_load")


def load_for_planning(path: str, overrides: Sequence[str], num_gpus: int) -> Recipe:
    """As `load_recipe`, but the data and the weights need not be here yet; the model's config.json must."""
    try:
        return load_recipe(path, overrides, world_size=num_gpus)
    except ConfigError as error:
        if not error.faults or not all(map(_is_absent_file, error.faults)):
            raise
    # All else is right: the same words give a whole recipe.
    raw = parse_document(Path(path).read_text(encoding="utf-8")).data
    apply_overrides(raw, parse_overrides(overrides))
    kind = infer_kind(raw)
    assert not isinstance(kind, Fault)
    return RECIPES[kind](**build_sections(raw, kind).sections)


def _is_absent_file(fault: Fault) -> bool:
    if fault.key == "model.hf_checkpoint":
        return "no *.safetensors" in fault.reason
    return fault.key in _FILES and fault.reason.startswith("no such")


def changed(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with these settings; settings that were not given stay not given."""
    sections = dict(recipe)
    for section in {key.partition(".")[0] for key in changes}:
        new = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith(f"{section}.")}
        given = sections[section].model_dump(exclude_unset=True) | new
        sections[section] = type(sections[section])(**{name: v for name, v in given.items() if v is not None})
    return type(recipe)(**sections)


def difference(recipe: Recipe, other: Recipe, keys: Iterable[str]) -> dict[str, Any]:
    """Which of these dotted keys differ, with the value of `other`."""
    ours, theirs = _values(recipe, keys), _values(other, keys)
    return {key: value for key, value in theirs.items() if value != ours[key]}


def _values(recipe: Recipe, keys: Iterable[str]) -> dict[str, Any]:
    sections = dict(recipe)
    return {key: dict(sections[key.partition(".")[0]])[key.partition(".")[2]] for key in keys}


def is_allowed(recipe: Recipe, num_gpus: int) -> bool:
    """Whether the rules of recipes let it run on so many GPUs."""
    return all(map(_is_absent_file, check_recipe(recipe, world_size=num_gpus)))
