"""What may differ between the recipe of a checkpoint and the one that goes on from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from megatron_klear.config.load import infer_kind
from megatron_klear.config.names import RECIPES, Kind
from megatron_klear.config.recipe import Recipe, SftRecipe
from megatron_klear.config.sections import build_sections
from megatron_klear.config.yaml_text import YamlError, parse_document
from megatron_klear.errors import CheckpointError, Fault

_FREE = {
    # Where a run writes and what it is called.
    "run.output_dir",
    "run.name",
    "run.tensorboard",
    "run.wandb_project",
    "checkpoint",
    "export",
    # How the work is split: the same sums in another order.
    "parallel",
    "batch.max_tokens_per_gpu",
    "head",
    # Where the optimizer waits.
    "optimizer.optimizer_cpu_offload",
    # What is only watched: it stops a run or describes it, and teaches it nothing.
    "eval",
    "health",
    # Where the first weights came from: the checkpoint's take their place. The architecture is compared elsewhere.
    "model.hf_checkpoint",
    "model.load",
    "model.random_init",
    # Compared by meaning in `_decay_changes`.
    "optimizer.lr_decay_iters",
}
_FREE_BY_KIND: Mapping[Kind, Set[str]] = {
    "sft": {
        *_FREE,
        # Paths: the content is compared elsewhere, by its fingerprint.
        "data.path",
        # When to stop; as the length of a decay it is compared in `_decay_changes`.
        "train_iters",
        # Judges evaluations only.
        "reward",
    },
    "rl": {
        *_FREE,
        # Paths: the content is compared elsewhere, by its fingerprint, and the reference is in the checkpoint.
        "data.prompt_data",
        "kl.ref_load",
        "debug.save_rollout_data",
        # When to stop.
        "rollout.num_rollout",
        # How fast: each response has its own random state, each answer its own verdict.
        "rollout.max_running_requests",
        # Where responses are made: from the same weights, tokens and temperature.
        "rollout.engine",
        "servers",
        "reward.num_workers",
        "reward.timeout_s",
    },
}
"""Sections and settings that change only where or how fast. Whatever is not listed changes what is learnt."""

_ALLOW = "or allow it with checkpoint.allow_recipe_changes=true"


def _kind(recipe: Recipe) -> Kind:
    return "sft" if isinstance(recipe, SftRecipe) else "rl"


def _changes(saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Set[str], prefix: str = "") -> Iterator[Fault]:
    for name, value in wanted.items():
        key = f"{prefix}{name}"
        # A name that only one of two losses has: their `type` differs, which says it all.
        if key in free or name not in saved or value == saved[name]:
            continue
        if isinstance(value, dict) and isinstance(saved[name], dict):
            yield from _changes(saved[name], value, free, f"{key}.")
        else:
            reason = f"was {saved[name]!r} when the checkpoint was saved"
            yield Fault(key, value, reason, f"give it back its old value, {_ALLOW}")


def _decay_iters(recipe: Recipe) -> int | None:
    """Updates until the learning rate is min_lr; None where it does not decay."""
    optimizer = recipe.optimizer
    if optimizer.lr_decay_style == "constant":
        return None
    in_sft = recipe.train_iters if isinstance(recipe, SftRecipe) else None
    return optimizer.lr_decay_iters or in_sft


def _decay_changes(saved: Recipe, wanted: Recipe) -> Iterator[Fault]:
    before, after = _decay_iters(saved), _decay_iters(wanted)
    # None on one side: lr_decay_style differs, which says it all.
    if before is None or after is None or before == after:
        return
    is_implied = saved.optimizer.lr_decay_iters is None and wanted.optimizer.lr_decay_iters is None
    key = "train_iters" if is_implied else "optimizer.lr_decay_iters"
    reason = f"was {before} when the checkpoint was saved, and the learning rate decays over it"
    yield Fault(key, after, reason, f"keep the old decay with optimizer.lr_decay_iters={before}, {_ALLOW}")


def recipe_changes(saved: Recipe, wanted: Recipe) -> list[Fault]:
    """A fault for every setting of `wanted` that makes a run learn something else than `saved` did, by key.

    A recipe of the other kind is the one fault `kind`, which no setting can allow.
    """
    kind, before = _kind(wanted), _kind(saved)
    if kind != before:
        hint = "start a fresh run from its weights: model.load"
        return [Fault("kind", kind, f"was {before} when the checkpoint was saved", hint)]
    changes = _changes(saved.model_dump(), wanted.model_dump(), _FREE_BY_KIND[kind])
    return sorted([*changes, *_decay_changes(saved, wanted)], key=lambda fault: fault.key)


def load_saved_recipe(text: str) -> Recipe:
    """Read back what `dump_recipe` wrote, whether or not its paths still exist and its layout fits.

    Raises `CheckpointError` that lists everything this version cannot read.
    """
    try:
        document = parse_document(text)
    except YamlError as error:
        raise _unreadable([f"not the YAML of a recipe: {error}"]) from error
    kind = infer_kind(document.data)
    if isinstance(kind, Fault):
        raise _unreadable([*document.duplicates, kind])
    built = build_sections(document.data, kind)
    faults = [*document.duplicates, *built.faults]
    if faults:
        raise _unreadable(sorted(faults, key=lambda fault: fault.key))
    return RECIPES[kind](**built.sections)


def _unreadable(problems: list[Fault] | list[str]) -> CheckpointError:
    advice = "resume with the version that saved it, or start a fresh run from its weights with model.load"
    lines = [
        "the recipe saved with the checkpoint cannot be read by this version of megatron-klear",
        *map(str, problems),
    ]
    return CheckpointError("\n  ".join([*lines, advice]))
