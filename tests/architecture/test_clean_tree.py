"""No file names a path of somebody's machine or the host of a package registry."""

from __future__ import annotations

import re
import subprocess

import pytest

from architecture.source_tree import ROOT

# Written in pieces, so that this file does not hold what it looks for.
MACHINE_ROOTS = ("work", "root", "opt")
MACHINE_PATH = re.compile(r"(?:^|[\s\"'`=:(\[,])/(?:" + "|".join(MACHINE_ROOTS) + r")(?![\w.-])")
REGISTRIES = (
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("registry.npmjs", "org"),
    ("download.pytorch", "org"),
    ("deb.debian", "org"),
)
REGISTRY_HOST = re.compile("|".join(re.escape(".".join(parts)) for parts in REGISTRIES))


def faults(text: str) -> list[str]:
    """The lines that hold a machine path or a registry host, with their numbers."""
    return [
        f"{number}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line)
    ]


def listed_files() -> list[str]:
    """Files that are tracked, or would be with the next `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this is not a git checkout: {done.stderr.strip()}")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = []
    for name in listed_files():
        text = (ROOT / name).read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}:{fault}" for fault in faults(text)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("root", MACHINE_ROOTS)
@pytest.mark.parametrize("before", ["", "cd ", 'path = "', "DIR=", "a:"])
def test_a_machine_path_is_found(root: str, before: str) -> None:
    assert faults(f"first line\n{before}/{root}/models/x") == [f"2: {before}/{root}/models/x"]


@pytest.mark.parametrize("parts", REGISTRIES)
def test_a_registry_host_is_found(parts: tuple[str, str]) -> None:
    assert faults(f"https://files.{'.'.join(parts)}/simple")


@pytest.mark.parametrize("text", ["src/work/x", "/workspace/models", "/data/root/x", "https://host/work/x", "network"])
def test_an_ordinary_path_is_left_alone(text: str) -> None:
    assert faults(text) == []
