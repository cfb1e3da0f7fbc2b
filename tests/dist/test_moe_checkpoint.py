"""A run with experts that stops and goes on, in the same layout and in others. See test_checkpoint_store.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dist.pool import Pool
from dist.test_checkpoint_store import AFTER, BEFORE, assert_goes_on, train
from dist.world import ONE, Layout
from helpers.checkpoints import tensors_of
from helpers.tiny_qwen3 import tiny_moe_shape
from megatron_klear.config.model import Qwen3Shape

EP2 = Layout(dp=2, ep=2)
MIXED = tiny_moe_shape()
# A stage for each layer: the first, or the second, holds no expert.
STAGES = Layout(pp=4, dp=2, ep=2)
FIRST_DENSE = tiny_moe_shape(mlp_only_layers=(0,))
ALL_ALIKE = tiny_moe_shape(mlp_only_layers=())


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(ONE, "float32"), (EP2, "float32"), (EP2, "bfloat16"), (Layout(tp=2, pp=2, sp=True, ep=2), "float32")],
    ids=str,
)
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(pool: Pool, layout: Layout, dtype: str, tmp_path: Path) -> None:
    unbroken = train(pool, layout, dtype, save=str(tmp_path), before=BEFORE, after=AFTER, shape=MIXED)
    assert_goes_on(train(pool, layout, dtype, load=str(tmp_path), after=AFTER, shape=MIXED), unbroken)


def test_an_unsharded_optimizer_goes_on(pool: Pool, tmp_path: Path) -> None:
    unbroken = train(
        pool, EP2, "float32", save=str(tmp_path), before=BEFORE, after=AFTER, shape=MIXED, sharded_optimizer=False
    )
    resumed = train(pool, EP2, "float32", load=str(tmp_path), after=AFTER, shape=MIXED, sharded_optimizer=False)
    assert_goes_on(resumed, unbroken)


@pytest.mark.parametrize(
    ("first", "others", "shape"),
    [
        (ONE, [EP2, STAGES], MIXED),
        pytest.param(EP2, [ONE, Layout(tp=2, pp=2, sp=True, ep=2)], MIXED, marks=pytest.mark.law),
        pytest.param(STAGES, [EP2], FIRST_DENSE, marks=pytest.mark.law),
        (EP2, [ONE], ALL_ALIKE),
    ],
)
def test_another_layout_holds_the_same_bits_and_goes_on(
    first: Layout, others: list[Layout], shape: Qwen3Shape, pool: Pool, tmp_path: Path
) -> None:
    unbroken = train(pool, first, "float32", save=f"{tmp_path}/first", before=BEFORE, after=AFTER, shape=shape)
    wanted = tensors_of(tmp_path / "first" / "iter_0000002")
    # Weights, float32 main weights, two moments.
    assert sum("experts" in name for name in wanted) >= 4
    for layout in others:
        folder = tmp_path / str(layout)
        # Saved again before the first update, in the other layout's own pieces.
        resumed = train(pool, layout, "float32", load=f"{tmp_path}/first", save=str(folder), after=AFTER, shape=shape)
        found = tensors_of(folder / "iter_0000000")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        np.testing.assert_allclose(resumed.losses, unbroken.losses[BEFORE:], rtol=1e-5)
        np.testing.assert_allclose(resumed.grad_norms, unbroken.grad_norms[BEFORE:], rtol=1e-5)


def test_another_number_of_experts_a_token_is_another_model(pool: Pool, tmp_path: Path) -> None:
    """No tensor's shape would show it."""
    train(pool, ONE, "float32", save=str(tmp_path), before=1, shape=MIXED)
    other = tiny_moe_shape(num_experts_per_tok=3)
    text = pool.run(1, "dist.jobs_checkpoint:load_weights", ONE, str(tmp_path), other)[0]
    assert "is of another model: num_experts_per_tok 2 instead of 3; load it with the config.json" in text
