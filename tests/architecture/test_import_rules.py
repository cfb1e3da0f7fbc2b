"""Imports point only downwards."""

from __future__ import annotations

import ast
import re

import pytest

from architecture.import_rules import file_faults, mutual_imports, optional_faults
from architecture.source_tree import parse, project_files


def test_every_import_follows_the_rows() -> None:
    faults = [fault for file in project_files() for fault in file_faults(file)]
    assert not faults, "\n" + "\n".join(faults)


def test_each_optional_package_is_imported_in_one_file() -> None:
    assert not optional_faults(project_files())


def test_no_two_packages_import_each_other() -> None:
    assert not mutual_imports(project_files())


def test_the_command_table_names_functions_that_exist() -> None:
    files = {file.module: file for file in project_files()}
    entries = re.findall(r"[\"'](megatron_klear(?:\.\w+)+):(\w+)[\"']", files["megatron_klear.cli"].text)
    assert entries, 'cli.py holds one table, command -> "module:function"'
    for module, function in entries:
        assert module in files, f"cli.py names {module}, which does not exist"
        defined = {node.name for node in files[module].tree.body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"cli.py names {module}:{function}, which {module} does not define"


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("losses.policy", "from megatron_klear.training import step", "upwards from training"),
        ("losses.policy", "import megatron_klear.training.step", "upwards from training"),
        ("losses.policy", "from megatron_klear import training", "upwards from training"),
        ("losses.policy", "from megatron_klear.data import packing", "sideways from data"),
        ("cli", "from megatron_klear.launch import plan", "sideways from launch"),
        ("types", "from megatron_klear.losses import policy", "upwards from losses"),
        ("training.step", "from megatron_klear.helpers import x", "helpers is not listed"),
        ("helpers", "import os", "helpers is not listed"),
        ("", "from megatron_klear.types import Sample", "upwards from types"),
        ("losses.policy", "from . import kl", "relative import"),
        ("losses.policy", "from ..training import step", "relative import"),
        ("losses.policy", "if TYPE_CHECKING:\n    from megatron_klear.models import build", "upwards from models"),
        ("training.step", "def f():\n    from megatron_klear.models import build", "inside a function"),
        ("training.step", "class A:\n    def f(self):\n        import json", "inside a function"),
        ("types", "import torch", "may load pydantic, yaml, not torch"),
        ("types", "if not TYPE_CHECKING:\n    import torch", "not torch"),
        ("types", "if TYPE_CHECKING:\n    import re\nelse:\n    import torch", "not torch"),
        ("losses.policy", "import transformers", "not transformers"),
        ("rewards.maths", "import torch", "without torch"),
        ("models.build", "from megatron.core import parallel_state", "only parallel/topology.py"),
        ("models.build", "from megatron.core import mpu", "only parallel/topology.py"),
        ("models.build", "import megatron.core as mc\nmc.parallel_state.destroy()", "only parallel/topology.py"),
        ("parallel.broadcast", "import megatron.core.parallel_state as ps", "only parallel/topology.py"),
        ("training.step", "import torch.distributed as dist", "only parallel/ touches"),
        ("training.step", "from torch import distributed", "only parallel/ touches"),
        ("training.step", "import torch\ntorch.distributed.barrier()", "only parallel/ touches"),
        ("training.step", "import torch as t\nt.distributed.barrier()", "only parallel/ touches"),
        ("rollout.process", "import os\nhome = os.environ['HOME']", "the environment is read"),
        ("config.model", "from os import getenv", "the environment is read"),
        ("training.step", "import importlib\nimportlib.import_module('x')", "loaded by name"),
        ("training.step", "__import__('x')", "loaded by name"),
    ],
)
def test_a_bad_import_is_found(module: str, source: str, fault: str) -> None:
    name = f"megatron_klear.{module}".rstrip(".")
    assert any(fault in found for found in file_faults(parse(name, source))), file_faults(parse(name, source))


@pytest.mark.parametrize("source", ["import megatron_klear.types", "from megatron.core import tensor_parallel"])
def test_a_kernel_that_knows_the_project_or_megatron_is_found(source: str) -> None:
    assert "kernels know nothing" in file_faults(parse("megatron_klear_kernels.linear_policy_loss.autograd", source))[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_klear.config.load", "import os\nfrom megatron_klear.errors import ConfigError\nos.environ.get('A')"),
        ("megatron_klear.types", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("megatron_klear.losses.policy", "import torch\nfrom megatron_klear_kernels.x import y\nimport math"),
        ("megatron_klear.cli", "def f():\n    from megatron_klear.training import rl"),
        ("megatron_klear.training.observe", "def f():\n    import wandb"),
        ("megatron_klear.parallel.topology", "from megatron.core import parallel_state\nimport torch.distributed"),
        ("megatron_klear.launch.plan", "from megatron_klear import __version__\nimport os.path\nos.path.join('a')"),
        ("megatron_klear_kernels.x.autograd", "import torch.distributed\nfrom megatron_klear_kernels.x import y"),
        ("megatron_klear.__main__", "from megatron_klear.cli import main"),
    ],
)
def test_a_good_import_is_left_alone(module: str, source: str) -> None:
    assert file_faults(parse(module, source)) == []


def test_an_optional_package_in_two_files_is_found() -> None:
    files = [parse(f"megatron_klear.training.{name}", "def f():\n    import wandb") for name in ("a", "b")]
    assert optional_faults(files[:1]) == []
    assert "wandb is optional" in optional_faults(files)[0]


def test_a_mutual_import_is_found() -> None:
    types = parse("megatron_klear.types", "if TYPE_CHECKING:\n    from megatron_klear.metrics import Metric")
    metrics = parse("megatron_klear.metrics", "from megatron_klear import types")
    assert mutual_imports([types]) == []
    assert mutual_imports([types, metrics]) == ["metrics <-> types"]
