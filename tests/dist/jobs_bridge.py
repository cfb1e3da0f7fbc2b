"""Jobs on the way from Hugging Face tensors to Megatron shards and back."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

import numpy as np
import torch

from dist.world import Arrays, Layout, exported, gppo, ragged_samples, to_array, world
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.training import convert
from megatron_klear.training.convert import megatron_logits


@dataclass(frozen=True)
class Bridged:
    """Logits [positions, V] and full tensors, on rank 0."""

    logits: np.ndarray
    tensors: Arrays


def through(
    rank: int,
    world_size: int,
    layout: Layout,
    shape: Qwen3Shape | bool,
    dtype: str,
    tensors: Arrays,
    rows: list[list[int]],
) -> tuple[Bridged, Bridged] | None:
    """Import `tensors`; logits and export before and after one update. A dense shape is named by whether it is tied."""
    shape = tiny_shape(shape) if isinstance(shape, bool) else shape

    def fill(stage: ModelStage) -> None:
        import_weights(stage, qwen3_table(shape), lambda name: torch.from_numpy(tensors[name]))

    with world(layout) as here:
        policy = here.policy(shape, fill, optimizer=OptimizerConfig(lr=1e-2), dtype=dtype)
        ids = [torch.tensor(row) for row in rows]
        before = Bridged(to_array(megatron_logits(policy.stage, ids, here.context)), exported(policy))
        policy.update(here.batch(ragged_samples(), 80), gppo())
        after = Bridged(to_array(megatron_logits(policy.stage, ids, here.context)), exported(policy))
        return (before, after) if rank == 0 else None


def command(rank: int, world_size: int, argv: list[str]) -> tuple[int | str, str]:
    """`megatron-klear convert`: (exit code or error, what it printed)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            code: int | str = convert.main(argv)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    return code, printed.getvalue()
