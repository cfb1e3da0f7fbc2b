"""How large and how plain the source is, measured on parsed source."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from architecture.import_rules import mutual_imports
from architecture.source_tree import FunctionNode, SourceFile, functions

KERNELS = "megatron_klear_kernels"
BROAD = ("Exception", "BaseException")
MOCKS = ("Mock", "MagicMock", "AsyncMock", "create_autospec", "patch", "patch.object", "mock.patch", "mocker.patch")


@dataclass(frozen=True)
class Function:
    """One function of the package. `lines` counts from `def` to the end; `num_arguments` leaves out self and cls."""

    place: str
    lines: int
    num_arguments: int
    is_hinted: bool
    is_stub: bool
    is_triton: bool


@dataclass(frozen=True)
class Budget:
    """One measured number and its limit. `offenders` are the places that exceed it, where places can be named."""

    name: str
    value: float
    limit: float
    offenders: tuple[str, ...] = ()
    at_least: bool = False

    @property
    def is_kept(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "min" if self.at_least else "max"
        verdict = "" if self.is_kept else "   EXCEEDED"
        return f"{self.name:<32} {self.value:>8.4g}   {bound} {self.limit:g}{verdict}"


def is_stub(node: FunctionNode) -> bool:
    """A protocol's method: nothing but a docstring and an ellipsis."""
    return all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in node.body)


def own_arguments(node: FunctionNode) -> list[ast.arg]:
    """All arguments but self and cls."""
    spec = node.args
    named = [*spec.posonlyargs, *spec.args]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return [*named, *spec.kwonlyargs, *(arg for arg in (spec.vararg, spec.kwarg) if arg)]


def measured_functions(file: SourceFile) -> Iterator[Function]:
    for name, node in functions(file.tree):
        arguments = own_arguments(node)
        yield Function(
            place=f"{file.module}:{name}",
            lines=(node.end_lineno or node.lineno) - node.lineno + 1,
            num_arguments=len(arguments),
            is_hinted=node.returns is not None and all(arg.annotation is not None for arg in arguments),
            is_stub=is_stub(node),
            is_triton=any("triton." in ast.unparse(decorator) for decorator in node.decorator_list),
        )


def places(files: Iterable[SourceFile], is_found: Callable[[ast.AST], bool]) -> list[str]:
    """`module:function` of every matching node; the innermost function is named, as line numbers change too often."""
    found = []
    for file in files:
        owner: dict[ast.AST, str] = {}
        for name, node in functions(file.tree):
            owner.update(dict.fromkeys(ast.walk(node), name))
        found += [f"{file.module}:{owner.get(node, '<module>')}" for node in ast.walk(file.tree) if is_found(node)]
    return found


def is_call(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names


def is_reflection(node: ast.AST) -> bool:
    return is_call(node, ("getattr", "hasattr"))


def is_loose_zip(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not is_call(node, ("zip",)):
        return False
    return not any(keyword.arg == "strict" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)


def is_global(node: ast.AST) -> bool:
    return isinstance(node, ast.Global)


def is_broad_except(node: ast.AST) -> bool:
    """A handler that catches everything and does not raise again."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    catches_all = any(kind is None or ast.unparse(kind) in BROAD for kind in kinds)
    return catches_all and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


def is_mock(node: ast.AST) -> bool:
    return is_call(node, MOCKS)


def percentile(values: Collection[float], share: float) -> float:
    """Smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Accountant:
    """Builds budgets, leaving out excused places. `excused` holds `budget name: place`."""

    def __init__(self, excused: Collection[str]) -> None:
        self.excused = excused

    def count(self, name: str, found: Iterable[str]) -> Budget:
        """Places that must not exist."""
        offenders = tuple(place for place in found if f"{name}: {place}" not in self.excused)
        return Budget(name, len(offenders), 0, offenders)

    def largest(self, name: str, sizes: Mapping[str, int], limit: int) -> Budget:
        """The largest of these sizes, by place."""
        counted = {place: size for place, size in sizes.items() if f"{name}: {place}" not in self.excused}
        offenders = tuple(place for place, size in counted.items() if size > limit)
        return Budget(name, max(counted.values(), default=0), limit, offenders)

    def functions(self, found: Sequence[Function]) -> list[Budget]:
        """A Triton kernel is exempt from length, `kernels/` from the number of arguments, a stub has no length."""
        lengths = {f.place: f.lines for f in found if not f.is_stub and not f.is_triton}
        sizes = list(lengths.values()) or [0]
        arguments = {f.place: f.num_arguments for f in found if not f.place.startswith(KERNELS)}
        bare = tuple(f.place for f in found if not f.is_hinted)
        return [
            Budget("function lines, median", statistics.median(sizes), 12),
            Budget("function lines, p95", percentile(sizes, 0.95), 60),
            self.largest("function lines, max", lengths, 120),
            self.largest("arguments, max", arguments, 7),
            Budget("functions with type hints, %", 100 * (1 - len(bare) / len(found)), 100, bare, at_least=True),
        ]


def budgets(files: Sequence[SourceFile], tests: Sequence[SourceFile], excused: Collection[str] = ()) -> list[Budget]:
    """Every budget, measured on the packages' files and, for mocks, on the tests."""
    accountant = Accountant(excused)
    reflections = places(files, is_reflection)
    num_lines = sum(file.num_lines for file in files)
    mocks = places(tests, is_mock)
    num_tests = sum(name.split(".")[-1].startswith("test_") for file in tests for name, _ in functions(file.tree))
    return [
        *accountant.functions([function for file in files for function in measured_functions(file)]),
        accountant.largest("file lines, max", {file.module: file.num_lines for file in files}, 500),
        Budget("getattr/hasattr per 1,000 lines", 1000 * len(reflections) / num_lines, 1, tuple(reflections)),
        accountant.count("zip without strict=True", places(files, is_loose_zip)),
        accountant.count("global", places(files, is_global)),
        accountant.count("broad except", places(files, is_broad_except)),
        accountant.count("mutual package imports", mutual_imports(files)),
        Budget("mocks per test", len(mocks) / max(num_tests, 1), 0.1, tuple(mocks)),
    ]
