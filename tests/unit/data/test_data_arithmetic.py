from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_klear.config.model import read_shape
from megatron_klear.config.recipe import PromptDataConfig, SftDataConfig
from megatron_klear.data import arithmetic
from megatron_klear.data.arithmetic import Problem, demonstrations, draw_problems, main, num_problems, problem_at
from megatron_klear.data.prompts import load_prompts
from megatron_klear.data.sft import load_sft
from megatron_klear.data.template import ChatTokenizer, load_tokenizer
from megatron_klear.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("arithmetic")
    assert main(["--out", str(out), "--num-sft", "300", "--num-rl", "200", "--num-eval", "100"]) == 0
    return out


@pytest.fixture(scope="module")
def tiny(folder: Path) -> ChatTokenizer:
    return load_tokenizer(folder / "model")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_problem_as_the_model_sees_it() -> None:
    problem = Problem(58, 67)
    assert problem.prompt == "58+67="
    assert problem.solution() == "<think>8+7=15 5+6+1=12</think>125"
    assert problem.solution(forget_carry=True) == "<think>8+7=15 5+6=11</think>115"
    assert problem.answer == "125"


def test_nothing_is_forgotten_where_nothing_is_carried() -> None:
    problem = Problem(27, 82)
    assert not problem.needs_carry
    assert problem.solution() == problem.solution(forget_carry=True) == "<think>7+2=9 2+8=10</think>109"


def test_every_careful_solution_is_right_and_every_careless_one_with_a_carry_wrong() -> None:
    for index in range(0, num_problems(), 7):
        problem = problem_at(index)
        assert problem.solution().endswith(f"</think>{problem.a + problem.b}")
        careless = problem.solution(forget_carry=True)
        assert careless.endswith(f"</think>{problem.a + problem.b}") != problem.needs_carry


def test_numbering_covers_every_problem_once() -> None:
    assert problem_at(0) == Problem(10, 10)
    assert problem_at(num_problems() - 1) == Problem(99, 99)
    assert len({problem_at(index) for index in range(num_problems())}) == 8100


def test_the_teacher_forgets_as_often_as_asked() -> None:
    problems = [problem_at(index) for index in range(num_problems())]
    said = demonstrations(problems, carelessness=0.8, seed=3)
    forgot = [text != one.solution() for one, text in zip(problems, said, strict=True) if one.needs_carry]
    assert sum(forgot) / len(forgot) == pytest.approx(0.8, abs=0.03)
    assert demonstrations(problems, carelessness=0.0, seed=3) == [one.solution() for one in problems]


def test_sets_are_disjoint_and_sized(folder: Path) -> None:
    prompts = {name: [row["prompt"] for row in rows(folder / f"{name}.jsonl")] for name in ("sft", "rl", "eval")}
    assert {name: len(found) for name, found in prompts.items()} == {"sft": 300, "rl": 200, "eval": 100}
    assert len({prompt for found in prompts.values() for prompt in found}) == 600


def test_every_row_is_as_the_problem_says(folder: Path) -> None:
    for row in rows(folder / "sft.jsonl"):
        problem = Problem(*map(int, row["prompt"].removesuffix("=").split("+")))
        assert row["response"] in (problem.solution(), problem.solution(forget_carry=True))
    for row in rows(folder / "rl.jsonl") + rows(folder / "eval.jsonl"):
        assert int(row["label"]) == sum(int(term) for term in row["prompt"].removesuffix("=").split("+"))


def test_held_out_set_does_not_move_with_the_amount_of_training_data() -> None:
    small = draw_problems(num_sft=10, num_rl=10, num_eval=50, seed=1)
    large = draw_problems(num_sft=5000, num_rl=700, num_eval=50, seed=1)
    assert small.held_out == large.held_out
    assert small.held_out != draw_problems(num_sft=10, num_rl=10, num_eval=50, seed=2).held_out


def test_more_problems_than_exist() -> None:
    with pytest.raises(DataError, match=r"8101 problems wanted .*but only 8100 different ones exist; lower --num-sft"):
        draw_problems(num_sft=8_090, num_rl=10, num_eval=1, seed=0)


def test_counts_must_be_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--num-rl", "0"])
    assert "0 is not a number of problems; expected at least 1" in capsys.readouterr().err


def test_carelessness_must_be_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--carelessness", "1.5"])
    assert "1.5 is not a share; expected a number from 0 to 1" in capsys.readouterr().err


def test_same_seed_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--num-sft", "300", "--num-rl", "200", "--num-eval", "100"])
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_every_text_round_trips_through_the_tokenizer(folder: Path, tiny: ChatTokenizer) -> None:
    for row in rows(folder / "sft.jsonl"):
        text = row["prompt"] + row["response"]
        assert tiny.decode(tiny.encode(text)) == text
    everything = "<|endoftext|><think> " + arithmetic.CHARACTERS + "\n </think><|im_end|>"
    assert tiny.decode(tiny.encode(everything)) == everything
    assert len(tiny.encode("<think>12</think>")) == 4


def test_thinking_tags_survive_where_special_tokens_are_skipped(tiny: ChatTokenizer) -> None:
    ids = tiny.encode("<think>12</think>3<|im_end|><|endoftext|>")
    assert tiny._tokenizer.decode(ids, skip_special_tokens=True) == "<think>12</think>3"


def test_tokenizer_fits_the_model(folder: Path, tiny: ChatTokenizer) -> None:
    shape = read_shape(folder / "model")
    assert tiny.vocab_size == len(arithmetic.vocabulary()) < shape.vocab_size == 64
    assert (shape.hidden_size, shape.num_hidden_layers, shape.head_dim, shape.rope.rope_theta) == (128, 4, 32, 10000.0)
    assert tiny.stop_token_ids == tuple(tiny.encode("<|im_end|>"))


def test_written_files_load_as_samples_and_prompts(folder: Path, tiny: ChatTokenizer) -> None:
    samples = load_sft(SftDataConfig(path=str(folder / "sft.jsonl")), tiny).samples
    first = rows(folder / "sft.jsonl")[0]
    assert tiny.decode(samples[0].token_ids) == first["prompt"] + first["response"] + "<|im_end|>"
    assert tiny.decode(samples[0].prompt.token_ids) == first["prompt"]
    assert all(sample.loss_mask[-1] == 1 for sample in samples)
    prompts = load_prompts(PromptDataConfig(prompt_data=str(folder / "rl.jsonl")), tiny).prompts
    assert tiny.decode(prompts[0].token_ids) == rows(folder / "rl.jsonl")[0]["prompt"]
    assert len({prompt.prompt_id for prompt in prompts}) == 200


def test_generator_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, megatron_klear.data.arithmetic;"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
