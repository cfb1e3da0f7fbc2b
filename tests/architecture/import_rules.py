"""Who may import whom, checked on parsed source without importing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from architecture.source_tree import FunctionNode, SourceFile

# A package may import from rows below its own. A package that is not listed is an error.
ROWS = {
    **dict.fromkeys(("config", "types", "protocols", "errors", "metrics"), 0),
    **dict.fromkeys(("losses", "rewards", "data", "report", "parallel"), 1),
    **dict.fromkeys(("models",), 2),
    **dict.fromkeys(("checkpoint", "rollout", "weight_sync"), 3),
    **dict.fromkeys(("training", "curation"), 4),
    **dict.fromkeys(("cli", "launch"), 5),
    **dict.fromkeys(("__main__",), 6),
}

OPTIONAL = ("nemo_run", "wandb", "transformer_engine", "apex", "flash_attn")

# Third-party packages that a package may load when it is imported; packages not named here may load any.
THIRD_PARTY = {
    **{name: {"pydantic", "yaml"} for name, row in ROWS.items() if row == 0},
    "losses": {"torch", "megatron_klear_kernels"},
}
# Imported by spawned workers and by commands that must answer at once.
TORCH_FREE = ("rewards", "report")
HEAVY = {"torch", "megatron", "transformers", "triton", "megatron_klear_kernels"}


@dataclass(frozen=True)
class Restriction:
    """Names that only some modules may import or use. A dotted prefix in `allowed` covers what is below it."""

    names: tuple[str, ...]
    allowed: tuple[str, ...]
    why: str


RESTRICTIONS = (
    Restriction(
        ("megatron.core.parallel_state", "megatron.core.mpu"),
        ("megatron_klear.parallel.topology",),
        "only parallel/topology.py knows Megatron's process groups",
    ),
    Restriction(
        ("torch.distributed",),
        ("megatron_klear.parallel", "megatron_klear_kernels"),
        "only parallel/ touches process groups (a kernel takes a group as an argument)",
    ),
    Restriction(
        ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"),
        ("megatron_klear.config.load", "megatron_klear.parallel", "megatron_klear.launch"),
        "the environment is read in config/load.py, parallel/ and launch/ only",
    ),
    Restriction(
        ("importlib.import_module", "builtins.__import__"),
        (
            "megatron_klear.cli",
            "megatron_klear.rewards",
            "megatron_klear.losses.registry",
            "megatron_klear_kernels.implementations",
            "megatron_klear_kernels.triton_support",
        ),
        "modules are loaded by name only for the command table, a recipe's own reward or loss, and optional kernels",
    ),
)


@dataclass(frozen=True)
class Import:
    """One imported name, as `package.module.name`. `lazy`: inside a function. `typing_only`: under TYPE_CHECKING."""

    target: str
    bound_as: str
    line: int
    relative: bool = False
    lazy: bool = False
    typing_only: bool = False

    @property
    def top(self) -> str:
        return self.target.split(".")[0]


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of_statement(node: ast.stmt) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, alias.asname or alias.name.split(".")[0], node.lineno)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            target = f"{node.module}.{alias.name}" if node.module else alias.name
            yield Import(target, alias.asname or alias.name, node.lineno, relative=node.level > 0)


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, wherever it stands."""

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (replace(found, lazy=lazy, typing_only=typing_only) for found in imports_of_statement(node))
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for child in node.body:
                yield from walk(child, lazy, True)
            for child in node.orelse:
                yield from walk(child, lazy, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy or isinstance(node, FunctionNode | ast.Lambda), typing_only)

    return walk(tree, False, False)


def below(name: str, prefixes: Iterable[str]) -> bool:
    """True if `name` is one of the prefixes, or lies in one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def used_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported, or are attribute chains from an import (`os.environ`), with their lines."""
    found = list(imports(tree))
    bound = {item.bound_as: item.target if item.bound_as != item.top else item.top for item in found}
    bound["__import__"] = "builtins.__import__"
    yield from ((item.target, item.line) for item in found)
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in inner:
            start, _, rest = ast.unparse(node).partition(".")
            if start in bound:
                yield f"{bound[start]}.{rest}".removesuffix("."), node.lineno


def project_package(target: str) -> str | None:
    """The package of `megatron_klear` that a target lies in, if it is one of ours."""
    parts = target.split(".")
    return parts[1] if parts[0] == "megatron_klear" and len(parts) > 1 else None


def row_fault(package: str, target: str) -> str | None:
    other = project_package(target)
    if other is None or other == package or other.startswith("__"):
        return None
    if other not in ROWS:
        return f"megatron_klear.{other} is not listed in the import rows"
    mine, theirs = ROWS.get(package, -1), ROWS[other]
    if theirs < mine or theirs == mine == 0:
        return None
    direction = "sideways" if mine == theirs else "upwards"
    return f"{package} (row {mine}) imports {direction} from {other} (row {theirs})"


def import_faults(file: SourceFile, item: Import) -> Iterator[str]:
    """What is wrong with one import, seen alone."""
    package = file.package
    if item.relative:
        yield f"relative import of {item.target}; write the absolute name"
        return
    if package == "megatron_klear_kernels":
        if item.top in ("megatron_klear", "megatron"):
            yield f"kernels know nothing of {item.top}, but import {item.target}"
    elif fault := row_fault(package, item.target):
        yield fault
    # An optional package may be missing, so its one file may load it where it is needed.
    if item.lazy and file.module != "megatron_klear.cli" and item.top not in (*OPTIONAL, "triton"):
        yield f"{item.target} is imported inside a function; only cli.py does that"
    if item.typing_only or item.top == "megatron_klear":
        return
    if package in THIRD_PARTY and item.top not in (*THIRD_PARTY[package], *sys.stdlib_module_names):
        yield f"{package} may load {', '.join(sorted(THIRD_PARTY[package]))}, not {item.top}"
    if package in TORCH_FREE and item.top in HEAVY:
        yield f"{package} is loaded without torch, but imports {item.top}"


def file_faults(file: SourceFile) -> list[str]:
    """Everything in one file that breaks a rule, as `module:line: fault`."""
    faults = []
    if file.package not in (*ROWS, "__init__", "megatron_klear_kernels"):
        faults.append(f"{file.module}:1: {file.package} is not listed in the import rows")
    for item in imports(file.tree):
        faults.extend(f"{file.module}:{item.line}: {fault}" for fault in import_faults(file, item))
    for name, line in used_names(file.tree):
        for restriction in RESTRICTIONS:
            if below(name, restriction.names) and not below(file.module, restriction.allowed):
                faults.append(f"{file.module}:{line}: uses {name}; {restriction.why}")
    return sorted(set(faults))


def optional_faults(files: Iterable[SourceFile]) -> list[str]:
    """Optional packages that more than one file imports."""
    importers: dict[str, set[str]] = {name: set() for name in OPTIONAL}
    for file in files:
        for item in imports(file.tree):
            if item.top in importers:
                importers[item.top].add(file.module)
    return [
        f"{name} is optional and belongs in one file; {', '.join(sorted(modules))} import it"
        for name, modules in importers.items()
        if len(modules) > 1
    ]


def mutual_imports(files: Iterable[SourceFile]) -> list[str]:
    """Pairs of packages that import each other, imports for typing included."""
    edges = set()
    for file in files:
        for item in imports(file.tree):
            other = project_package(item.target) or item.top
            if other != file.package:
                edges.add((file.package, other))
    return sorted(f"{a} <-> {b}" for a, b in edges if a < b and (b, a) in edges)
