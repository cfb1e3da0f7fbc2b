"""Overrides on the command line: `section.key=value`, or Megatron's `--flag value` where the name is unique."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_klear.config.names import NOT_GIVEN, Leaf, did_you_mean, leaves_of
from megatron_klear.config.yaml_text import YamlError, parse_scalar
from megatron_klear.errors import Fault


@dataclass(slots=True)
class Overrides:
    """Values by dotted key, and the faults of words that could not be read."""

    values: dict[str, object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, key: str, text: str) -> None:
        """Read `text` as a YAML scalar for `key`. The same key twice is a fault: one of them would have no effect."""
        if key in self.values:
            self.faults.append(Fault(key, text, "given twice on the command line", "keep one of them"))
            return
        try:
            self.values[key] = parse_scalar(text)
        except YamlError as error:
            hint = f"text with special characters needs quotes inside quotes: {key}='\"...\"'" if text else ""
            self.faults.append(Fault(key, text, str(error), hint))


def _flags() -> dict[str, list[Leaf]]:
    leaves = {**leaves_of("sft"), **leaves_of("rl")}
    flags: dict[str, list[Leaf]] = {}
    for leaf in leaves.values():
        flags.setdefault("--" + leaf.name.replace("_", "-"), []).append(leaf)
    return flags


def _find_flag(flag: str, flags: dict[str, list[Leaf]]) -> Leaf | Fault:
    leaves = flags.get(flag, [])
    # `--lr` is the policy's: a section that most recipes do not have takes no flag away from the others.
    preferred = [leaf for leaf in leaves if not leaf.in_optional] if len(leaves) > 1 else leaves
    if len(preferred) == 1:
        return preferred[0]
    if not leaves:
        return Fault(flag, NOT_GIVEN, "no such flag", did_you_mean(flag, flags) or "write section.key=value")
    keys = " or ".join(f"{leaf.key}=..." for leaf in leaves)
    return Fault(flag, NOT_GIVEN, "several keys have this name", f"write {keys}")


def _read_flag(word: str, rest: deque[str], overrides: Overrides, flags: dict[str, list[Leaf]]) -> None:
    flag, equals, text = word.partition("=")
    found = _find_flag(flag, flags)
    if isinstance(found, Fault):
        # Its value is taken too: alone it would be reported as a second, meaningless fault.
        has_value = rest and not (rest[0].startswith("--") or "=" in rest[0])
        value = text if equals else rest.popleft() if has_value else NOT_GIVEN
        overrides.faults.append(replace(found, value=value))
    elif equals:
        overrides.add(found.key, text)
    elif found.is_boolean:
        overrides.add(found.key, "true")
    elif not rest or rest[0].startswith("--"):
        overrides.faults.append(Fault(flag, NOT_GIVEN, "needs a value", f"write {flag} VALUE or {found.key}=VALUE"))
    else:
        overrides.add(found.key, rest.popleft())


def parse_overrides(words: Sequence[str]) -> Overrides:
    """Read the words of a command line that follow the recipe."""
    overrides, flags, rest = Overrides(), _flags(), deque(words)
    while rest:
        word = rest.popleft()
        key, equals, text = word.partition("=")
        if word.startswith("--"):
            _read_flag(word, rest, overrides, flags)
        elif equals and all(key.split(".")):
            overrides.add(key, text)
        else:
            expected = "expected section.key=value, --flag value, or --flag alone where the setting is true or false"
            overrides.faults.append(Fault(word, NOT_GIVEN, expected))
    return overrides


def apply_overrides(data: dict[str, Any], overrides: Overrides) -> list[Fault]:
    """Set the values in nested `data`, in place. A key below a plain value is a fault."""
    faults = []
    for key, value in overrides.values.items():
        *parents, name = key.split(".")
        target: Any = data
        for depth, parent in enumerate(parents):
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                reason = f"{'.'.join(parents[: depth + 1])} is the plain value {target!r}, no key can stand below it"
                faults.append(Fault(key, value, reason))
                break
        else:
            target[name] = value
    return faults
