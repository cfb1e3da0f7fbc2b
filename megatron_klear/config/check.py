"""`megatron-klear check`: says what a recipe would do, or all that is wrong with it. Needs neither torch nor a GPU."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from megatron_klear.config.load import load_recipe, world_size_from_env
from megatron_klear.config.model import Qwen3Shape, model_shape
from megatron_klear.config.recipe import ParallelConfig, Recipe, RlRecipe, SftRecipe
from megatron_klear.config.rules import check_recipe
from megatron_klear.config.rules_parallel import replica_size
from megatron_klear.errors import ConfigError

__all__ = ["check_recipe", "describe", "main", "num_parameters"]


def num_parameters(shape: Qwen3Shape) -> int:
    """Parameters of the model; a tied embedding counts once, padding of the vocabulary is left out."""
    return sum(math.prod(tensor) for tensor in shape.tensor_shapes().values())


def _describe_model(shape: Qwen3Shape, dtype: str) -> str:
    tied = ", tied" if shape.tie_word_embeddings else ""
    return (
        f"{shape.model_type}, {shape.num_hidden_layers} layers, hidden {shape.hidden_size},"
        f" {shape.num_attention_heads} heads of {shape.head_dim} ({shape.num_key_value_heads} KV),"
        f" {_describe_mlp(shape)},"
        f" vocabulary {shape.vocab_size}{tied}: {num_parameters(shape):,} parameters in {dtype}"
    )


def _describe_mlp(shape: Qwen3Shape) -> str:
    if not shape.is_moe:
        return f"MLP {shape.intermediate_size}"
    dense = shape.num_hidden_layers - sum(shape.moe_layers)
    rest = f", {dense} layers with one MLP of {shape.intermediate_size}" if dense else ""
    return f"{shape.num_experts} experts of {shape.moe_intermediate_size}, {shape.num_experts_per_tok} a token{rest}"


def _describe_layout(parallel: ParallelConfig, world_size: int | None) -> str:
    model = f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size}"
    if parallel.context_parallel_size > 1:
        model += f" x context {parallel.context_parallel_size}"
    if world_size is None:
        return f"{model}; data parallel over the ranks that are left (--world-size N checks a number)"
    return f"{model} x data {world_size // replica_size(parallel)} = {world_size} ranks"


def _describe_batch(recipe: Recipe) -> str:
    size = recipe.batch.global_batch_size
    if isinstance(recipe, SftRecipe):
        return f"{recipe.train_iters} updates of {size} samples = {recipe.train_iters * size} samples"
    rollout = recipe.rollout
    responses = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return (
        f"{rollout.num_rollout} steps, each {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt}"
        f" = {responses} responses, in at most {-(-responses // size)} updates of at most {size} samples"
    )


def _describe_lengths(recipe: Recipe, shape: Qwen3Shape) -> str:
    limits = f"of {recipe.batch.max_tokens_per_gpu} a micro-batch and {shape.max_position_embeddings} positions"
    if shape.rope.rope_type == "yarn":
        limits += f" (YaRN, {shape.rope.factor:g} x {shape.rope.original_max_position_embeddings})"
    if isinstance(recipe, RlRecipe):
        prompt, response = recipe.data.max_prompt_len, recipe.rollout.rollout_max_response_len
        return f"prompt {prompt} + response {response} = {prompt + response} tokens {limits}"
    return f"{recipe.data.max_length} tokens {limits}"


def describe(recipe: Recipe, *, world_size: int | None = None) -> str:
    """What a faultless recipe would do, one line a topic."""
    shape = model_shape(recipe.model)
    topics = {
        "kind": "rl" if isinstance(recipe, RlRecipe) else "sft",
        "model": _describe_model(shape, recipe.model.params_dtype),
        "layout": _describe_layout(recipe.parallel, world_size),
        "batch": _describe_batch(recipe),
        "length": _describe_lengths(recipe, shape),
        "output": recipe.run.output_dir,
    }
    return "\n".join(f"{topic:<8}{text}" for topic, text in topics.items())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Check a recipe. Returns 0 and prints its essentials, or 2 and lists every fault on stderr."""
    parser = argparse.ArgumentParser(
        prog="megatron-klear check",
        usage="%(prog)s RECIPE [section.key=value | --flag value ...] [--world-size N]",
        description="Check a recipe and all it refers to, without torch; list everything that is wrong with it.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("--world-size", type=_positive, help="ranks the run will have; WORLD_SIZE if not given")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        world_size = arguments.world_size or world_size_from_env()
        recipe = load_recipe(arguments.recipe, overrides, world_size=world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"OK      {arguments.recipe}")
    print(describe(recipe, world_size=world_size))
    return 0
