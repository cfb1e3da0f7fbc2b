"""RL runs that take old log-probs from a pass, from the engine, or from the update itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from e2e.runs import Bench
from megatron_klear.report.samples import read_samples

ONE_UPDATE = {"batch.global_batch_size": 16}
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


def run(bench: Bench, old_logprobs: str, name: str, changes: dict[str, Any], world_size: int = 1) -> str:
    """Its output folder's name."""
    output = f"rl_{name}_{old_logprobs}"
    bench.succeed(
        "rl", bench.recipe("rl", output, changes | {"train.old_logprobs": old_logprobs}), world_size=world_size
    )
    return output


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [({}, 1), ({"loss.type": "gspo"}, 1), ({"parallel.pipeline_model_parallel_size": 2}, 2), ({}, 2)],
    ids=["one rank", "gspo", "2 stages", "2 replicas"],
)
def test_the_updates_own_log_probs_make_the_run_of_a_pass(sft: Bench, changes: dict[str, Any], world_size: int) -> None:
    name = f"{len(changes)}{changes.get('loss.type', '')}{world_size}"
    found, wanted = (run(sft, old, name, ONE_UPDATE | changes, world_size) for old in ("current", "recompute"))
    assert sft.metrics(found) == sft.metrics(wanted)
    assert sft.metrics(found)[0][DIFFERENCE] < 1e-5
    for name, tensor in sft.exported(wanted).items():
        assert torch.equal(sft.exported(found)[name], tensor), name
    for _, sample in read_samples(sft.folder / found):
        assert set(sample.ratios) == {1.0} and set(sample.cells) == {"in_range"}
        assert len(sample.ratios) == len(sample.tokens)


def test_ratios_can_be_to_the_engine(sft: Bench) -> None:
    found, wanted = (run(sft, old, "engine", {}) for old in ("rollout", "recompute"))
    for line, reference in zip(sft.metrics(found), sft.metrics(wanted), strict=True):
        assert line["train/num_updates"] == reference["train/num_updates"]
        # Only the first update of a step is on the engine's weights, and so is the difference.
        assert 0 < line[DIFFERENCE] < 1e-5
        assert line["train/ratio_max"] == pytest.approx(reference["train/ratio_max"], abs=1e-3)
        assert line["train/loss"] == pytest.approx(reference["train/loss"], abs=1e-3)
    # The first is so alone: the deviation is the engine's rounding, and not 0 as with a pass.
    one = run(sft, "rollout", "engine_once", ONE_UPDATE)
    assert all(0 < line["train/ratio_deviation_max"] < 1e-4 for line in sft.metrics(one))


def test_a_loss_of_your_own_finds_the_engines(sft: Bench) -> None:
    own = {"loss": {"type": "helpers.losses:reinforce"}}
    lines = sft.metrics(run(sft, "rollout", "own", own))
    assert len(lines) == 3 and all(line[DIFFERENCE] < 1e-5 for line in lines)


def test_saved_rollouts_of_more_samples_than_an_update_are_refused(sft: Bench) -> None:
    rollouts = str(sft.folder / "rollouts_of_16")
    # Without spread there would be too few.
    keep = {"selection.drop_zero_std_groups": False, "rollout.num_rollout": 1}
    sft.succeed("rl", sft.recipe("rl", "rl_16", ONE_UPDATE | keep | {"debug.save_rollout_data": rollouts}))
    fewer = {"rollout.rollout_batch_size": 2, "batch.global_batch_size": 8, "train.old_logprobs": "current"}
    recipe = sft.recipe("rl", "rl_8", keep | fewer | {"debug.load_rollout_data": rollouts})
    assert (
        "step 1 has 16 samples, in updates of batch.global_batch_size 8 several: from the second on ratios are not 1,"
        " as train.old_logprobs current takes them to be"
    ) in sft.refuse("rl", recipe)
