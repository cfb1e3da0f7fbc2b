"""The wheel and the editable install hold exactly two packages, complete; nothing is downloaded."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from architecture.source_tree import PACKAGE_DIRS, ROOT, module_name

TOP_LEVEL = {"megatron_klear", "megatron_klear_kernels"}


def package_files(top: str) -> set[str]:
    """Every file of a package, as a wheel names it."""
    folder = PACKAGE_DIRS[top]
    return {
        f"{top}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def top_level(names: set[str]) -> set[str]:
    """What a wheel puts into site-packages, its own metadata left out."""
    return {top for top in (name.split("/")[0] for name in names) if not top.endswith(".dist-info")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that a build leaves nothing in the working tree, beside what must not be."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy / name)
    for folder in PACKAGE_DIRS.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, copy / folder.relative_to(ROOT), ignore=ignore)
    # A careless setup.py would pack every folder with an __init__.py.
    for stray in ("tests", "tools"):
        (copy / stray).mkdir()
        (copy / stray / "__init__.py").touch()
    return copy


def run(source: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built as pip builds it."""
    out = tmp_path_factory.mktemp("wheel")
    run(source, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), ".")
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_two_packages_and_every_file_of_them(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    assert top_level(names) == TOP_LEVEL
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == package_files("megatron_klear") | package_files("megatron_klear_kernels")


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (metadata_file,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(metadata_file).decode()
    tree = ast.parse((ROOT / "megatron_klear" / "__init__.py").read_text(encoding="utf-8"))
    (version,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    lines = metadata.splitlines()
    for expected in ("Name: megatron-klear", f"Version: {version}", "License-Expression: Apache-2.0"):
        assert expected in lines
    assert "Requires-Python: >=3.11" in lines
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "megatron-klear = megatron_klear.cli:main" in wheel.read(entry_points).decode()


def test_the_editable_install_maps_the_same_two_packages(source: Path, tmp_path: Path) -> None:
    run(source, "-c", f"import setuptools.build_meta as build; build.build_editable({str(tmp_path)!r})")
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as editable:
        (finder,) = (name for name in editable.namelist() if name.endswith("_finder.py"))
        tree = ast.parse(editable.read(finder))
    (mapping,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value is not None and ast.unparse(node.target) == "MAPPING"
    )
    assert mapping == {top: str(source / folder.relative_to(ROOT)) for top, folder in PACKAGE_DIRS.items()}


def test_every_folder_with_code_is_a_package_and_kernels_is_not() -> None:
    for top, folder in PACKAGE_DIRS.items():
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{module_name(path, top, folder)} lies in no package"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_an_unexpected_package_is_found() -> None:
    assert top_level({"megatron_klear/types.py", "kernels/x.py", "megatron_klear-0.1.0.dist-info/METADATA"}) == {
        "megatron_klear",
        "kernels",
    }
