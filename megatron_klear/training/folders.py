"""The folders of a run: one run at a time, nothing of another run, and whether there is a checkpoint to go on from."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from tqdm import tqdm

from megatron_klear.checkpoint.folder import TRACKER, latest_step, recover, remove, saved_steps, step_folder
from megatron_klear.checkpoint.lock import folder_lock
from megatron_klear.checkpoint.store import Saved
from megatron_klear.config.recipe import Recipe
from megatron_klear.config.resume import load_saved_recipe, recipe_changes
from megatron_klear.errors import CheckpointError, ConfigError

RECIPE_FILE = "recipe.yaml"
_OUTPUTS = (RECIPE_FILE, "metrics.jsonl", "samples.jsonl", "tensorboard", "nonfinite", "curves.png", "report.html")


def save_folder(recipe: Recipe) -> Path:
    """Where the run's checkpoints lie."""
    return Path(recipe.checkpoint.save or Path(recipe.run.output_dir) / "checkpoints")


def claim_folders(recipe: Recipe, stack: contextlib.ExitStack) -> bool:
    """On rank 0: lock the run's folders until the stack ends and put them in order; whether there is a checkpoint
    to go on from.

    Raises `CheckpointError` if another run is at work there, `ConfigError` if they hold another run's output.
    """
    output, save = Path(recipe.run.output_dir), save_folder(recipe)
    for folder in {output.resolve(): output, save.resolve(): save}.values():
        stack.enter_context(folder_lock(folder))
    for line in recover(save):
        tqdm.write(line)
    config = recipe.checkpoint
    if config.resume and (config.ckpt_step is not None or latest_step(save) is not None):
        return True
    if config.resume is True:
        raise CheckpointError(
            f"checkpoint.resume is true but {save} holds no checkpoint; start without it, set it to auto,"
            " or correct checkpoint.save"
        )
    steps = saved_steps(save)
    found = [output / name for name in _OUTPUTS if (output / name).exists()]
    found += [step_folder(save, step) for step in steps]
    if found and config.resume == "auto":
        _check_own_attempt(output, recipe)
    elif found and not config.overwrite:
        raise ConfigError(
            f"{found[0]} belongs to an earlier run; expected an empty output_dir and save folder. Go on from it with"
            " checkpoint.resume=true, delete it with checkpoint.overwrite=true, or choose another run.output_dir"
        )
    elif found:
        # First, or a kill on the way would leave it naming what is gone.
        (save / TRACKER).unlink(missing_ok=True)
        for step in steps:
            remove(save, step)
        for path in (path for path in found if path.exists()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return False


def write_recipe(output: Path, recipe: str) -> None:
    """Leave the resolved recipe in the output folder; in one move, so that a kill leaves none or all of it."""
    draft = output / f"{RECIPE_FILE}.partial"
    draft.write_text(recipe)
    draft.rename(output / RECIPE_FILE)


def _check_own_attempt(output: Path, recipe: Recipe) -> None:
    """What lies there without a checkpoint must be of an attempt at this very run: it will be written over."""
    path = output / RECIPE_FILE
    if path.is_file():
        _check_same_recipe(path, path.read_text(), recipe)


def check_saved(saved: Saved, recipe: Recipe) -> None:
    """Raises `ConfigError` if the checkpoint's run would be gone on with under a recipe that changes its meaning."""
    if saved.manifest.kind == "weights":
        raise ConfigError(
            f"{saved.folder} holds weights alone, no run to go on with; start one from them with model.load ="
            f" {saved.folder.parent}"
        )
    _check_same_recipe(saved.folder, saved.recipe, recipe)


def _check_same_recipe(where: Path, saved: str, wanted: Recipe) -> None:
    """Raises `ConfigError` with every setting that changes what is learnt and was not allowed to."""
    faults = recipe_changes(load_saved_recipe(saved), wanted)
    if wanted.checkpoint.allow_recipe_changes:
        # No one can mean to go on with an SFT run as an RL run.
        faults = [fault for fault in faults if fault.key == "kind"]
    if faults:
        raise ConfigError(f"{where} is of another recipe:\n  " + "\n  ".join(map(str, faults)), faults)


def check_tokenizer(saved: Saved, fingerprint: str) -> None:
    """Raises `CheckpointError` if the checkpoint was trained with other tokens."""
    if saved.manifest.tokenizer != fingerprint:
        raise CheckpointError(
            f"{saved.folder} was trained with another tokenizer or chat template (fingerprint"
            f" {saved.manifest.tokenizer}) than model.hf_checkpoint's (fingerprint {fingerprint}); resume with the"
            " folder it was trained with"
        )
