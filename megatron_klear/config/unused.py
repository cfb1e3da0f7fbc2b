"""Settings that have no effect given the others: an error where they are given, left out where a recipe is dumped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_klear.config.loss import AdvantageConfig, AggregationConfig, CorrectionConfig, KlConfig
from megatron_klear.config.model import ModelConfig
from megatron_klear.config.recipe import (
    CheckpointConfig,
    EvalConfig,
    ExportConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    SelectionConfig,
)
from megatron_klear.config.servers import ServersConfig
from megatron_klear.errors import Fault

# Names of settings without effect, each with the reason: the words after "would have no effect".
_Unused = Iterator[tuple[str, str]]


def _unused_in_parallel(parallel: ParallelConfig) -> _Unused:
    if parallel.recompute_granularity != "full":
        reason = "without parallel.recompute_granularity full"
        yield from ((name, reason) for name in ("recompute_method", "recompute_num_layers"))
    if parallel.recompute_granularity != "selective":
        yield "recompute_modules", "without parallel.recompute_granularity selective"


def _unused_in_eval(evaluation: EvalConfig) -> _Unused:
    if evaluation.prompt_data is None:
        yield from ((name, "without eval.prompt_data") for name in EvalConfig.model_fields if name != "prompt_data")


def _unused_in_export(export: ExportConfig) -> _Unused:
    if export.hf_dir is None:
        yield "max_shard_bytes", "without export.hf_dir"


def _unused_in_model(model: ModelConfig) -> _Unused:
    if model.yarn_factor is None:
        yield "yarn_original_max_position_embeddings", "without model.yarn_factor"


def _unused_in_reward(reward: RewardConfig) -> _Unused:
    if reward.type != "math":
        yield from ((name, "with a reward other than math") for name in ("timeout_s", "num_workers"))


def _unused_in_loss(loss: AggregationConfig) -> _Unused:
    if loss.loss_agg_mode != "seq-mean-token-sum-norm":
        yield "loss_scale_factor", f"with loss.loss_agg_mode {loss.loss_agg_mode}, only with seq-mean-token-sum-norm"


def _unused_in_kl(kl: KlConfig) -> _Unused:
    if kl.kl_coef == 0:
        yield from ((name, "while kl.kl_coef is 0") for name in KlConfig.model_fields if name != "kl_coef")


def _unused_in_correction(correction: CorrectionConfig) -> _Unused:
    if correction.type in ("none", "tis", "mis"):
        yield "low", f"with correction.type {correction.type}, only with icepop or sequence_mask"
    if correction.type == "none":
        yield "high", "with correction.type none"


def _unused_in_advantage(advantage: AdvantageConfig) -> _Unused:
    if advantage.type in ("rloo", "gae"):
        yield from ((name, f"with advantage.type {advantage.type}") for name in ("std", "eps"))
    elif advantage.std == "none":
        yield "eps", "with advantage.std none"


def _unused_in_selection(selection: SelectionConfig) -> _Unused:
    if selection.overlong_buffer_len == 0:
        yield "overlong_penalty_factor", "without selection.overlong_buffer_len"
    if not selection.drop_zero_std_groups:
        yield "zero_std_metric", "with selection.drop_zero_std_groups false"


def _unused_in_rollout(rollout: RolloutConfig) -> _Unused:
    if rollout.engine == "embedded":
        names = ("max_async_steps", "over_sampling_batch_size", "partial_rollout")
        yield from ((name, "with rollout.engine embedded, which waits for all it was asked") for name in names)
    else:
        yield "max_running_requests", f"with rollout.engine {rollout.engine}, only with embedded"
        if rollout.max_async_steps > 0:
            yield "over_sampling_batch_size", "with rollout.max_async_steps: nothing is cut short, every group is used"
        if rollout.over_sampling_batch_size is None:
            yield "partial_rollout", "without rollout.over_sampling_batch_size: nothing is cut short"


def _unused_in_servers(servers: ServersConfig) -> _Unused:
    if servers.num_servers == 0:
        names = ("launch_python", "launch_port", "launch_args", "launch_env", "max_restarts")
        yield from ((name, "without servers.num_servers") for name in names)
    for transports, names in _OF_TRANSPORTS.items():
        if servers.transport not in transports:
            yield from ((name, f"with servers.transport {servers.transport}") for name in names)


_OF_TRANSPORTS = {
    ("disk",): ("weights_dir", "keep_weights"),
    ("tensor", "broadcast"): ("bucket_bytes",),
    ("broadcast",): ("broadcast_host", "broadcast_port"),
}


def _unused_in_checkpoint(checkpoint: CheckpointConfig) -> _Unused:
    keep = ("keep_every", "keep_best")
    if checkpoint.save_interval is None:
        reason = "without checkpoint.save_interval: one checkpoint is saved, at the end"
        yield from ((name, reason) for name in ("async_save", "keep_last", *keep))
    elif checkpoint.keep_last is None:
        yield from ((name, "without checkpoint.keep_last: nothing is deleted") for name in keep)
    if checkpoint.keep_best is None:
        yield from ((name, "without checkpoint.keep_best") for name in ("keep_best_metric", "keep_best_mode"))
    if checkpoint.resume is False:
        names = ("ckpt_step", "verify_checksums", "allow_recipe_changes")
        yield from ((name, "without checkpoint.resume") for name in names)


_BY_SECTION: Mapping[str, Callable[[Any], _Unused]] = {
    "checkpoint": _unused_in_checkpoint,
    "eval": _unused_in_eval,
    "export": _unused_in_export,
    "model": _unused_in_model,
    "parallel": _unused_in_parallel,
    "reward": _unused_in_reward,
    "loss": _unused_in_loss,
    "kl": _unused_in_kl,
    "correction": _unused_in_correction,
    "advantage": _unused_in_advantage,
    "selection": _unused_in_selection,
    "rollout": _unused_in_rollout,
    "servers": _unused_in_servers,
}


def unused_keys(sections: Mapping[str, Any]) -> dict[str, str]:
    """Dotted keys that have no effect given the other settings, with the reason."""
    present = ((section, find) for section, find in _BY_SECTION.items() if sections.get(section) is not None)
    return {f"{section}.{name}": reason for section, find in present for name, reason in find(sections[section])}


def given_but_unused(sections: Mapping[str, Any]) -> Iterator[Fault]:
    """A fault for every such key that the recipe gives."""
    for key, reason in unused_keys(sections).items():
        section, name = key.split(".")
        config = sections[section]
        if name in config.model_fields_set:
            yield Fault(key, config.model_dump()[name], f"would have no effect {reason}", "leave it out")
