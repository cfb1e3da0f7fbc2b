"""Rollouts that are saved by one run and trained on by another."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from megatron_klear.errors import DataError
from megatron_klear.rollout.replay import load_rollout, save_rollout, step_file
from megatron_klear.types import Prompt, RolloutBatch, Sample, SampleGroup, StopReason


def make_rollout() -> RolloutBatch:
    groups = []
    for g, answer in enumerate(("42", 'x\u2028y \u00e9\n"', "")):
        prompt = Prompt(f"p{g}", (1, 2, 3 + g), answer=answer, source="math")
        reasons: tuple[StopReason, ...] = ("stop", "length")
        samples = []
        for i, reason in enumerate(reasons):
            sample = Sample(f"{g}.{i}", prompt, reward=[1.0, -0.1][i], reward_reason="correct" if i == 0 else "")
            sample.append_response([7] * (i + 1), [-1 / 3] * (i + 1), weight_version=4 + i, stop_reason=reason)
            samples.append(sample)
        samples[1].shaped_reward = -0.35
        groups.append(SampleGroup(prompt, tuple(samples)))
    return RolloutBatch(tuple(groups))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    rollout = make_rollout()
    path = save_rollout(tmp_path / "new" / "folder", 7, rollout)
    assert path == step_file(tmp_path / "new" / "folder", 7)
    assert path.name == "rollout_000007.jsonl"
    assert load_rollout(tmp_path / "new" / "folder", 7).groups == rollout.groups


def test_advantages_are_made_anew(tmp_path: Path) -> None:
    """The run that loads may estimate them another way."""
    rollout = make_rollout()
    for sample in rollout.samples:
        sample.advantage = 3.0
    save_rollout(tmp_path, 0, rollout)
    back = load_rollout(tmp_path, 0)
    assert [sample.advantage for sample in back.samples] == [0.0] * 6
    assert [dataclasses.replace(sample, advantage=3.0) for sample in back.samples] == rollout.samples


def test_a_sample_drawn_under_several_weights_keeps_its_oldest(tmp_path: Path) -> None:
    (first, *_) = make_rollout().groups
    first.samples[0].append_response([9], [-0.5], weight_version=9, stop_reason="stop")
    save_rollout(tmp_path, 0, RolloutBatch((first,)))
    back = load_rollout(tmp_path, 0).samples[0]
    assert (back.weight_version_min, back.weight_version_max) == (4, 9)
    assert back == first.samples[0]


def test_a_logprob_of_minus_infinity_survives(tmp_path: Path) -> None:
    rollout = make_rollout()
    rollout.samples[0].rollout_logprobs[-1] = -math.inf
    save_rollout(tmp_path, 0, rollout)
    assert load_rollout(tmp_path, 0).samples[0].rollout_logprobs[-1] == -math.inf


def test_steps_have_files_of_their_own_and_an_empty_one_stays_empty(tmp_path: Path) -> None:
    save_rollout(tmp_path, 1, make_rollout())
    save_rollout(tmp_path, 2, RolloutBatch(()))
    assert len(load_rollout(tmp_path, 1).groups) == 3
    assert load_rollout(tmp_path, 2).groups == ()


def test_a_step_that_was_not_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rollout_000003\.jsonl does not exist; .*debug\.save_rollout_data"):
        load_rollout(tmp_path, 3)


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[]",
        "7",
        '{"prompt_id": "p"}',
        '{"prompt_id": "p", "prompt_ids": [1], "answer": "", "source": "", "samples": [3]}',
        '{"prompt_id": "p", "prompt_ids": [1], "answer": "", "source": "", "samples": [{"sample_id": "s",'
        ' "response_ids": [1, 2], "rollout_logprobs": [-1.0], "reward": 1.0, "shaped_reward": null, "reason": "",'
        ' "pieces": [[2, 0, ""]], "stop_reason": "stop"}]}',
        '{"prompt_id": "p", "prompt_ids": [1], "answer": "", "source": "", "samples": [{"sample_id": "s",'
        ' "response_ids": [1, 2], "rollout_logprobs": [-1.0, -1.0], "reward": 1.0, "shaped_reward": null, "reason": "",'
        ' "pieces": [[1, 0, ""]], "stop_reason": "stop"}]}',
        "",
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = save_rollout(tmp_path, 0, make_rollout())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[2]]))
    with pytest.raises(
        DataError, match=r"line 2 of .*rollout_000000\.jsonl is not a saved group .*save the rollout again"
    ):
        load_rollout(tmp_path, 0)
