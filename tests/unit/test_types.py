"""The nouns that do something."""

from __future__ import annotations

import pytest
import torch

from helpers.micro_batches import micro_batch_of_lengths
from megatron_klear.types import Prompt, RolloutBatch, Sample, SampleGroup, StepReport, StopReason, Topology

PROMPT = Prompt("p", (5, 6))


def test_a_sample_starts_as_its_prompt() -> None:
    sample = Sample("s", PROMPT)
    assert (sample.token_ids, sample.loss_mask, sample.rollout_logprobs) == ([5, 6], [0, 0], [0.0, 0.0])
    assert (sample.response_ids, sample.num_loss_tokens, sample.stop_reason) == ([], 0, None)


def test_rows_grow_together() -> None:
    sample = Sample("s", PROMPT)
    sample.append_response([7, 8], [-0.1, -0.2], weight_version=3, stop_reason="stop")
    assert sample.token_ids == [5, 6, 7, 8]
    assert sample.loss_mask == [0, 0, 1, 1]
    assert sample.rollout_logprobs == [0.0, 0.0, -0.1, -0.2]
    assert (sample.response_ids, sample.num_loss_tokens, sample.stop_reason) == ([7, 8], 2, "stop")


def test_a_response_in_parts_remembers_its_oldest_and_newest_weights() -> None:
    sample = Sample("s", PROMPT)
    parts: list[tuple[int, StopReason]] = [(4, "abort"), (3, "abort"), (6, "length")]
    for version, reason in parts:
        sample.append_response([7], [-0.1], weight_version=version, stop_reason=reason)
    assert (sample.weight_version_min, sample.weight_version_max) == (3, 6)
    assert (sample.response_ids, sample.stop_reason) == ([7, 7, 7], "length")


def test_the_first_weight_version_of_a_sample_can_be_zero() -> None:
    sample = Sample("s", PROMPT)
    sample.append_response([7], [-0.1], weight_version=0, stop_reason="abort")
    sample.append_response([7], [-0.1], weight_version=2, stop_reason="stop")
    assert (sample.weight_version_min, sample.weight_version_max) == (0, 2)


def test_tokens_without_logprobs_are_refused_and_change_nothing() -> None:
    sample = Sample("s", PROMPT)
    message = "sample s: 2 response tokens but 1 log-probs; an engine must return one log-prob for each token"
    with pytest.raises(ValueError, match=message):
        sample.append_response([7, 8], [-0.1], weight_version=1, stop_reason="stop")
    assert (sample.token_ids, sample.loss_mask, sample.rollout_logprobs) == ([5, 6], [0, 0], [0.0, 0.0])
    assert sample.weight_version_min is None


def test_samples_do_not_share_rows() -> None:
    first, second = Sample("a", PROMPT), Sample("b", PROMPT)
    first.append_response([7], [-0.1], weight_version=1, stop_reason="stop")
    assert second.token_ids == [5, 6] and PROMPT.token_ids == (5, 6)


def test_a_rollout_lists_samples_group_after_group() -> None:
    groups = tuple(
        SampleGroup(PROMPT, tuple(Sample(f"{g}.{i}", PROMPT) for i in range(size))) for g, size in enumerate((2, 1, 3))
    )
    assert [s.sample_id for s in RolloutBatch(groups).samples] == ["0.0", "0.1", "1.0", "2.0", "2.1", "2.2"]


@pytest.mark.parametrize(("rank", "first", "last"), [(0, True, False), (1, False, False), (2, False, True)])
def test_stages_know_their_ends(rank: int, first: bool, last: bool) -> None:
    topology = Topology(pipeline_rank=rank, pipeline_size=3)
    assert (topology.is_first_stage, topology.is_last_stage) == (first, last)


def test_one_stage_is_both_ends() -> None:
    assert Topology().is_first_stage and Topology().is_last_stage


def test_a_penalty_changes_what_advantages_see_and_not_what_the_reward_said() -> None:
    sample = Sample("s", PROMPT, reward=1.0)
    assert sample.training_reward == 1.0
    sample.shaped_reward = 0.0
    assert (sample.training_reward, sample.reward) == (0.0, 1.0)
    assert Sample("s", PROMPT).training_reward is None


def test_a_micro_batch_starts_without_annotations_and_with_policy_weights_of_one() -> None:
    batch = micro_batch_of_lengths([3, 2])
    for row in (batch.old_logprobs, batch.old_entropy, batch.reference_logprobs, batch.values, batch.returns):
        assert torch.equal(row, torch.zeros(5))
    assert torch.equal(batch.policy_weights, torch.ones(5))


def test_a_joined_report_keeps_its_own_numbers() -> None:
    policy = StepReport({"train/loss": 1.0, "both": 1.0}, grad_norm=2.0, lr=3.0)
    critic = StepReport({"critic/loss": 4.0, "both": 9.0}, grad_norm=5.0, lr=6.0, skipped=True)
    joined = policy.joined(critic)
    assert joined == StepReport({"train/loss": 1.0, "both": 1.0, "critic/loss": 4.0}, 2.0, 3.0, skipped=False)
