"""The command `check`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_klear.config.check import main, num_parameters
from megatron_klear.config.model import Qwen3Shape
from unit.config.config_files import SHAPE, RecipeFiles


def qwen3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> Qwen3Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    whole = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    return Qwen3Shape(**{**SHAPE, **sizes, **whole, "num_attention_heads": heads, "tie_word_embeddings": tied})


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (qwen3(1024, 3072, 28, 16, tied=True), 596_049_920),
        (qwen3(4096, 12288, 36, 32, tied=False), 8_190_735_360),
    ],
)
def test_parameters_of_the_published_models(shape: Qwen3Shape, published: int) -> None:
    assert num_parameters(shape) == published


def test_an_rl_recipe_is_described(files: RecipeFiles, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.write(files.rl())
    words = [str(path), "--tensor-model-parallel-size", "2", "--world-size", "4", "batch.global_batch_size=6"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    # 6 x (64 x (2 x 128 + 2 x 64) + 2 x 16 + 3 x 64 x 96 + 2 x 64) + 2 x 101 x 64 + 64
    assert out == [
        f"OK      {path}",
        "kind    rl",
        "model   qwen3, 6 layers, hidden 64, 8 heads of 16 (4 KV), MLP 96, vocabulary 101:"
        " 272,000 parameters in bfloat16",
        "layout  tensor 2 x pipeline 1 x data 2 = 4 ranks",
        "batch   5 steps, each 4 prompts x 4 = 16 responses, in at most 3 updates of at most 6 samples",
        "length  prompt 32 + response 64 = 96 tokens of 200 a micro-batch and 2048 positions",
        f"output  {files.folder / 'out'}",
    ]


def test_an_sft_recipe_is_described(files: RecipeFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(files.write(files.sft()))]) == 0
    out = capsys.readouterr().out
    assert "kind    sft" in out
    assert "layout  tensor 1 x pipeline 1; data parallel over the ranks that are left" in out
    assert "batch   10 updates of 8 samples = 80 samples" in out
    assert "length  128 tokens of 200 a micro-batch and 2048 positions" in out


def test_faults_go_to_stderr_with_exit_2(files: RecipeFiles, capsys: pytest.CaptureFixture[str]) -> None:
    path = files.write(files.rl())
    assert main([str(path), "--world-size=3", "--pipeline-model-parallel-size=2", "optimizer.lr=x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" = ")[0].strip() for line in err.splitlines()] == [
        f"{path}: 2 faults",
        "optimizer.lr",
        "world_size",
    ]


def test_the_world_size_of_torchrun_is_used(
    files: RecipeFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    words = [str(files.write(files.rl())), "parallel.pipeline_model_parallel_size=2"]
    assert main(words) == 2
    assert main([*words, "--world-size", "4"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert main(words) == 2
    assert "WORLD_SIZE = 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["recipe.yaml", "--world-size", "0"], ["recipe.yaml", "--world-size", "x"]])
def test_a_wrong_command_line_ends_with_exit_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


def test_checking_a_recipe_loads_no_torch(files: RecipeFiles) -> None:
    code = (
        "import sys\nfrom megatron_klear.cli import main\n"
        f"assert main(['check', {str(files.write(files.rl()))!r}]) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    root = Path(__file__).resolve().parents[3]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    print(f"megatron-klear check: {time.perf_counter() - start:.2f} s")
    assert done.returncode == 0, done.stderr
