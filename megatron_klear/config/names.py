"""The valid names of a recipe, and the nearest one to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_klear.config.base import Config
from megatron_klear.config.recipe import RlRecipe, SftRecipe

Kind = Literal["sft", "rl"]
RECIPES: Mapping[Kind, type[SftRecipe] | type[RlRecipe]] = {"sft": SftRecipe, "rl": RlRecipe}


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()
"""The value of a `Fault` about something that is absent."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: its dotted `key`, and the values of `<section>.type` it exists under (empty: it always exists)."""

    key: str
    is_boolean: bool
    variants: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The part before the dot; empty for a setting of the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The part after the dot."""
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        """The key, with its condition where it has one."""
        condition = f" (only with {self.section}.type {' or '.join(self.variants)})" if self.variants else ""
        return self.key + condition


def section_models(annotation: Any) -> tuple[type[Config], ...]:
    """The config classes a field may hold: none for a plain setting, several for a union such as `loss`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in section_models(part))


def variant_tag(model: type[Config]) -> str:
    """The `type` that chooses this class in a union."""
    return get_args(model.model_fields["type"].annotation)[0]


def _section_leaves(section: str, models: tuple[type[Config], ...]) -> Iterable[Leaf]:
    names = {name: field.annotation is bool for model in models for name, field in model.model_fields.items()}
    for name, is_boolean in names.items():
        holders = [model for model in models if name in model.model_fields]
        variants = () if len(holders) == len(models) else tuple(variant_tag(model) for model in holders)
        yield Leaf(f"{section}.{name}", is_boolean, variants)


def leaves_of(kind: Kind) -> dict[str, Leaf]:
    """Every setting of a recipe of this kind, by dotted key."""
    leaves: dict[str, Leaf] = {}
    for name, field in RECIPES[kind].model_fields.items():
        models = section_models(field.annotation)
        found = _section_leaves(name, models) if models else [Leaf(name, field.annotation is bool)]
        leaves.update((leaf.key, leaf) for leaf in found)
    return leaves


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names`, or None where nothing is similar."""
    return next(iter(get_close_matches(name, sorted(set(names)), n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """A hint naming the most similar of `names`, or empty."""
    close = nearest(str(name), names)
    return f"did you mean {close}?" if close else ""


def unknown_key_hint(key: str, kind: Kind) -> str:
    """What was meant by the unknown dotted `key`: its place in another section, a similar name, or all valid names."""
    leaves = leaves_of(kind)
    spelled = key.replace("-", "_")
    section, _, name = spelled.rpartition(".")
    same_name = [leaves[spelled]] if spelled in leaves else [leaf for leaf in leaves.values() if leaf.name == name]
    if same_name:
        if same_name[0].key == key:
            return str(same_name[0])
        return f"did you mean {' or '.join(map(str, same_name))}?"
    level = {leaf.name: str(leaf) for leaf in leaves.values() if leaf.section == section}
    if not section:
        level.update((leaf.section, leaf.section) for leaf in leaves.values() if leaf.section)
    close = nearest(name, level)
    if close:
        return f"did you mean {level[close]}?"
    # A misspelt name of another section must be very similar: any two short names look a little alike.
    far = nearest(name, (leaf.name for leaf in leaves.values()), cutoff=0.8)
    if far:
        return f"did you mean {' or '.join(str(leaf) for leaf in leaves.values() if leaf.name == far)}?"
    return f"valid here: {', '.join(level)}"


def missing_path_hint(path: Path) -> str:
    """What exists near a missing file or folder: the most similar name beside it, or the folder that is missing too."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist either"
    close = nearest(path.name, (entry.name for entry in path.parent.iterdir() if entry.name != path.name), cutoff=0.5)
    return f"did you mean {path.parent / close}?" if close else f"{path.parent} holds nothing of a similar name"
