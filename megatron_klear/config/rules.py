"""What must hold between the settings of a recipe, one small function a rule.

A rule takes the facts it needs (sections, the model's shape, the number of ranks) and yields faults. A rule runs when
all its facts are known, so a recipe with a broken section still hears of every fault in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_klear.config.loss import AggregationConfig
from megatron_klear.config.model import ModelConfig, Qwen3Shape, model_shape
from megatron_klear.config.names import (
    NOT_GIVEN,
    USER_FUNCTION,
    Kind,
    did_you_mean,
    is_user_function,
    missing_path_hint,
)
from megatron_klear.config.recipe import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    ParallelConfig,
    PromptDataConfig,
    Recipe,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SftDataConfig,
    SftRecipe,
)
from megatron_klear.config.rules_parallel import PARALLEL_RULES
from megatron_klear.config.rules_recompute import RECOMPUTE_RULES
from megatron_klear.config.rules_rl import RL_RULES
from megatron_klear.config.rules_servers import SERVER_RULES
from megatron_klear.config.unused import given_but_unused
from megatron_klear.errors import CheckpointError, Fault

Faults = Iterator[Fault]

_REWARDS = ("math", "arithmetic")


def _step_fills_a_batch(rollout: RolloutConfig, batch: BatchConfig) -> Faults:
    prompts, group = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    if prompts * group < batch.global_batch_size:
        reason = f"is more than a step samples: rollout_batch_size {prompts} x n_samples_per_prompt {group}"
        yield Fault("batch.global_batch_size", batch.global_batch_size, reason, f"at most {prompts * group}")


def _too_long(key: str, value: int, other: int, limit_name: str, limit: int) -> Faults:
    # `other` is the prompt's share where there is one: the sum must fit, and `key` is the share to shorten.
    if value + other > limit:
        total = f"with max_prompt_len {other} makes {value + other} tokens, " if other else ""
        hint = f"at most {limit - other}" if limit > other else "shorten data.max_prompt_len as well"
        yield Fault(key, value, f"{total}more than {limit_name} {limit}", hint)


def _micro_batch_tokens(batch: BatchConfig, parallel: ParallelConfig) -> tuple[str, int]:
    """Name and size of the most tokens of a micro-batch: the context-parallel ranks share them."""
    size = parallel.context_parallel_size
    shared = f" x context_parallel_size {size}" if size > 1 else ""
    return f"batch.max_tokens_per_gpu{shared}", batch.max_tokens_per_gpu * size


def _sample_fits_a_micro_batch(
    data: SftDataConfig | PromptDataConfig, batch: BatchConfig, parallel: ParallelConfig
) -> Faults:
    if isinstance(data, SftDataConfig):
        yield from _too_long("data.max_length", data.max_length, 0, *_micro_batch_tokens(batch, parallel))


def _sample_fits_the_model(data: SftDataConfig | PromptDataConfig, shape: Qwen3Shape) -> Faults:
    if isinstance(data, SftDataConfig):
        limit = shape.max_position_embeddings
        yield from _too_long("data.max_length", data.max_length, 0, "the model's max_position_embeddings", limit)


def _response_fits_a_micro_batch(
    data: PromptDataConfig, rollout: RolloutConfig, batch: BatchConfig, parallel: ParallelConfig
) -> Faults:
    key, length = "rollout.rollout_max_response_len", rollout.rollout_max_response_len
    yield from _too_long(key, length, data.max_prompt_len, *_micro_batch_tokens(batch, parallel))


def _response_fits_the_model(data: PromptDataConfig, rollout: RolloutConfig, shape: Qwen3Shape) -> Faults:
    key, limit = "rollout.rollout_max_response_len", shape.max_position_embeddings
    name = "the model's max_position_embeddings"
    yield from _too_long(key, rollout.rollout_max_response_len, data.max_prompt_len, name, limit)


def _evaluation_fits_the_model(evaluation: EvalConfig, shape: Qwen3Shape) -> Faults:
    if evaluation.prompt_data is not None and evaluation.max_response_len >= shape.max_position_embeddings:
        reason = f"leaves no room for a prompt in the model's max_position_embeddings {shape.max_position_embeddings}"
        yield Fault("eval.max_response_len", evaluation.max_response_len, reason, "lower it")


def _one_source_of_weights(model: ModelConfig) -> Faults:
    if model.load is not None and model.random_init:
        reason = f"model.load = {model.load!r} starts from a checkpoint instead"
        yield Fault("model.random_init", True, reason, "keep one of them")


def _source_of_weights_exists(model: ModelConfig) -> Faults:
    if model.load is not None and not Path(model.load).is_dir():
        yield Fault("model.load", model.load, "no such folder", missing_path_hint(Path(model.load)))


def _folder_has_weights(model: ModelConfig, shape: Qwen3Shape) -> Faults:
    if model.load is None and not model.random_init and not any(Path(model.hf_checkpoint).glob("*.safetensors")):
        reason = f"holds a config.json ({shape.model_type}) but no *.safetensors, so there are no weights to start from"
        yield Fault("model.hf_checkpoint", model.hf_checkpoint, reason, "or set model.load or model.random_init")


def _end_below_peak(optimizer: OptimizerConfig) -> Faults:
    if optimizer.min_lr > optimizer.lr:
        reason = f"is above optimizer.lr {optimizer.lr}"
        yield Fault("optimizer.min_lr", optimizer.min_lr, reason, f"at most {optimizer.lr}")


def _constant_rate_does_not_decay(optimizer: OptimizerConfig) -> Faults:
    if optimizer.lr_decay_style != "constant":
        return
    reason, hint = "would have no effect with lr_decay_style 'constant'", "leave it out, or decay: linear, cosine"
    if optimizer.min_lr > 0:
        yield Fault("optimizer.min_lr", optimizer.min_lr, reason, hint)
    if optimizer.lr_decay_iters is not None:
        yield Fault("optimizer.lr_decay_iters", optimizer.lr_decay_iters, reason, hint)


def _decay_ends_in_rl(kind: Kind, optimizer: OptimizerConfig) -> Faults:
    if kind == "rl" and optimizer.lr_decay_style != "constant" and optimizer.lr_decay_iters is None:
        style = optimizer.lr_decay_style
        reason = f"needed with lr_decay_style {style!r}: in rl the number of updates is not known ahead"
        yield Fault("optimizer.lr_decay_iters", NOT_GIVEN, reason, "or lr_decay_style: constant")


def _warmup_ends_before_decay(optimizer: OptimizerConfig) -> Faults:
    warmup, decay = optimizer.lr_warmup_iters, optimizer.lr_decay_iters
    if decay is not None and warmup >= decay:
        reason = f"must be below lr_decay_iters {decay}, which counts the warm-up too"
        yield Fault("optimizer.lr_warmup_iters", warmup, reason, f"at most {decay - 1}")


def _warmup_ends_before_sft(optimizer: OptimizerConfig, train_iters: int) -> Faults:
    # Without lr_decay_iters an sft run decays over train_iters.
    decays = optimizer.lr_decay_style != "constant" and optimizer.lr_decay_iters is None
    if decays and optimizer.lr_warmup_iters >= train_iters:
        reason = f"must be below train_iters {train_iters}, where the decay ends"
        yield Fault("optimizer.lr_warmup_iters", optimizer.lr_warmup_iters, reason, f"at most {train_iters - 1}")


def _reward_is_known(reward: RewardConfig | None) -> Faults:
    if reward is not None and reward.type not in _REWARDS and not is_user_function(reward.type):
        reason = f"expected {', '.join(_REWARDS)}, or a function of your own as {USER_FUNCTION}"
        yield Fault("reward.type", reward.type, reason, did_you_mean(reward.type, _REWARDS))


def _joint_sft_has_samples(loss: AggregationConfig, reward: RewardConfig) -> Faults:
    if loss.sft_loss_coef > 0 and reward.type in _REWARDS and 1.0 not in (reward.correct, reward.incorrect):
        reason = f"would have no effect: it takes samples with reward exactly 1, and reward.correct is {reward.correct}"
        yield Fault("loss.sft_loss_coef", loss.sft_loss_coef, reason, "set reward.correct: 1.0, or leave it out")


def _sft_reward_is_for_evaluation(kind: Kind, reward: RewardConfig | None, evaluation: EvalConfig) -> Faults:
    if kind != "sft":
        return
    if reward is not None and evaluation.prompt_data is None:
        reason = "would have no effect in sft without eval.prompt_data"
        yield Fault("reward.type", reward.type, reason, "leave the section out, or set eval.prompt_data")
    if reward is None and evaluation.prompt_data is not None:
        reason = "eval.prompt_data needs a reward to judge the answers"
        yield Fault("reward.type", NOT_GIVEN, reason, f"for example {' or '.join(_REWARDS)}")


def _data_file(key: str, text: str) -> Faults:
    path = Path(text)
    if path.suffix not in (".jsonl", ".parquet"):
        yield Fault(key, text, f"expected a file ending in .jsonl or .parquet, got {path.suffix or 'no ending'}")
    elif not path.is_file():
        yield Fault(key, text, "no such file", missing_path_hint(path))


def _training_data_exists(data: SftDataConfig | PromptDataConfig) -> Faults:
    if isinstance(data, SftDataConfig):
        yield from _data_file("data.path", data.path)
    else:
        yield from _data_file("data.prompt_data", data.prompt_data)


def _evaluation_data_exists(evaluation: EvalConfig) -> Faults:
    if evaluation.prompt_data is not None:
        yield from _data_file("eval.prompt_data", evaluation.prompt_data)


def _resume_keeps_output(checkpoint: CheckpointConfig) -> Faults:
    if checkpoint.resume and checkpoint.overwrite:
        reason = "excludes checkpoint.resume: one deletes what the other goes on from"
        yield Fault("checkpoint.overwrite", True, reason, "keep one")


def _multiples_beside(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _kept_steps_are_saved(checkpoint: CheckpointConfig) -> Faults:
    every, interval = checkpoint.keep_every, checkpoint.save_interval
    if every is not None and interval is not None and every % interval:
        reason = f"must be a multiple of checkpoint.save_interval {interval}: other steps are not saved"
        yield Fault("checkpoint.keep_every", every, reason, _multiples_beside(every, interval))


def _best_is_measured(checkpoint: CheckpointConfig, evaluation: EvalConfig) -> Faults:
    metric, save = checkpoint.keep_best_metric, checkpoint.save_interval
    if checkpoint.keep_best is None or save is None or not metric.startswith("eval/"):
        return
    without = f"a checkpoint without {metric} is never among the best"
    if evaluation.prompt_data is None:
        reason = f"{without}, and nothing is evaluated without eval.prompt_data"
        yield Fault("checkpoint.keep_best", checkpoint.keep_best, reason, "set it, or another keep_best_metric")
    elif evaluation.eval_interval is None:
        reason = f"needed with checkpoint.keep_best: {without}"
        yield Fault("eval.eval_interval", NOT_GIVEN, reason, f"for example checkpoint.save_interval {save}")
    elif save % evaluation.eval_interval:
        reason = f"must be a multiple of eval.eval_interval {evaluation.eval_interval}: {without}"
        yield Fault("checkpoint.save_interval", save, reason, _multiples_beside(save, evaluation.eval_interval))


def _output_folder_is_its_own(run: RunConfig, checkpoint: CheckpointConfig) -> Faults:
    if not run.output_dir:
        yield Fault("run.output_dir", run.output_dir, "expected the name of a folder")
    elif checkpoint.overwrite and Path.cwd().is_relative_to(Path(run.output_dir).resolve()):
        reason = "checkpoint.overwrite would delete in the folder you are in, or in one above it"
        yield Fault("run.output_dir", run.output_dir, reason, "name a folder of its own")


_RULES: tuple[tuple[Callable[..., Faults], tuple[str, ...]], ...] = (
    *PARALLEL_RULES,
    (_step_fills_a_batch, ("rollout", "batch")),
    (_sample_fits_a_micro_batch, ("data", "batch", "parallel")),
    (_sample_fits_the_model, ("data", "shape")),
    (_response_fits_a_micro_batch, ("data", "rollout", "batch", "parallel")),
    (_response_fits_the_model, ("data", "rollout", "shape")),
    (_evaluation_fits_the_model, ("eval", "shape")),
    (_one_source_of_weights, ("model",)),
    (_source_of_weights_exists, ("model",)),
    (_folder_has_weights, ("model", "shape")),
    (_end_below_peak, ("optimizer",)),
    (_constant_rate_does_not_decay, ("optimizer",)),
    (_decay_ends_in_rl, ("kind", "optimizer")),
    (_warmup_ends_before_decay, ("optimizer",)),
    (_warmup_ends_before_sft, ("optimizer", "train_iters")),
    (_reward_is_known, ("reward",)),
    (_joint_sft_has_samples, ("loss", "reward")),
    (_sft_reward_is_for_evaluation, ("kind", "reward", "eval")),
    (_training_data_exists, ("data",)),
    (_evaluation_data_exists, ("eval",)),
    (_resume_keeps_output, ("checkpoint",)),
    (_kept_steps_are_saved, ("checkpoint",)),
    (_best_is_measured, ("checkpoint", "eval")),
    (_output_folder_is_its_own, ("run", "checkpoint")),
    *RECOMPUTE_RULES,
    *RL_RULES,
    *SERVER_RULES,
)


def check_sections(sections: Mapping[str, Any], *, kind: Kind, world_size: int | None) -> list[Fault]:
    """Every fault between the given sections (those that validated, by name) and with the files they name, by key."""
    facts: dict[str, Any] = {"kind": kind, **sections}
    faults = list(given_but_unused(sections))
    if world_size is not None:
        facts["world_size"] = world_size
    if "model" in facts:
        folder = facts["model"].hf_checkpoint
        try:
            facts["shape"] = model_shape(facts["model"])
        except CheckpointError as error:
            hint = "" if Path(folder).is_dir() else missing_path_hint(Path(folder))
            faults.append(Fault("model.hf_checkpoint", folder, str(error), hint))
    for rule, needs in _RULES:
        if all(name in facts for name in needs):
            faults.extend(rule(*(facts[name] for name in needs)))
    return sorted(faults, key=lambda fault: fault.key)


def check_recipe(recipe: Recipe, *, world_size: int | None = None) -> list[Fault]:
    """Every fault of a recipe that its types cannot catch, by key; empty if it can run."""
    kind: Kind = "sft" if isinstance(recipe, SftRecipe) else "rl"
    return check_sections(dict(recipe), kind=kind, world_size=world_size)
