"""`megatron-klear plan` as a person or a script meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.plans import QWEN3_8B, RECIPE, SFT_RECIPE, write_recipe
from megatron_klear import cli

SERVER = ("--engine", "server", "--engine-gpus", "2", "--kept", "0.5", "--mean-response-len", "11500")
MISFIT = ("parallel.recompute_granularity=null", "parallel.tensor_model_parallel_size=2")


def run(recipe: Path, *words: str, gpus: str = "256", gpu: str = "h800") -> int:
    return cli.main(["plan", str(recipe), "--gpus", gpus, "--gpu", gpu, *words])


def test_a_plan_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), *SERVER) == 0
    out = capsys.readouterr().out
    assert "qwen3, 8,190,735,360 parameters in bfloat16" in out
    assert "256 x h800" in out
    assert "tp4 pp1 cp1 dp64 sp, recompute full" in out
    assert "1024 samples of 11,756 tokens" in out
    assert "\nFITS, " in out
    for part in ("rollout", "old log-probs", "training", "weight sync", "tensor", "data", "bubble"):
        assert part in out
    assert all(len(line) < 200 for line in out.splitlines())


def test_a_plan_that_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), *SERVER, *MISFIT, gpus="64") == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT: stage 0 is " in out
    assert "its largest parts are activations" in out
    assert "SMALLEST CHANGE THAT FITS: parallel." in out


def test_the_change_that_it_names_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, RECIPE.replace("recompute_granularity: full", "recompute_granularity: null"))
    words = [*SERVER, "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]
    assert run(recipe, *words, gpus="64") == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("SMALLEST"))
    changes = dict(word.split("=") for word in line.partition(": ")[2].split())
    kept = [word for word in words if word.partition("=")[0] not in changes]
    assert run(recipe, *kept, *(f"{key}={value}" for key, value in changes.items()), gpus="64") == 0


def test_the_embedded_engine_is_named_where_it_takes_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write_recipe(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "largest parts are engine" in out
    assert "--engine server plans for engines apart" in out
    assert "rollout.max_running_requests=" in out


def test_a_search_prints_ten_layouts_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), *SERVER, "--search", gpus="64") == 0
    out = capsys.readouterr().out
    lines = out[out.index("Search:") :].splitlines()
    assert lines[1].split()[:2] == ["layout", "recompute"]
    assert all(line.lstrip().startswith("tp") for line in lines[2:12])
    assert lines[12].startswith("First: ")
    assert "against the next with other ranks" in lines[13]


def test_json_holds_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), *SERVER, "--search", "--json", gpus="64") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["parameters"] == 8_190_735_360
    assert numbers["layout"]["tensor"] == 4
    assert numbers["stages"][0]["total"] < numbers["stages"][0]["capacity"]
    assert numbers["seconds"]["total"] == pytest.approx(
        sum(numbers["seconds"][part] for part in ("rollout", "annotate", "train", "sync"))
    )
    assert sum(numbers["work_share"].values()) == pytest.approx(1)
    assert len(numbers["search"]["best"]) == 10


def test_json_of_a_misfit_holds_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), *SERVER, "--json", *MISFIT, gpus="64") == 1
    numbers = json.loads(capsys.readouterr().out)
    assert not numbers["fits"]
    assert numbers["remedy"]["fits"]


def test_an_sft_recipe_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tensor-model-parallel-size", "4", "parallel.recompute_granularity=full")
    assert run(write_recipe(tmp_path, SFT_RECIPE), *words, gpus="64", gpu="H200") == 0
    out = capsys.readouterr().out
    assert "64 samples of 11,469 tokens (mean sample 11,469 of at most 32,768), updates: 1" in out
    assert "rollout" not in out


@pytest.mark.parametrize(
    ("words", "gpus", "gpu", "told"),
    [
        ((), "256", "h80", "--gpu = 'h80': expected one of h100, h800, h200, a100 (did you mean"),
        ((), "6", "h800", "tensor 4 x pipeline 1 = 4 ranks hold one copy of the model, and 6 = 1 x 4 + 2 (use 4 or 8"),
        (("--mean-response-len", "99999"), "256", "h800", "is longer than the longest, 32768"),
        (("parallel.tensor_model_paralel_size=2",), "256", "h800", "did you mean"),
        (("--expert-model-parallel-size", "2"), "256", "h800", "expert"),
        (("--engine-gpus", "2"), "256", "h800", "the embedded engine runs on one GPU"),
        (("--engine", "server", "--engine-gpus", "3"), "256", "h800", "256 GPUs = 85 engines x 3 + 1"),
    ],
)
def test_bad_input_is_refused(
    words: tuple[str, ...], gpus: str, gpu: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(write_recipe(tmp_path), *words, gpus=gpus, gpu=gpu) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_options_without_effect_on_sft_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path, SFT_RECIPE), "--kept", "0.5", "--engine", "server", gpus="64") == 2
    err = capsys.readouterr().err
    assert "--kept = 0.5: would have no effect" in err
    assert "--engine = 'server': would have no effect" in err


@pytest.mark.parametrize(("option", "value"), [("--gpus", "0"), ("--kept", "0"), ("--kept", "some"), ("--engine", "x")])
def test_a_bad_option_is_refused(option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(write_recipe(tmp_path), option, value)
    assert stop.value.code == 2
    assert value in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "config.json").unlink()
    assert run(recipe) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_other_faults_are_told_with_the_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_recipe(tmp_path), "batch.global_batch_size=9999") == 2
    assert "is more than a step samples" in capsys.readouterr().err


def test_the_recipes_kv_heads_need_not_be_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 4, "vocab_size": 1000}))
    assert run(recipe, *SERVER, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (
        numbers["parameters"] == 4 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288 + 8448) + 2 * 4096000 + 4096
    )
