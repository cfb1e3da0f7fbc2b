"""What must hold between the settings of reinforcement learning; see `rules` for how a rule works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_klear.config.loss import (
    AdvantageConfig,
    AggregationConfig,
    CorrectionConfig,
    CriticConfig,
    KlConfig,
    PolicyLossConfig,
    UserLossConfig,
)
from megatron_klear.config.names import NOT_GIVEN, USER_FUNCTION, is_user_function, missing_path_hint
from megatron_klear.config.recipe import BatchConfig, DebugConfig, RolloutConfig, SelectionConfig, TrainConfig
from megatron_klear.errors import Fault

Faults = Iterator[Fault]

_WITHOUT_GROUPS = ("reinforce_pp", "gae")
_TRACKER = "latest_checkpointed_iteration.txt"


def _own_loss_is_a_function(loss: AggregationConfig) -> Faults:
    if isinstance(loss, UserLossConfig) and not is_user_function(loss.type):
        yield Fault("loss.type", loss.type, f"a loss of your own is named as {USER_FUNCTION}")


def _sum_norm_has_its_constant(loss: AggregationConfig) -> Faults:
    if loss.loss_agg_mode == "seq-mean-token-sum-norm" and loss.loss_scale_factor is None:
        reason = "needed with loss_agg_mode seq-mean-token-sum-norm: the constant that sums over tokens are divided by"
        yield Fault("loss.loss_scale_factor", NOT_GIVEN, reason, "for example rollout.rollout_max_response_len")


def _reference_exists(kl: KlConfig) -> Faults:
    if kl.ref_load is None:
        return
    folder = Path(kl.ref_load)
    if not folder.is_dir():
        yield Fault("kl.ref_load", kl.ref_load, "no such folder", missing_path_hint(folder))
    elif not (folder / _TRACKER).is_file() and not (folder / "config.json").is_file():
        reason = f"holds neither {_TRACKER} (a Megatron checkpoint) nor config.json (a Hugging Face folder)"
        hint = "name the parent of iter_*" if folder.name.startswith("iter_") else ""
        yield Fault("kl.ref_load", kl.ref_load, reason, hint)


def _correction_keeps_a_range(correction: CorrectionConfig) -> Faults:
    low, high = correction.low, correction.high
    if correction.type in ("icepop", "sequence_mask") and low >= high:
        reason = f"must be below correction.high {high}: {correction.type} keeps what lies between"
        yield Fault("correction.low", low, reason)


def _critic_is_for_gae(advantage: AdvantageConfig, critic: CriticConfig | None) -> Faults:
    if advantage.type == "gae" and critic is None:
        reason = "needed with advantage.type gae, which learns values"
        yield Fault("critic", NOT_GIVEN, reason, "critic: {} takes every default")
    if advantage.type != "gae" and critic is not None:
        reason = f"would have no effect with advantage.type {advantage.type}, only with gae"
        yield Fault("critic", critic.model_dump(exclude_unset=True), reason, "leave it out, or advantage.type: gae")


def _groups_have_spread(rollout: RolloutConfig, advantage: AdvantageConfig, selection: SelectionConfig) -> Faults:
    if rollout.n_samples_per_prompt > 1:
        return
    if advantage.type not in _WITHOUT_GROUPS:
        reason = f"with advantage.type {advantage.type} a group of one has no spread to learn from"
        hint = "at least 2, or advantage.type reinforce_pp or gae with selection.drop_zero_std_groups false"
        yield Fault("rollout.n_samples_per_prompt", 1, reason, hint)
    elif selection.drop_zero_std_groups:
        reason = "would leave out everything: with n_samples_per_prompt 1 no group has spread"
        yield Fault("selection.drop_zero_std_groups", True, reason, "set it to false")


def _buffer_lies_in_the_response(selection: SelectionConfig, rollout: RolloutConfig) -> Faults:
    buffer, longest = selection.overlong_buffer_len, rollout.rollout_max_response_len
    if buffer > longest:
        reason = f"is more than rollout.rollout_max_response_len {longest}, at whose end it lies"
        yield Fault("selection.overlong_buffer_len", buffer, reason, f"at most {longest}")


def _one_half_alone(debug: DebugConfig) -> Faults:
    if not debug.rollout_only:
        return
    if debug.load_rollout_data is not None:
        reason = "excludes debug.load_rollout_data: one samples without training, the other trains without sampling"
        yield Fault("debug.rollout_only", True, reason, "keep one of them")
    elif debug.save_rollout_data is None:
        reason = "needed with debug.rollout_only: nothing would be left of the work"
        yield Fault("debug.save_rollout_data", NOT_GIVEN, reason, "name a folder")


def _saved_rollouts_exist(debug: DebugConfig) -> Faults:
    folder = debug.load_rollout_data
    if folder is not None and not Path(folder).is_dir():
        yield Fault("debug.load_rollout_data", folder, "no such folder", missing_path_hint(Path(folder)))


def _old_logprobs_are_there(
    train: TrainConfig, loss: AggregationConfig, correction: CorrectionConfig, kl: KlConfig
) -> Faults:
    """What needs the trainer's own log-probs or entropies of before the update."""
    old = train.old_logprobs
    if old == "recompute":
        return
    if isinstance(loss, PolicyLossConfig) and loss.erc is not None:
        yield Fault("train.old_logprobs", old, "loss.erc needs the entropies of a forward pass", "recompute")
    if correction.type != "none":
        reason = f"correction.type {correction.type} needs the trainer's log-probs beside the engine's"
        yield Fault("train.old_logprobs", old, reason, "recompute, or correction.type none")
    if old == "current" and isinstance(loss, UserLossConfig):
        yield Fault("train.old_logprobs", old, "a loss of your own reads old_logprobs", "recompute or rollout")
    if old == "current" and kl.kl_coef > 0 and kl.kl_in == "reward":
        reason = "a KL penalty in the reward needs log-probs before the update"
        yield Fault("train.old_logprobs", old, reason, "recompute or rollout")


def _current_is_one_update(train: TrainConfig, rollout: RolloutConfig, batch: BatchConfig) -> Faults:
    whole = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if train.old_logprobs == "current" and batch.global_batch_size < whole:
        reason = (
            f"a step of {whole} samples in updates of batch.global_batch_size {batch.global_batch_size} is several:"
            " from the second on, the ratio to the policy that sampled is not 1"
        )
        yield Fault("train.old_logprobs", "current", reason, f"recompute, or batch.global_batch_size {whole}")


RL_RULES: tuple[tuple[Callable[..., Faults], tuple[str, ...]], ...] = (
    (_own_loss_is_a_function, ("loss",)),
    (_sum_norm_has_its_constant, ("loss",)),
    (_reference_exists, ("kl",)),
    (_correction_keeps_a_range, ("correction",)),
    (_critic_is_for_gae, ("advantage", "critic")),
    (_groups_have_spread, ("rollout", "advantage", "selection")),
    (_buffer_lies_in_the_response, ("selection", "rollout")),
    (_old_logprobs_are_there, ("train", "loss", "correction", "kl")),
    (_current_is_one_update, ("train", "rollout", "batch")),
    (_one_half_alone, ("debug",)),
    (_saved_rollouts_exist, ("debug",)),
)
"""Each rule with the sections it needs."""
