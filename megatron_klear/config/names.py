"""The valid names of a recipe, and the nearest one to a wrong one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_klear.config.base import Config
from megatron_klear.config.recipe import RlRecipe, SftRecipe

Kind = Literal["sft", "rl"]
RECIPES: Mapping[Kind, type[SftRecipe] | type[RlRecipe]] = {"sft": SftRecipe, "rl": RlRecipe}

USER_FUNCTION = "package.module:function"
"""How a function of the user's own is named."""
_USER_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = _NotGiven()
"""The value of a `Fault` about something that is absent."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: its dotted `key`, and the `condition` it exists under (empty: it always exists).

    `in_optional` says that the section it stands in may be absent.
    """

    key: str
    is_boolean: bool
    condition: str = ""
    in_optional: bool = False

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
        return f"{self.key} ({self.condition})" if self.condition else self.key


def section_models(annotation: Any) -> tuple[type[Config], ...]:
    """The config classes a field may hold: none for a plain setting, several for a union such as `loss`."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in section_models(part))


def variant_tag(model: type[Config]) -> str:
    """The `type` that chooses this class in a union; a class that takes any text is for a function of the user's."""
    literals = get_args(model.model_fields["type"].annotation)
    return literals[0] if literals else USER_FUNCTION


def is_user_function(text: str) -> bool:
    """Whether it has the form of `USER_FUNCTION`. Whether it exists is known only where it is imported."""
    return _USER_FUNCTION.fullmatch(text) is not None


def is_optional(annotation: Any) -> bool:
    """Whether a field may be null."""
    return type(None) in get_args(annotation)


def _is_boolean(annotation: Any) -> bool:
    """Whether `true` is a value of a field, alone or beside others."""
    return bool in (annotation, *get_args(annotation))


def _sections_below(name: str, annotation: Any) -> Iterator[tuple[str, tuple[type[Config], ...]]]:
    models = section_models(annotation)
    if models:
        yield name, models
    for model in models:
        for inner, field in model.model_fields.items():
            yield from _sections_below(f"{name}.{inner}", field.annotation)


def sections_of(kind: Kind) -> dict[str, tuple[type[Config], ...]]:
    """Every section of a recipe of this kind by dotted name, with the classes it may hold."""
    fields = RECIPES[kind].model_fields.items()
    return {name: models for key, field in fields for name, models in _sections_below(key, field.annotation)}


def _condition(section: str, name: str, models: tuple[type[Config], ...]) -> str:
    without = [model for model in models if name not in model.model_fields]
    if not without:
        return ""
    # All but one is a long list.
    if len(without) == 1:
        return f"not with {section}.type {variant_tag(without[0])}"
    tags = [variant_tag(model) for model in models if model not in without]
    return f"only with {section}.type {' or '.join(tags)}"


def _section_leaves(section: str, models: tuple[type[Config], ...], *, in_optional: bool) -> Iterator[Leaf]:
    names = {name: _is_boolean(field.annotation) for model in models for name, field in model.model_fields.items()}
    for name, is_boolean in names.items():
        yield Leaf(f"{section}.{name}", is_boolean, _condition(section, name, models), in_optional)


def leaves_of(kind: Kind) -> dict[str, Leaf]:
    """Every setting of a recipe of this kind, by dotted key. A section inside a section counts as a setting too."""
    fields = RECIPES[kind].model_fields
    leaves = [
        Leaf(name, _is_boolean(field.annotation))
        for name, field in fields.items()
        if not section_models(field.annotation)
    ]
    for section, models in sections_of(kind).items():
        in_optional = section in fields and is_optional(fields[section].annotation)
        leaves.extend(_section_leaves(section, models, in_optional=in_optional))
    return {leaf.key: leaf for leaf in leaves}


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `names`, or None where nothing is similar."""

    # Of equally similar names, the one that starts alike: `gpo` is gppo rather than grpo.
    def similarity(other: str) -> tuple[float, int]:
        common_start = sum(other.startswith(name[:end]) for end in range(1, len(name) + 1))
        return SequenceMatcher(None, other, name).ratio(), common_start

    best = max(sorted(set(names)), key=similarity, default=None)
    return best if best is not None and similarity(best)[0] >= cutoff else None


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
        level.update((top, top) for leaf in leaves.values() if (top := leaf.section.partition(".")[0]))
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
