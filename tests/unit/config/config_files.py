"""Small model folders and recipes on disk for the tests of this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_klear.config.load import load_recipe
from megatron_klear.errors import ConfigError, Fault

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


def change(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Set values by dotted key in nested data, in place."""
    for key, value in changes.items():
        *sections, name = key.split(".")
        target = recipe
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return recipe


@dataclass(frozen=True)
class RecipeFiles:
    """A folder with a model, data files and recipes."""

    folder: Path

    def model(self, **shape: Any) -> str:
        """A model folder with a changed shape."""
        folder = self.folder / "other-model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**SHAPE, **shape}))
        return str(folder)

    def _common(self) -> dict[str, Any]:
        return {
            "run": {"output_dir": str(self.folder / "out")},
            "model": {"hf_checkpoint": str(self.folder / "model"), "random_init": True},
            "optimizer": {"lr": 1e-3},
            "batch": {"global_batch_size": 8, "max_tokens_per_gpu": 200},
        }

    def sft(self) -> dict[str, Any]:
        """A faultless sft recipe as nested data."""
        data = {"path": str(self.folder / "sft.jsonl"), "max_length": 128}
        return {**self._common(), "data": data, "train_iters": 10}

    def rl(self) -> dict[str, Any]:
        """A faultless rl recipe as nested data."""
        return {
            **self._common(),
            "data": {"prompt_data": str(self.folder / "prompts.jsonl"), "max_prompt_len": 32},
            "rollout": {
                "num_rollout": 5,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "rollout_max_response_len": 64,
            },
            "loss": {"type": "gppo"},
            "reward": {"type": "arithmetic"},
        }

    def write(self, content: str | dict[str, Any]) -> Path:
        """Save a recipe."""
        path = self.folder / "recipe.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path

    def faults(self, content: str | dict[str, Any], *overrides: str, **options: Any) -> list[Fault]:
        """What loading says is wrong; empty if the recipe loads. The message must list exactly the faults."""
        try:
            load_recipe(self.write(content), overrides, **options)
        except ConfigError as error:
            lines = str(error).splitlines()
            assert [line.strip() for line in lines[1:]] == [str(fault) for fault in error.faults]
            assert [fault.key for fault in error.faults] == sorted(fault.key for fault in error.faults)
            return list(error.faults)
        return []
