"""Checkpoints of a few plain files with a true manifest, and processes that die at a chosen moment."""

from __future__ import annotations

import io
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_klear.checkpoint.folder import partial_folder, publish
from megatron_klear.checkpoint.manifest import (
    POLICY,
    Manifest,
    ModelEntry,
    file_entry,
    find_damage,
    read_manifest,
    write_manifest,
)
from megatron_klear.config.model import Qwen3Shape

SHAPE = Qwen3Shape(
    model_type="qwen3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def make_manifest(folder: Path, step: int, metrics: Mapping[str, float] = {}) -> Manifest:
    """Of all files that lie in a folder."""
    files = {str(path.relative_to(folder)): file_entry(path) for path in folder.rglob("*") if path.is_file()}
    return Manifest(
        kind="rl",
        step=step,
        saved_at="2026-11-30T12:00:00+00:00",
        params_dtype="bfloat16",
        world_size=8,
        parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "data_parallel_size": 4},
        models={
            POLICY: ModelEntry(shape=SHAPE, version=2 * step, optimizer="distributed"),
            "reference": ModelEntry(shape=SHAPE, version=0),
        },
        tokenizer="abc123",
        metrics=dict(metrics),
        packages={"megatron-klear": "0.1.0", "torch": "2.13.0"},
        files=files,
    )


def write_partial(folder: Path, step: int, tag: str = "first", metrics: Mapping[str, float] = {}) -> None:
    """A checkpoint that has everything but its name; `tag` makes its content differ."""
    partial = partial_folder(folder, step)
    (partial / "reference").mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(f"{tag} {step} ".encode() * 100)
    (partial / "recipe.yaml").write_text(f"tag: {tag}\n")
    (partial / "reference" / "common.pt").write_bytes(b"reference")
    write_manifest(partial, make_manifest(partial, step, metrics))


def save(folder: Path, step: int, tag: str = "first", metrics: Mapping[str, float] = {}) -> Path:
    """A whole checkpoint, published."""
    write_partial(folder, step, tag, metrics)
    return publish(folder, step)


def tag_of(path: Path) -> str:
    """What a checkpoint was written with; fails if it is not whole."""
    assert find_damage(path, read_manifest(path)) == []
    return (path / "recipe.yaml").read_text().removeprefix("tag: ").strip()


class _Countdown:
    """SIGKILL when so many moments have passed: one before each operation on the disk, one with a file just opened."""

    def __init__(self, moments: int) -> None:
        self.left = moments

    def before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            return operation(*args, **kwargs)

        return wrapped

    def around(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            result = operation(*args, **kwargs)
            self._pass()
            return result

        return wrapped

    def _pass(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def dies_at(moment: int, operation: Callable[[], object]) -> bool:
    """Run it in a process that is killed at that moment; False if it was through before."""
    pid = os.fork()
    if pid == 0:
        try:
            countdown = _Countdown(moment)
            for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
                setattr(os, name, countdown.before(vars(os)[name]))
            io.open = countdown.around(io.open)
            operation()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the operation failed"
    return False
