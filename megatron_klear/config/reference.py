"""Writes the reference of all settings: `python -m megatron_klear.config.reference > docs/config.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_klear.config.base import Config
from megatron_klear.config.names import RECIPES, section_models, sections_of, variant_tag

_HEAD = """\
# Recipe reference

<!-- Generated. To refresh: python -m megatron_klear.config.reference > docs/config.md -->

A recipe is a YAML file. One with `rollout` is for `megatron-klear rl`, one with `train_iters` for `megatron-klear sft`.
`megatron-klear check RECIPE` lists everything that is wrong with one; it needs neither torch nor a GPU.

After the recipe, a command line may override settings, each at most once:

- `section.key=value`, for example `optimizer.lr=1e-6`;
- `--flag value` or `--flag=value`, where the key's name is unique: `--tensor-model-parallel-size 2`
  (`critic` aside: `--lr` is `optimizer.lr`).
  A flag that is true or false stands alone: `--sequence-parallel`; to unset one, `--use-distributed-optimizer=false`;
  to give it another value, `--resume=auto`.

Numbers are written as in YAML 1.2 (`1e-6` is a number), `null` unsets, and text that looks like a number needs quotes.
An unknown key, a key given twice, and a setting that would have no effect are errors.
"""
_TYPE_NAMES = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number", "null": "null"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def _type(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(map(_type, node["anyOf"]))
    if "$ref" in node:
        return "section"
    if "const" in node or "enum" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    bounds = [f"{sign} {node[name]}" for name, sign in _BOUNDS.items() if name in node]
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    return " ".join([_TYPE_NAMES[node["type"]], ", ".join(bounds)]).strip()


def _row(name: str, node: dict[str, Any], is_required: bool) -> str:
    default = "needed" if is_required else f"`{json.dumps(node['default'])}`"
    # Markdown would take <think> for an HTML tag and not show it.
    meaning = node.get("description", "").replace("<", "\\<")
    cells = [f"`{name}`", _type(node), default, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _table(schema: dict[str, Any], names: list[str]) -> Iterator[str]:
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    required = schema.get("required", [])
    yield from (_row(name, schema["properties"][name], name in required) for name in names)


def _places() -> dict[tuple[str, type[Config]], list[str]]:
    """Every section with a class it may hold, and the kinds of recipe that have it, in the order of the recipes."""
    places: dict[tuple[str, type[Config]], list[str]] = {}
    for kind in RECIPES:
        for name, models in sections_of(kind).items():
            for model in models:
                places.setdefault((name, model), []).append(kind)
    return places


def _sections() -> Iterator[str]:
    places = _places()
    for (name, model), kinds in places.items():
        schema = model.model_json_schema()
        is_variant = sum(1 for section, other in places if section == name and places[section, other] == kinds) > 1
        variant = f" with `type: {variant_tag(model)}`" if is_variant else ""
        yield from ("", f"## `{name}`{variant} ({', '.join(kinds)})", "", schema["description"], "")
        yield from _table(schema, sorted(schema["properties"], key=lambda field: field != "type"))


def _top_level() -> Iterator[str]:
    for kind, recipe in RECIPES.items():
        schema = recipe.model_json_schema()
        plain = [name for name, field in recipe.model_fields.items() if not section_models(field.annotation)]
        if plain:
            yield from ("", f"## Outside of any section ({kind})", "")
            yield from _table(schema, plain)


def render() -> str:
    """All settings of all recipes as Markdown."""
    return _HEAD + "\n".join([*_top_level(), *_sections()]) + "\n"


if __name__ == "__main__":
    print(render(), end="")
