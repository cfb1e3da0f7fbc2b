"""Tiny recipes and what a run leaves behind."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from dist.pool import Pool
from e2e.jobs_runs import Finished
from megatron_klear.data import arithmetic
from megatron_klear.report.record import read_metrics

SFT: dict[str, Any] = {
    "run": {"name": "sft"},
    "model": {"random_init": True, "params_dtype": "float32"},
    "data": {"max_length": 64},
    "train_iters": 4,
    "batch": {"global_batch_size": 8, "max_tokens_per_gpu": 256},
    "optimizer": {"lr": 2.0e-3},
    "checkpoint": {"save_interval": 2},
}
RL: dict[str, Any] = {
    "run": {"name": "rl"},
    "model": {"params_dtype": "float32"},
    "data": {"max_prompt_len": 16},
    "rollout": {
        "num_rollout": 3,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 10,
    },
    "loss": {"type": "gppo"},
    "batch": {"global_batch_size": 8, "max_tokens_per_gpu": 96},
    "optimizer": {"lr": 1.0e-3},
    "reward": {"type": "helpers.rewards:length_reward", "format": "none"},
}


@dataclass(frozen=True)
class Bench:
    """A folder with data, and a pool to run commands on."""

    pool: Pool
    folder: Path

    def recipe(self, kind: str, output: str, changes: dict[str, Any] | None = None) -> Path:
        """A recipe file that writes to `output`; `changes` by dotted key, None takes a key away."""
        raw = copy.deepcopy(SFT if kind == "sft" else RL)
        raw["run"]["output_dir"] = str(self.folder / output)
        raw["model"]["hf_checkpoint"] = str(self.folder / "data" / "model")
        raw["export"] = {"hf_dir": str(self.folder / output / "hf")}
        data = str(self.folder / "data" / f"{kind}.jsonl")
        if kind == "sft":
            raw["data"]["path"] = data
        else:
            raw["data"]["prompt_data"] = data
            raw["model"]["load"] = str(self.folder / "sft" / "checkpoints")
        for key, value in (changes or {}).items():
            *sections, name = key.split(".")
            section = raw
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
            if value is None:
                del section[name]
        path = self.folder / f"{output}.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    def run_ranks(self, *words: object, world_size: int = 1, timeout: float = 100) -> list[Finished]:
        """`megatron-klear WORDS`, on every rank."""
        argv = [str(word) for word in words]
        return self.pool.run(world_size, "e2e.jobs_runs:command", argv, timeout=timeout)

    def run(self, *words: object, world_size: int = 1, timeout: float = 100) -> Finished:
        """`megatron-klear WORDS`; of rank 0."""
        return self.run_ranks(*words, world_size=world_size, timeout=timeout)[0]

    def succeed(self, *words: object, world_size: int = 1) -> Finished:
        done = self.run(*words, world_size=world_size)
        assert done.code == 0, done.err
        return done

    def refuse(self, *words: object) -> str:
        """The error of a command that ends with exit code 2."""
        done = self.run(*words)
        assert done.code == 2, done.out
        return done.err

    def metrics(self, output: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl without times."""
        return [
            {key: value for key, value in line.items() if key != "time" and not key.startswith("perf/")}
            for line in read_metrics(self.folder / output)
        ]

    def exported(self, output: str) -> dict[str, Tensor]:
        return load_file(self.folder / output / "hf" / "model.safetensors")


def make_bench(pool: Pool, folder: Path) -> Bench:
    """With data files of a few problems and the model folder."""
    arithmetic.main(["--out", str(folder / "data"), "--num-sft", "40", "--num-rl", "24", "--num-eval", "6"])
    return Bench(pool, folder)
