"""Recipes as YAML text: nothing is guessed, nothing is dropped in silence.

Scalars follow YAML 1.2: `1e-6` is a number (1.1, PyYAML's own rules, makes it text), while `no`, `010`, `1:30` and
dates are text (1.1 makes them false, 8, 90 and a date). A key given twice is a fault (PyYAML keeps the last one).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from megatron_klear.errors import Fault

_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


# Quotes what PyYAML's rules OR ours would take for something other than text: other tools may read the file too.
class _Dumper(yaml.SafeDumper):
    pass


# The first pattern that fits wins, so int stands before float.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class YamlError(ValueError):
    """Text that is not the YAML expected here; the message says where and why, in one line."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a file holds: nested `data`, and a fault for every key given twice."""

    data: dict[str, Any]
    duplicates: tuple[Fault, ...]


def _duplicates(node: yaml.Node | None, prefix: str = "", seen: frozenset[int] = frozenset()) -> Iterator[Fault]:
    # `seen`: an alias inside its own anchor makes a tree without end.
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in first_line:
            value = value_node.value if isinstance(value_node, yaml.ScalarNode) else "{...}"
            reason = f"given twice, on lines {first_line[name]} and {line}"
            yield Fault(prefix + name, value, reason, "keep one of them")
        first_line.setdefault(name, line)
        yield from _duplicates(value_node, f"{prefix}{name}.", seen | {id(node)})


def _problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _construct(text: str) -> tuple[yaml.Node | None, Any]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return node, loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an explicit tag such as `!!int x`
        raise YamlError(_problem(error)) from error


def parse_document(text: str) -> Document:
    """Read a whole file. Raises `YamlError` where it is broken or is not a mapping."""
    node, data = _construct(text)
    if not isinstance(data, dict):
        held = "nothing" if data is None else f"a {type(data).__name__}"
        raise YamlError(f"holds {held}; expected a mapping (lines such as `optimizer:` and `  lr: 1e-6`)")
    return Document({str(key): value for key, value in data.items()}, tuple(_duplicates(node)))


def parse_scalar(text: str) -> object:
    """Read the value of an override. Raises `YamlError` unless all of `text` is one scalar."""
    node, value = _construct(text)
    if not isinstance(node, yaml.ScalarNode):
        raise YamlError("expected one value" if node else "no value given; write null for none, '' for empty text")
    # ` #` starts a comment, which would cut the value short without a word.
    if node.end_mark.index < len(text.rstrip()):
        raise YamlError(f"only {node.value!r} would be read, the rest is a comment")
    return value


def dump(data: Mapping[str, object]) -> str:
    """Write YAML that `parse_document` reads back to equal data, in the order given."""
    # Other than ASCII is escaped: PyYAML writes some characters (NEL) raw in a way that it reads back as a space.
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=10_000)
