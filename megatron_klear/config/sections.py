"""Builds the sections of a recipe one by one, so that a fault in one does not hide the faults in the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_klear.config.names import (
    NOT_GIVEN,
    RECIPES,
    Kind,
    did_you_mean,
    is_optional,
    section_models,
    unknown_key_hint,
    variant_tag,
)
from megatron_klear.errors import Fault

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_NOT_A_SECTION = ("model_type", "model_attributes_type")
_HINTS = {
    "string_type": "put it in quotes, with quotes inside quotes on a command line",
    "bool_type": "write true or false",
    "int_type": "write digits, without quotes",
    "float_type": "write a number, without quotes",
}


@dataclass(frozen=True, slots=True)
class Built:
    """The sections that validated, by name, and the faults of the others."""

    sections: dict[str, Any]
    faults: list[Fault]


def _hint(error: ErrorDetails) -> str:
    value = error["input"]
    if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if error["type"] == "literal_error":
        return did_you_mean(value, re.findall(r"'([^']*)'", error.get("ctx", {})["expected"]))
    return "" if value is None else _HINTS.get(error["type"], "")


def _setting(annotation: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of an error's location that names the setting, without the choices of unions."""
    models = section_models(annotation)
    # In a union of sections the location starts with the chosen one.
    path = location[1:] if len(models) > 1 else location
    for depth, name in enumerate(path, start=1):
        fields = [model.model_fields[str(name)] for model in models if name in model.model_fields]
        models = tuple(model for field in fields for model in section_models(field.annotation))
        # Below a plain setting stands which of its choices was tried.
        if fields and not models:
            return path[:depth]
    return path


def _fault(key: str, errors: Sequence[ErrorDetails], field: FieldInfo, kind: Kind) -> Fault:
    """A setting with a choice of types, such as true, false or auto, has an error for each."""
    error = errors[0]
    if error["type"] == "missing":
        return Fault(key, NOT_GIVEN, "needed, it has no default")
    if error["type"] == "extra_forbidden":
        return Fault(key, error["input"], "no such key", unknown_key_hint(key, kind))
    is_union = error["type"].startswith("union_tag")
    if error["type"] in _NOT_A_SECTION or (is_union and not isinstance(error["input"], dict)):
        return Fault(key, error["input"], "expected a section: lines `key: value` below it")
    if is_union:
        tags = [variant_tag(model) for model in section_models(field.annotation)]
        given = error["input"].get("type", NOT_GIVEN)
        return Fault(f"{key}.type", given, f"expected one of {', '.join(tags)}", did_you_mean(given, tags))
    message = error["msg"][0].lower() + error["msg"][1:]
    expected = [
        message.removeprefix("input "),
        *(other["msg"].removeprefix("Input should be ") for other in errors[1:]),
    ]
    # The later choices are words: a similar one says more than how to write the first.
    hint = next(filter(None, map(_hint, reversed(errors))), "")
    return Fault(key, error["input"], " or ".join(expected), hint)


def _validate(name: str, value: Any, kind: Kind) -> tuple[Any, list[Fault]]:
    field = RECIPES[kind].model_fields[name]
    # A type made at run time, which a type checker cannot follow.
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # pyright: ignore
    try:
        # Strict: `true` is not 1 and "32" is not 32.
        return adapter.validate_python(value, strict=True), []
    except ValidationError as error:
        errors: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            path = _setting(field.annotation, detail["loc"])
            errors.setdefault(".".join([name, *map(str, path)]), []).append(detail)
        return None, [_fault(key, details, field, kind) for key, details in errors.items()]


def _values(raw: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, Any]]:
    """Every field of the recipe with what is to be validated for it; an absent section is an empty one."""
    for name, field in RECIPES[kind].model_fields.items():
        value = raw.get(name)
        if value is None and section_models(field.annotation) and not is_optional(field.annotation):
            value = {}
        yield name, value


def build_sections(raw: Mapping[str, Any], kind: Kind) -> Built:
    """Validate each section of nested data on its own."""
    names = RECIPES[kind].model_fields
    built = Built({}, [Fault(k, v, "no such key", unknown_key_hint(k, kind)) for k, v in raw.items() if k not in names])
    for name, value in _values(raw, kind):
        if value is None and name not in raw and names[name].is_required():
            built.faults.append(Fault(name, NOT_GIVEN, "needed, it has no default"))
            continue
        config, faults = _validate(name, value, kind)
        built.faults.extend(faults)
        if not faults:
            built.sections[name] = config
    return built
