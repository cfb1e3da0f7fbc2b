"""What the tests of the config package share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unit.config.config_files import SHAPE, RecipeFiles


@pytest.fixture
def files(tmp_path: Path) -> RecipeFiles:
    """A folder with a tiny model's config.json and one data file of each sort."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    for name in ("sft.jsonl", "prompts.jsonl", "eval.parquet"):
        (tmp_path / name).touch()
    return RecipeFiles(tmp_path)
