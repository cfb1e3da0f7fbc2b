"""A run that stops and goes on is the same run; a checkpoint is whole or it is an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist.jobs_checkpoint import Trained
from dist.pool import Pool, RankFailure
from dist.world import ONE, Arrays, Layout
from helpers.checkpoints import tensors_of
from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.config.recipe import OptimizerConfig

CASES = [
    (ONE, "float32"),
    (ONE, "bfloat16"),
    (Layout(tp=2, pp=2, sp=True), "float32"),
    (Layout(tp=2, pp=2, sp=True), "bfloat16"),
    (Layout(dp=2), "float32"),
    (Layout(dp=2), "bfloat16"),
]
# The first update after a load is right even when the optimizer's step counts are wrong: look at the later ones.
BEFORE, AFTER = 2, 4


def train(pool: Pool, layout: Layout, dtype: str, **options: Any) -> Trained:
    return pool.run(layout.world_size, "dist.jobs_checkpoint:run_train", layout, dtype, options)[0]


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def assert_goes_on(resumed: Trained, unbroken: Trained) -> None:
    assert resumed.losses == unbroken.losses[BEFORE:]
    assert resumed.grad_norms == unbroken.grad_norms[BEFORE:]
    assert_same(resumed.weights, unbroken.weights)


@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=str)
def test_a_resumed_run_is_the_unbroken_run_bit_for_bit(pool: Pool, layout: Layout, dtype: str, tmp_path: Path) -> None:
    unbroken = train(pool, layout, dtype, save=str(tmp_path), before=BEFORE, after=AFTER)
    assert len(set(unbroken.losses)) == BEFORE + AFTER, "the updates must do something"
    resumed = train(pool, layout, dtype, load=str(tmp_path), after=AFTER)
    assert resumed.common == {"step": 2, "version": 2, "note": {"text": "x"}}
    assert_goes_on(resumed, unbroken)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_an_unsharded_optimizer_goes_on(pool: Pool, dtype: str, tmp_path: Path) -> None:
    whole = {"before": BEFORE, "after": AFTER, "sharded_optimizer": False}
    unbroken = train(pool, Layout(dp=2), dtype, save=str(tmp_path), **whole)
    resumed = train(pool, Layout(dp=2), dtype, load=str(tmp_path), after=AFTER, sharded_optimizer=False)
    assert_goes_on(resumed, unbroken)


@pytest.mark.parametrize("sharded", [True, False])
def test_the_optimizers_settings_are_the_recipes_not_the_checkpoints(pool: Pool, sharded: bool, tmp_path: Path) -> None:
    train(pool, ONE, "float32", save=str(tmp_path), before=BEFORE, sharded_optimizer=sharded)
    other = OptimizerConfig(lr=1e-2, weight_decay=0.3, adam_beta1=0.5, adam_beta2=0.6, adam_eps=1e-3)
    resumed = train(pool, ONE, "float32", load=str(tmp_path), after=1, sharded_optimizer=sharded, optimizer=other)
    # Matrices decay, norm weights do not.
    assert sorted(set(resumed.groups)) == [(0.0, (0.5, 0.6), 1e-3), (0.3, (0.5, 0.6), 1e-3)]


def test_a_vocabulary_padded_otherwise_in_another_layout_is_loaded(pool: Pool, tmp_path: Path) -> None:
    # 33 rows are padded to 48 on one rank and to 64 on two.
    shape = tiny_shape(False, vocab_size=33)
    unbroken = train(pool, ONE, "float32", save=str(tmp_path), before=BEFORE, after=AFTER, shape=shape)
    resumed = train(pool, Layout(tp=2), "float32", load=str(tmp_path), after=AFTER, shape=shape)
    np.testing.assert_allclose(resumed.losses, unbroken.losses[BEFORE:], rtol=1e-4)


def test_megatrons_own_optimizer_class_would_not_go_on(pool: Pool, tmp_path: Path) -> None:
    unbroken = train(pool, ONE, "float32", save=str(tmp_path), before=BEFORE, after=AFTER)
    with pytest.raises(RankFailure, match="KeyError: 'step'"):
        train(pool, ONE, "float32", load=str(tmp_path), after=AFTER, mutant="plain class")
    # One step tensor for all parameters: weights, moments and the first two losses are right, the others are not.
    resumed = train(pool, ONE, "float32", load=str(tmp_path), after=AFTER, mutant="shared step")
    assert resumed.losses[0] == unbroken.losses[BEFORE]
    with pytest.raises(AssertionError):
        assert_goes_on(resumed, unbroken)


def load(pool: Pool, folder: Path, *, tied: bool = True, layout: Layout = ONE, **sizes: int) -> Any:
    shape = tiny_shape(tied).model_copy(update=sizes)
    return pool.run(layout.world_size, "dist.jobs_checkpoint:load_weights", layout, str(folder), shape)[0]


def weights_of(step: int) -> Arrays:
    return {name: tensor.numpy() for name, tensor in random_tensors(tiny_shape(True), step).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(pool: Pool, folder: Path, *steps: int, layout: Layout = ONE) -> None:
    ranks = pool.run(layout.world_size, "dist.jobs_checkpoint:save_steps", layout, str(folder), list(steps))
    assert ranks == [[f"iter_{step:07d}" for step in steps]] * layout.world_size


def test_every_step_gets_a_folder_and_the_tracker_names_the_newest(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 3, 12, layout=Layout(tp=2))
    assert names(tmp_path) == ["iter_0000003", "iter_0000012", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    step, weights = load(pool, tmp_path)
    assert step == 12
    assert_same(weights, weights_of(12))
    # The tracker decides, not the largest number.
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert_same(load(pool, tmp_path)[1], weights_of(3))


def test_a_step_saved_again_is_replaced(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 3)
    (tmp_path / "iter_0000003" / "stale").touch()
    save(pool, tmp_path, 3)
    assert not (tmp_path / "iter_0000003" / "stale").exists()


def test_what_a_crash_left_is_ignored_and_replaced(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 1)
    with pytest.raises(RankFailure, match="rank 0: died without a word"):
        pool.run(1, "dist.jobs_checkpoint:crash_while_saving", ONE, str(tmp_path))
    partial = tmp_path / "iter_0000002.partial"
    assert names(tmp_path) == ["iter_0000001", partial.name, "latest_checkpointed_iteration.txt"]
    assert list(partial.glob("*.distcp")), "the crash must come after some data was written"
    assert_same(load(pool, tmp_path)[1], weights_of(1))
    (partial / "stale").touch()
    save(pool, tmp_path, 2)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]
    assert not (tmp_path / "iter_0000002" / "stale").exists()
    assert_same(load(pool, tmp_path)[1], weights_of(2))


@pytest.mark.parametrize(("layout", "full_on"), [(ONE, [0]), (Layout(tp=2), [0, 1]), (Layout(tp=2), [1])], ids=str)
def test_a_full_disk_is_an_error_and_leaves_the_older_checkpoint(
    pool: Pool, layout: Layout, full_on: list[int], tmp_path: Path
) -> None:
    errors = pool.run(
        layout.world_size, "dist.jobs_checkpoint:save_on_a_full_disk", layout, str(tmp_path), full_on, timeout=40
    )
    for text in errors:
        assert f"could not write checkpoint 2 to {tmp_path}" in text
        assert "the newest whole checkpoint there is 1. Free space or make the folder writable" in text
    assert "File too large" in "".join(errors)
    step, weights = load(pool, tmp_path, layout=layout)
    assert step == 1
    assert_same(weights, weights_of(1))


def test_a_folder_that_is_no_checkpoint_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert load(pool, tmp_path) == (
        f"{tmp_path} holds no latest_checkpointed_iteration.txt; expected the folder that a run saved into"
        " (the parent of iter_*)"
    )
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("7")
    assert (
        load(pool, tmp_path)
        == f"{tracker} names step 7, but {tmp_path}/iter_0000007 does not exist; steps that do: none"
    )
    tracker.write_text("release")
    assert load(pool, tmp_path) == f"{tracker} holds 'release'; expected the number of an iter_* folder beside it"
    (tmp_path / "iter_0000007").mkdir()
    tracker.write_text("7")
    text = load(pool, tmp_path)
    assert text.startswith(f"{tmp_path}/iter_0000007 holds no manifest.json; expected a checkpoint written by")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"hidden_size": 48}, "hidden_size 32 instead of 48"),
        ({"num_hidden_layers": 4, "intermediate_size": 64}, "intermediate_size 48 instead of 64, num_hidden_layers 2"),
        ({"tied": False}, "tie_word_embeddings True instead of False"),
        # Megatron would load it and leave the last rows as they are; 63 even fits the padding of 61.
        ({"vocab_size": 80}, "vocab_size 61 instead of 80"),
        ({"vocab_size": 63}, "vocab_size 61 instead of 63"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused(
    pool: Pool, other: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(pool, tmp_path, 1)
    text = load(pool, tmp_path, layout=Layout(tp=2), **other)
    assert isinstance(text, str), "a checkpoint of another model was loaded"
    assert text.startswith(f"{tmp_path}/iter_0000001 is of another model: {reason}")
    assert text.endswith("load it with the config.json it was trained with")


def test_a_longer_context_is_no_other_model(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 1)
    assert_same(load(pool, tmp_path, max_position_embeddings=256)[1], weights_of(1))


def test_a_run_that_has_not_trained_yet_is_saved_and_goes_on(pool: Pool, tmp_path: Path) -> None:
    # An rl step without a sample to learn from makes no update.
    for layout in (ONE, Layout(dp=2)):
        folder = tmp_path / str(layout)
        unbroken = train(pool, layout, "bfloat16", save=str(folder), before=0, after=3)
        resumed = train(pool, layout, "bfloat16", load=str(folder), after=3)
        assert resumed.losses == unbroken.losses
        assert_same(resumed.weights, unbroken.weights)
        # Saving itself must not have been a step.
        assert_same(train(pool, layout, "bfloat16", after=3).weights, unbroken.weights)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("layout", [ONE, Layout(tp=2)], ids=str)
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_file_is_named(pool: Pool, layout: Layout, damage: Callable[[Path], None], tmp_path: Path) -> None:
    train(pool, layout, "float32", save=str(tmp_path / "whole"), before=1)
    files = sorted(path.name for path in (tmp_path / "whole" / "iter_0000001").iterdir())
    assert {".metadata", "common.pt", "manifest.json", "recipe.yaml", "rng_00000.pt", "state.json"} < set(files)
    for name in files:
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name / "iter_0000001" / name)
    folders = [str(tmp_path / name) for name in ("whole", *files)]
    ranks = pool.run(layout.world_size, "dist.jobs_checkpoint:open_each", layout, folders)
    assert all(texts == ranks[0] for texts in ranks)
    assert ranks[0][0] == "whole"
    for name, text in zip(files, ranks[0][1:], strict=True):
        assert name in text and ("checkpoint.ckpt_step" in text or "holds no manifest.json" in text)


FOUR = tiny_shape(False).model_copy(update={"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4})
OTHERS = [
    ONE,
    Layout(pp=4),
    Layout(dp=2),
    Layout(tp=4),
    Layout(tp=2, pp=2, sp=True),
    Layout(cp=2),
    Layout(pp=2, vpp=2),
    Layout(pp=2, ends=(1, 3)),
]


def assert_same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) > 30
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.law)])
def test_any_layout_goes_on_with_the_same_state(pool: Pool, dtype: str, tmp_path: Path) -> None:
    first = Layout(tp=2, pp=2)
    options: dict[str, Any] = {"shape": FOUR, "after": AFTER}
    unbroken = train(pool, first, dtype, save=str(tmp_path / "first"), before=BEFORE, **options)
    wanted = tensors_of(tmp_path / "first" / "iter_0000002")
    for layout in OTHERS:
        folder = tmp_path / str(layout)
        # Saved again before the first update, in the other layout's own pieces.
        resumed = train(pool, layout, dtype, load=str(tmp_path / "first"), save=str(folder), **options)
        assert_same_tensors(tensors_of(folder / "iter_0000000"), wanted)
        # In bfloat16 the sums of other layouts round otherwise.
        rtol = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(resumed.losses, unbroken.losses[BEFORE:], rtol=rtol)


def test_replicas_share_the_writing(pool: Pool, tmp_path: Path) -> None:
    train(pool, Layout(dp=2), "float32", save=str(tmp_path), before=1)
    sizes = {rank: sum(p.stat().st_size for p in tmp_path.glob(f"iter_0000001/__{rank}_*")) for rank in (0, 1)}
    assert min(sizes.values()) > 0.3 * sum(sizes.values())


@pytest.mark.parametrize(
    ("layout", "sharded"),
    [(ONE, True), (ONE, False), (Layout(tp=2, pp=2), True), (Layout(dp=2), True), (Layout(dp=2), False)],
    ids=str,
)
def test_a_save_in_the_background_holds_what_was_current_when_it_was_asked_for(
    pool: Pool, layout: Layout, sharded: bool, tmp_path: Path
) -> None:
    job = "dist.jobs_checkpoint:save_while_training"
    seen = pool.run(layout.world_size, job, layout, str(tmp_path), sharded)[0]
    # The files were not even begun when two more updates were made.
    assert seen.tracker_while_writing is None and seen.polled_while_writing is None
    assert seen.published == ["iter_0000001", "iter_0000002"] and seen.tracker_after_first == 1
    wanted = tensors_of(tmp_path / "at_once" / "iter_0000001")
    found = tensors_of(tmp_path / "background" / "iter_0000001")
    assert_same_tensors(found, wanted)
    later = tensors_of(tmp_path / "background" / "iter_0000002")
    assert any(not torch.equal(later[name], wanted[name]) for name in wanted)


def test_without_the_copy_a_save_in_the_background_would_hold_later_values(pool: Pool, tmp_path: Path) -> None:
    # The distributed optimizer's state is gathered for a save, and so a copy anyway.
    pool.run(1, "dist.jobs_checkpoint:save_while_training", ONE, str(tmp_path), False, False)
    wanted = tensors_of(tmp_path / "at_once" / "iter_0000001")
    with pytest.raises(AssertionError):
        assert_same_tensors(tensors_of(tmp_path / "background" / "iter_0000001"), wanted)


@pytest.mark.parametrize("layout", [ONE, Layout(tp=2)], ids=str)
def test_a_folder_that_vanished_or_cannot_be_written_is_named(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    vanished, a_file = pool.run(layout.world_size, "dist.jobs_checkpoint:save_nowhere", layout, str(tmp_path))[0]
    for text in (vanished, a_file):
        assert text.startswith(f"could not write checkpoint 1 to {tmp_path}/")
        assert text.endswith("is None. Free space or make the folder writable, then resume")
    assert "No such file or directory" in vanished and "Not a directory" in a_file
    # It was not made again: it may be a disk that is not there.
    assert not (tmp_path / "vanished").exists()


def test_random_state_goes_on_in_the_same_layout_only(pool: Pool, tmp_path: Path) -> None:
    wanted = pool.run(2, "dist.jobs_checkpoint:draw_after_save", Layout(tp=2), str(tmp_path))
    assert wanted[0] != wanted[1], "ranks draw different numbers"
    assert pool.run(2, "dist.jobs_checkpoint:draw_after_restore", Layout(tp=2), str(tmp_path)) == wanted
    assert pool.run(2, "dist.jobs_checkpoint:draw_after_restore", Layout(dp=2), str(tmp_path)) == ["other layout"] * 2
    assert pool.run(1, "dist.jobs_checkpoint:draw_after_restore", ONE, str(tmp_path)) == ["other layout"]


def test_what_a_checkpoint_does_not_hold_is_said(pool: Pool, tmp_path: Path) -> None:
    train(pool, ONE, "float32", save=str(tmp_path), before=1)
    with pytest.raises(RankFailure) as plain:
        train(pool, ONE, "float32", load=str(tmp_path), after=1, sharded_optimizer=False)
    assert "holds the state of a distributed optimizer, this run has a plain one" in str(plain.value)
    assert "resume with parallel.use_distributed_optimizer=true" in str(plain.value)
    save(pool, tmp_path / "weights", 1)
    with pytest.raises(RankFailure, match=r"holds weights without optimizer state; start from them with model\.load"):
        train(pool, ONE, "float32", load=str(tmp_path / "weights"), after=1, shape=tiny_shape(True))
    text = pool.run(1, "dist.jobs_checkpoint:load_critic", ONE, str(tmp_path))[0]
    assert text.endswith(
        "iter_0000001 holds no critic, only policy; start a fresh run from its weights with model.load"
    )


def test_a_save_leaves_no_process_and_no_patch(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, "dist.jobs_checkpoint:leftovers", Layout(tp=2), str(tmp_path)) == [(0, True, True)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weights_only_start_does_not_move_at_learning_rate_0(pool: Pool, dtype: str, tmp_path: Path) -> None:
    save(pool, tmp_path, 1)
    before, after = pool.run(2, "dist.jobs_checkpoint:fill_from", Layout(dp=2), str(tmp_path), dtype)[0]
    assert_same(after, before)
    if dtype == "float32":
        assert_same(before, weights_of(1))
