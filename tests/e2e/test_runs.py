"""SFT and RL from a recipe to an exported model: what is on disk when they are done, and going on after a stop."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dist.pool import ROOT
from e2e.runs import Bench
from helpers.checkpoints import tensors_of
from megatron_klear.config.load import load_recipe
from megatron_klear.report.samples import read_samples


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def test_sft_writes_down_what_it_did(sft: Bench) -> None:
    lines = sft.metrics("sft")
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == [1, 2, 3, 4]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    # ln 64 for a random model; four updates teach it which characters there are.
    assert losses[0] == pytest.approx(math.log(64), abs=0.15) and losses[-1] < losses[0] - 0.2
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 4]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
    folder = sft.folder / "sft"
    assert load_recipe(folder / "recipe.yaml") == load_recipe(sft.folder / "sft.yaml")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        ".lock",
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]


def test_rl_writes_down_what_it_did(rl: Bench) -> None:
    lines = rl.metrics("rl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    updates_before = [0]
    for line in lines:
        # Samples of groups with a spread, in updates of at most 8.
        trained = 16 - line.get("rollout/dropped/zero_std", 0)
        assert line["rollout/num_samples"] == 16 and line["train/num_updates"] == math.ceil(trained / 8) > 0
        updates_before.append(updates_before[-1] + int(line["train/num_updates"]))
        assert 0 <= line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["rollout/reward"] < 0 and line["train/grad_norm"] > 0
    samples = read_samples(rl.folder / "rl")
    assert set(Counter(step for step, _ in samples)) == {1, 2, 3}
    for step, sample in samples:
        assert sample.versions == (updates_before[step - 1],)
        text = sample.response.removesuffix("<|im_end|>")
        assert sample.reward == (-1.0 if sample.is_truncated else -len(text) / 10)
        # A rollout's log-probs are the trainer's before the step; after one update they have moved a little.
        old = [c - math.log(r) for c, r in zip(sample.current_logprobs, sample.ratios, strict=True)]
        assert old == pytest.approx(list(sample.rollout_logprobs), abs=1e-4)
    assert load_recipe(rl.folder / "rl" / "recipe.yaml") == load_recipe(rl.folder / "rl.yaml")
    assert (rl.folder / "rl" / "checkpoints" / "iter_0000003").is_dir()


def test_the_exported_folder_is_a_model_and_a_tokenizer(rl: Bench) -> None:
    hf = rl.folder / "rl" / "hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hf), AutoTokenizer.from_pretrained(hf)
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 6, 64)
    # The same weights as in the checkpoint, and other ones than rl began with.
    sizes = ("--params-dtype", "float32")
    verified = rl.succeed("convert", "verify", "--hf", hf, "--megatron", rl.folder / "rl" / "checkpoints", *sizes)
    assert verified.out.startswith("OK: 86 positions")
    started = rl.run("convert", "verify", "--hf", hf, "--megatron", rl.folder / "sft" / "checkpoints", *sizes)
    assert started.code == 1 and started.out.startswith("DIFFERENT")


def test_a_run_repeats_itself(rl: Bench) -> None:
    rl.succeed("rl", rl.recipe("rl", "rl_again"))
    assert rl.metrics("rl_again") == rl.metrics("rl")
    assert_equal(rl.exported("rl_again"), rl.exported("rl"))


PP2 = {"parallel.pipeline_model_parallel_size": 2}
TP2PP2 = {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize(
    ("name", "dtype", "world_size", "layout"),
    [("one", "float32", 1, {}), ("tp2pp2", "bfloat16", 4, TP2PP2), ("dp2", "bfloat16", 2, {})],
    ids=["one float32", "tp2pp2 bfloat16", "dp2 bfloat16"],
)
def test_a_run_that_goes_on_is_the_unbroken_run(
    rl: Bench, kind: str, name: str, dtype: str, world_size: int, layout: dict[str, int], tmp_path: Path
) -> None:
    key, total, first = ("train_iters", 4, 2) if kind == "sft" else ("rollout.num_rollout", 3, 1)
    changes = layout | {"model.params_dtype": dtype}
    whole, parts = (rl.recipe(kind, f"{kind}_{name}_{part}", changes) for part in ("whole", "parts"))
    rl.succeed(kind, whole, f"{key}={total}", world_size=world_size)
    rl.succeed(kind, parts, f"{key}={first}", world_size=world_size)
    rl.succeed(kind, parts, f"{key}={total}", "checkpoint.resume=true", world_size=world_size)
    found, wanted = rl.folder / parts.stem, rl.folder / whole.stem
    assert rl.metrics(parts.stem) == rl.metrics(whole.stem)
    assert_equal(rl.exported(parts.stem), rl.exported(whole.stem))
    assert read_samples(found) == read_samples(wanted)
    last = f"checkpoints/iter_{total:07d}"
    assert_equal(tensors_of(found / last), tensors_of(wanted / last))
    assert (found / last / "state.json").read_text() == (wanted / last / "state.json").read_text()


def test_what_was_done_after_the_last_checkpoint_is_done_again(rl: Bench) -> None:
    # As after a kill at step 3: lines of three steps, a checkpoint of two.
    recipe = rl.recipe("rl", "rl_killed", {"checkpoint.save_interval": 2})
    rl.succeed("rl", recipe)
    checkpoints = rl.folder / "rl_killed" / "checkpoints"
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    rl.succeed("rl", recipe, "checkpoint.resume=true")
    assert rl.metrics("rl_killed") == rl.metrics("rl")
    assert_equal(rl.exported("rl_killed"), rl.exported("rl"))


def test_a_used_folder_is_refused_cleared_or_gone_on_from(rl: Bench) -> None:
    recipe = rl.recipe("rl", "rl_used", {"rollout.num_rollout": 1})
    text = rl.refuse("rl", recipe, "checkpoint.resume=true")
    assert f"checkpoint.resume is true but {rl.folder}/rl_used/checkpoints holds no checkpoint" in text
    rl.succeed("rl", recipe)
    before = rl.metrics("rl_used")
    text = rl.refuse("rl", recipe)
    assert f"{rl.folder}/rl_used/recipe.yaml belongs to an earlier run; expected an empty output_dir" in text
    assert "checkpoint.resume=true, delete it with checkpoint.overwrite=true, or choose another run.output_dir" in text
    assert rl.metrics("rl_used") == before
    # What the run did not write is not the run's to delete.
    (rl.folder / "rl_used" / "notes.txt").write_text("mine")
    rl.succeed("rl", recipe, "checkpoint.overwrite=true", "run.seed=5")
    assert [line["step"] for line in rl.metrics("rl_used")] == [1] and rl.metrics("rl_used") != before
    assert (rl.folder / "rl_used" / "notes.txt").read_text() == "mine"
    assert len(list((rl.folder / "rl_used" / "tensorboard").iterdir())) == 1
    # A resumed run that has nothing left to do ends well and changes nothing.
    done = rl.metrics("rl_used")
    rl.succeed("rl", recipe, "run.seed=5", "checkpoint.resume=true")
    assert rl.metrics("rl_used") == done


def test_a_resume_with_another_data_order_is_refused(rl: Bench) -> None:
    recipe = rl.recipe("rl", "rl_seeds", {"rollout.num_rollout": 1})
    rl.succeed("rl", recipe)
    text = rl.refuse("rl", recipe, "rollout.num_rollout=2", "checkpoint.resume=true", "run.seed=5")
    assert "run.seed = 5: was 1234 when the checkpoint was saved" in text


def test_a_resume_with_other_data_of_the_same_size_is_refused(rl: Bench, tmp_path: Path) -> None:
    recipe = rl.recipe("rl", "rl_data", {"rollout.num_rollout": 1})
    rl.succeed("rl", recipe)
    moved, other = tmp_path / "moved.jsonl", tmp_path / "other.jsonl"
    rows = (rl.folder / "data" / "rl.jsonl").read_text().splitlines(keepends=True)
    moved.write_text("".join(rows))
    other.write_text("".join(reversed(rows)))
    more = ("rollout.num_rollout=2", "checkpoint.resume=true")
    text = rl.refuse("rl", recipe, *more, f"data.prompt_data={other}")
    assert "data order was made with fingerprint = " in text
    rl.succeed("rl", recipe, *more, f"data.prompt_data={moved}")


def test_a_resume_with_another_tokenizer_is_refused(rl: Bench, tmp_path: Path) -> None:
    recipe = rl.recipe("rl", "rl_tokens", {"rollout.num_rollout": 1})
    rl.succeed("rl", recipe)
    model = tmp_path / "model"
    shutil.copytree(rl.folder / "data" / "model", model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    more = ("rollout.num_rollout=2", "checkpoint.resume=true", f"model.hf_checkpoint={model}")
    text = rl.refuse("rl", recipe, *more)
    assert "was trained with another tokenizer or chat template" in text


def test_a_checkpoint_of_another_kind_of_run_is_refused_even_if_changes_are_allowed(sft: Bench) -> None:
    saved = {"checkpoint.save": str(sft.folder / "sft" / "checkpoints"), "checkpoint.resume": True}
    for allowed in (False, True):
        changes = saved | {"checkpoint.allow_recipe_changes": allowed}
        text = sft.refuse("rl", sft.recipe("rl", f"rl_of_sft_{allowed}", changes))
        assert "is of another recipe" in text and "kind = 'rl'" in text


def test_a_converted_model_is_no_run_to_go_on_with(rl: Bench, tmp_path: Path) -> None:
    words = ("--hf", rl.folder / "rl" / "hf", "--megatron", tmp_path / "imported", "--params-dtype", "float32")
    rl.succeed("convert", "import", *words)
    changes = {"checkpoint.save": str(tmp_path / "imported"), "checkpoint.resume": True}
    text = rl.refuse("rl", rl.recipe("rl", "rl_of_weights", changes))
    assert "holds weights alone, no run to go on with" in text


@pytest.mark.parametrize(
    ("name", "world_size", "changes"),
    [
        ("rl_tp2pp2", 4, {"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2}),
        ("rl_tp2sp", 2, {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True}),
        ("rl_dp2", 2, {}),
        ("rl_cp2", 2, {"parallel.context_parallel_size": 2}),
        ("rl_pp2vpp2", 2, PP2 | {"parallel.virtual_pipeline_model_parallel_size": 2}),
        ("rl_pp2_uneven", 2, PP2 | {"parallel.num_layers_in_first_pipeline_stage": 1}),
    ],
)
def test_rl_trains_the_same_on_every_layout(rl: Bench, name: str, world_size: int, changes: dict[str, object]) -> None:
    rl.succeed("rl", rl.recipe("rl", name, changes), world_size=world_size)
    found, wanted = rl.metrics(name), rl.metrics("rl")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert found[0]["rollout/reward"] == wanted[0]["rollout/reward"]
    for key in ("train/loss", "train/grad_norm", "train/logprob", "train/entropy", "train/ratio_max"):
        assert found[0][key] == pytest.approx(wanted[0][key], rel=1e-3, abs=1e-5), key
    assert all(line["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in found)
    assert {step for step, _ in read_samples(rl.folder / name)} == {1, 2, 3}


def test_sft_in_bfloat16_on_two_stages(bench: Bench) -> None:
    changes = {"model.params_dtype": "bfloat16", "parallel.pipeline_model_parallel_size": 2}
    bench.succeed("sft", bench.recipe("sft", "sft_bf16", changes), world_size=2)
    losses = [line["train/loss"] for line in bench.metrics("sft_bf16")]
    assert losses[-1] < losses[0] - 0.2
    assert {tensor.dtype for tensor in bench.exported("sft_bf16").values()} == {torch.bfloat16}


def test_sft_starts_from_a_hugging_face_folder(rl: Bench) -> None:
    changes = {
        "model.hf_checkpoint": str(rl.folder / "rl" / "hf"),
        "model.random_init": None,
        "optimizer.lr": 0.0,
        "train_iters": 1,
        "checkpoint.save_interval": None,
    }
    rl.succeed("sft", rl.recipe("sft", "sft_from_hf", changes))
    assert_equal(rl.exported("sft_from_hf"), rl.exported("rl"))


def test_a_step_without_anything_to_learn_is_no_update(sft: Bench) -> None:
    changes = {
        "reward.type": "helpers.rewards:equal_reward",
        # That of a cut-off response.
        "reward.incorrect": 0.5,
        "checkpoint.save_interval": 1,
    }
    sft.succeed("rl", sft.recipe("rl", "rl_equal", changes))
    for line in sft.metrics("rl_equal"):
        assert line["train/num_updates"] == 0 and line["rollout/dropped/zero_std"] == 16
    # And a run saved before its first update goes on.
    more = ("rollout.num_rollout=4", "checkpoint.resume=true", "reward.type=helpers.rewards:length_reward")
    text = sft.refuse("rl", sft.folder / "rl_equal.yaml", *more)
    assert "reward.type = 'helpers.rewards:length_reward': was 'helpers.rewards:equal_reward'" in text
    sft.succeed("rl", sft.folder / "rl_equal.yaml", *more, "checkpoint.allow_recipe_changes=true")
    assert sft.metrics("rl_equal")[-1]["train/num_updates"] > 0


def test_failed_rewards_are_dropped_and_counted(sft: Bench) -> None:
    changes = {"reward.type": "helpers.rewards:lottery_of_failures"}
    sft.succeed("rl", sft.recipe("rl", "rl_failures", changes))
    lines = sft.metrics("rl_failures")
    assert any(line.get("rollout/dropped/reward_user_error", 0) > 0 for line in lines)
    for line in lines:
        assert line["rollout/num_samples"] + line.get("rollout/dropped/reward_user_error", 0) == 16


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout", "current"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_with_other_weights_stops_the_run(sft: Bench, world_size: int, old_logprobs: str) -> None:
    changes = {"train.old_logprobs": old_logprobs, "batch.global_batch_size": 16}
    recipe = sft.recipe("rl", f"rl_stale_{old_logprobs}{world_size}", changes)
    for text in sft.pool.run(world_size, "e2e.jobs_runs:stale_engine", str(recipe)):
        assert text.startswith("train_rollout_logprob_abs_diff is ")
        assert "the engine does not sample from the weights, tokens or temperature that the trainer sees" in text


def test_torchrun_starts_the_same_command(rl: Bench) -> None:
    recipe = rl.recipe("rl", "rl_torchrun", {"rollout.num_rollout": 1})
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "megatron_klear", "rl"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), f"{ROOT}/kernels", f"{ROOT}/tests")),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*words, str(recipe), "parallel.tensor_model_parallel_size=2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = rl.metrics("rl_torchrun")
    assert line["rollout/reward"] == rl.metrics("rl")[0]["rollout/reward"]


def test_a_layout_that_the_model_does_not_fit_is_refused_before_it_starts(bench: Bench) -> None:
    recipe = bench.recipe("sft", "bad_layout")
    text = bench.refuse("sft", recipe, "parallel.tensor_model_parallel_size=3")
    assert "neither divides num_key_value_heads 2 nor is a multiple of it" in text
    text = bench.refuse("sft", recipe, "--pipeline-model-parallel-size", 3)
    assert "4 layers for 3 stages of equal size does not work out" in text


def test_every_rank_of_a_refused_run_says_why(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1+1="}')
    recipe = bench.recipe("sft", "bad_on_two", {"data.path": str(path)})
    ranks = bench.run_ranks("sft", recipe, world_size=2)
    assert [done.code for done in ranks] == [2, 2]
    assert ranks[0].err == ranks[1].err and "row 1 of " in ranks[0].err


def test_a_missing_data_file_is_refused(bench: Bench) -> None:
    path = bench.folder / "data" / "sfd.jsonl"
    text = bench.refuse("sft", bench.recipe("sft", "bad_data", {"data.path": str(path)}))
    assert "data.path" in text and "no such file" in text and "sft.jsonl" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+', "line 2"),
        ("", "no row"),
        ('{"prompt": "1+1="}', "row 1 of"),
        ('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+1=", "response": "x"}', "row 2 of"),
        ('{"prompt": "1+1=", "response": "' + "1" * 70 + '"}', "75 tokens, more than data.max_length = 64"),
    ],
    ids=["malformed", "empty", "no response", "foreign character", "too long"],
)
def test_bad_sft_data_is_refused_with_its_place(bench: Bench, content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    text = bench.refuse("sft", bench.recipe("sft", f"bad_{tmp_path.name}", {"data.path": str(path)}))
    assert text.splitlines()[-1].startswith("megatron-klear sft: ") and str(path) in text and reason in text


@pytest.mark.parametrize(
    ("content", "changes", "reason"),
    [
        ('{"prompt": "1+1=", "label": "2"}', {"data.max_prompt_len": 3}, "raise data.max_prompt_len = 3"),
        (
            '{"prompt": "1+1=", "label": "2"}',
            {"data.max_prompt_len": 3, "data.overlong": "error"},
            "the prompt has 4 tokens, more than data.max_prompt_len = 3",
        ),
        ('{"prompt": "1+1="}', {}, "has neither 'label' nor"),
        ('{"prompt": "1+1=", "label": "two"}', {"reward.type": "arithmetic"}, "none of the 1 answers can be read"),
    ],
    ids=["all too long", "one too long", "no label", "unreadable label"],
)
def test_bad_prompts_are_refused_with_their_place(
    sft: Bench, content: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    text = sft.refuse("rl", sft.recipe("rl", f"bad_{tmp_path.name}", {"data.prompt_data": str(path), **changes}))
    assert reason in text


def test_weights_of_another_model_are_refused(sft: Bench, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((sft.folder / "data" / "model" / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((sft.folder / "data" / "model" / name).read_text())
    changes = {"model.hf_checkpoint": str(tmp_path), "model.load": None}
    text = sft.refuse("rl", sft.recipe("rl", "rl_other", changes))
    assert f"{tmp_path} does not hold the weights that its config.json describes: missing" in text
