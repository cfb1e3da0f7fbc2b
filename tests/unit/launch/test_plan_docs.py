"""The worked example of docs/planning.md is what the program prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.plans import QWEN3_8B
from megatron_klear import cli

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "planning.md").read_text()


def test_the_plan_of_the_papers_run_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    shown = re.search(r"```\n\$ megatron-klear (.*?)\n(.*?)```", TEXT, re.DOTALL)
    assert recipe is not None and shown is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models" / "Qwen3-8B" / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "klear.yaml").write_text(recipe[1])
    assert cli.main(shlex.split(shown[1])) == 0
    assert capsys.readouterr().out == shown[2]
