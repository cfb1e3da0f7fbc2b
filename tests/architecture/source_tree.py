"""The project's source as parsed trees, for the architecture tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIRS = {
    "megatron_klear": ROOT / "megatron_klear",
    "megatron_klear_kernels": ROOT / "kernels" / "megatron_klear_kernels",
}


@dataclass(frozen=True)
class SourceFile:
    """One Python file under its dotted name (`megatron_klear.losses` for a package's __init__.py)."""

    module: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def package(self) -> str:
        """The name in the import rows: `losses` for megatron_klear.losses.policy, `megatron_klear_kernels`."""
        parts = self.module.split(".")
        if parts[0] == "megatron_klear":
            return parts[1] if len(parts) > 1 else "__init__"
        return parts[0]


def parse(module: str, text: str) -> SourceFile:
    return SourceFile(module, text, ast.parse(text, filename=module))


def module_name(path: Path, top: str, folder: Path) -> str:
    parts = list(path.relative_to(folder).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join([top, *parts])


def project_files() -> list[SourceFile]:
    """Every Python file of both packages."""
    return [
        parse(module_name(path, top, folder), path.read_text(encoding="utf-8"))
        for top, folder in PACKAGE_DIRS.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def files_of_tests() -> list[SourceFile]:
    """Every Python file under tests/."""
    folder = ROOT / "tests"
    return [
        parse(module_name(path, "tests", folder), path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    ]


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    """Every function with its qualified name, nested ones and methods too."""

    def walk(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[str, FunctionNode]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                yield ".".join((*outer, child.name)), child
            inner = (*outer, child.name) if isinstance(child, FunctionNode | ast.ClassDef) else outer
            yield from walk(child, inner)

    return walk(tree, ())
