"""The words of `megatron-klear sft` and `megatron-klear rl`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

from megatron_klear.config.load import load_recipe, world_size_from_env
from megatron_klear.config.recipe import RlRecipe, SftRecipe

_EPILOG = """\
overrides: section.key=value, or Megatron's flag spelling (--tensor-model-parallel-size 2).
many ranks: torchrun --nproc-per-node 4 -m megatron_klear {kind} RECIPE parallel.tensor_model_parallel_size=2
what a recipe can hold: docs/config.md; what is wrong with one: megatron-klear check RECIPE"""


def recipe_of(kind: Literal["sft", "rl"], argv: Sequence[str]) -> SftRecipe | RlRecipe:
    """The recipe that the words name, overrides applied. Raises `ConfigError` with every fault."""
    parser = argparse.ArgumentParser(
        prog=f"megatron-klear {kind}",
        usage="%(prog)s RECIPE [OVERRIDE ...]",
        epilog=_EPILOG.format(kind=kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    # Overrides may look like flags, so only the first word is argparse's.
    recipe = parser.parse_args(argv[:1]).recipe
    return load_recipe(recipe, argv[1:], kind=kind, world_size=world_size_from_env())
