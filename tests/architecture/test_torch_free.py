"""What must answer at once, or runs in spawned workers, does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from architecture.import_rules import ROWS
from architecture.source_tree import ROOT, project_files
from helpers.plans import write_recipe
from megatron_klear.checkpoint.folder import write_tracker

REPORT = "import sys; heavy = [name for name in ('torch', 'megatron') if name in sys.modules]; print('LOADED', heavy)"
RUN_COMMAND = """
import runpy, sys
sys.argv = ["megatron-klear", *{arguments!r}]
try:
    runpy.run_module("megatron_klear", run_name="__main__")
except SystemExit as stop:
    assert stop.code in {exit_codes!r}, stop.code
"""


def loaded_by(code: str) -> str:
    """Runs code in a new interpreter; the last line says which heavy packages it has loaded."""
    command = [sys.executable, "-c", f"{code}\n{REPORT}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def loaded_by_command(*arguments: str, exit_codes: tuple[int, ...] = (0,)) -> str:
    return loaded_by(RUN_COMMAND.format(arguments=arguments, exit_codes=exit_codes))


@pytest.mark.parametrize(
    "command", ["--help", "--version", "check --help", "plan --help", "report --help", "checkpoint --help"]
)
def test_a_command_does_not_load_torch(command: str) -> None:
    assert loaded_by_command(*command.split()) == "LOADED []"


def test_checking_a_recipe_does_not_load_torch(tmp_path: Path) -> None:
    recipes = sorted((ROOT / "examples").rglob("*.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: {output_dir: runs/x}\nmodell: {}\n")
    for recipe in (*recipes, broken):
        # 1 and 2: a recipe whose model folder has not been made yet is refused, which must not take torch either.
        assert loaded_by_command("check", str(recipe), exit_codes=(0, 1, 2)) == "LOADED []"


def test_planning_a_recipe_does_not_load_torch(tmp_path: Path) -> None:
    words = ("--gpus", "64", "--gpu", "h800", "--search")
    assert loaded_by_command("plan", str(write_recipe(tmp_path)), *words, exit_codes=(0, 1)) == "LOADED []"


def test_looking_at_checkpoints_does_not_load_torch(tmp_path: Path) -> None:
    write_tracker(tmp_path, 5)
    assert loaded_by_command("checkpoint", "list", str(tmp_path)) == "LOADED []"


@pytest.mark.parametrize("package", [*(name for name, row in ROWS.items() if row == 0), "rewards", "report"])
def test_no_module_of_a_light_package_loads_torch(package: str) -> None:
    modules = [file.module for file in project_files() if file.package == package]
    assert modules, f"megatron_klear.{package} does not exist"
    assert loaded_by("".join(f"import {module}\n" for module in modules)) == "LOADED []"


def test_a_module_that_loads_torch_is_found() -> None:
    assert loaded_by("import torch") == "LOADED ['torch']"
