from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_klear.data.arithmetic import tokenizer_json
from megatron_klear.errors import DataError
from megatron_klear.report.inspect import choose, load_samples, main, render
from megatron_klear.report.measures import MEASURES, Scales, version_range
from megatron_klear.report.record import RunRecorder
from megatron_klear.report.samples import SampleRecord
from megatron_klear.report.saved_rollout import read_saved_rollout
from megatron_klear.report.theme import PALETTES
from megatron_klear.rollout.replay import save_rollout
from megatron_klear.types import Piece, Prompt, RolloutBatch, Sample, SampleGroup

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "inspect_rollouts.py"
SAMPLE = SampleRecord(
    sample_id="3.0/q7/0.1",
    prompt="2*3=",
    response="so\n6!",
    answer="6",
    reward=1.0,
    reason="equal",
    stop_reason="stop",
    tokens=("so", "\n", "6", "!"),
    rollout_logprobs=(-0.05, -1.0, -3.0, -8.0),
    current_logprobs=(-0.05, -0.5, -4.0, math.nan),
    ratios=(1.0, 1.5, 0.4, 2.5),
    cells=("in_range", "clipped_high", "clipped_low", "in_range"),
    advantages=(0.0, 0.5, -1.5, 1.5),
    pieces=(Piece(1, 4, "sglang-0"), Piece(2, 6, "sglang-1"), Piece(1, 7, "sglang-0")),
)
SCALES = Scales.of([SAMPLE])
# What each measure makes of the four tokens.
LEVELS = {
    "version": [2, 1, 1, 0],
    "engine": [0, 1, 1, 0],
    "logprob": [0, 2, 3, 5],
    "current": [0, 1, 3, None],
    "ratio": [3, 5, 0, 6],
    "cell": [0, 2, 1, 0],
    "advantage": [3, 4, 0, 6],
}


def make_run(folder: Path, samples: Sequence[tuple[int, SampleRecord]] = ((1, SAMPLE),)) -> Path:
    with RunRecorder(folder, name="x", tensorboard=False) as run:
        for step, sample in samples:
            run.log_samples(step, [sample])
    return folder


def numbered(step: int, number: int) -> tuple[int, SampleRecord]:
    return step, replace(SAMPLE, sample_id=f"{step}.0/q{number}/0.0")


def save(folder: Path, step: int = 2) -> Path:
    """Two samples of one group: one drawn by two engines, one whose reward failed."""
    prompt = Prompt("p", (2, 3), answer="42", source="s")
    samples = (Sample("2.0/p/0.0", prompt), Sample("2.0/p/0.1", prompt))
    samples[0].append_response([4, 5], [-0.1, -0.2], weight_version=3, stop_reason="abort", engine="a")
    samples[0].append_response([6], [-5.0], weight_version=4, stop_reason="stop", engine="b")
    samples[0].reward, samples[0].reward_reason = 0.5, "half right"
    samples[1].append_response([7], [-0.3], weight_version=4, stop_reason="length")
    return save_rollout(folder, step, RolloutBatch((SampleGroup(prompt, samples),)))


def shown(argv: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


def painted(text: str) -> list[tuple[int, str]]:
    """(background, text) of everything that has one."""
    return [(int(index), words) for index, words in re.findall(r"\x1b\[48;5;(\d+);38;5;16m(.*?)\x1b\[0m", text)]


@pytest.mark.parametrize("by", MEASURES)
def test_tokens_are_in_the_colours_of_their_levels(by: str) -> None:
    measure = MEASURES[by]
    assert measure.levels(SAMPLE, SCALES) == LEVELS[by]
    lines = list(render(3, SAMPLE, SCALES, by=by, as_table=False, in_colour=True))
    palette = [shade.terminal for shade in PALETTES[measure.palette]]
    texts = ["so", "\u21b5", "6", "!"]
    wanted = [
        (palette[level], text)
        for level, text in zip(LEVELS[by], texts, strict=True)
        if level is not None and palette[level] is not None
    ]
    body = "\n".join(lines[lines.index("") + 1 : -2])
    assert painted(body) == wanted
    assert re.sub(r"\x1b\[[\d;]*m", "", body) == "so\u21b5\n6!"
    legend = painted(lines[-1])
    words = measure.legend(SCALES)
    assert legend == [(i, text) for i, text in zip(palette, words, strict=False) if i is not None]


def test_a_legend_counts_the_tokens_of_each_colour() -> None:
    *_, legend = render(3, SAMPLE, SCALES, by="ratio", as_table=False, in_colour=False)
    assert legend == (
        "ratio: below 0.5: 1   0.5 to 0.8: 0   0.8 to 0.95: 0   0.95 to 1.05: 1   1.05 to 1.25: 0   1.25 to 2.0: 1"
        "   2.0 and more: 1"
    )


def test_the_header_tells_what_the_sample_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([make_run(tmp_path, [(3, SAMPLE)])], capsys)
    for words in (
        "step 3  sample 3.0/q7/0.1  reward 1  stop reason stop  4 tokens\n",
        "versions 4-7  engines sglang-0, sglang-1  clipped 1 low, 1 high  advantage -1.500 to 1.500\n",
        "reason   equal\n",
        "pieces   1 of version 4 by sglang-0, 2 of version 6 by sglang-1, 1 of version 7 by sglang-0\n",
        "prompt   2*3=\n",
        "answer   6\n",
        "1 of 1 chosen samples shown; 1 of steps 3 to 3 were read",
    ):
        assert words in text


def test_pieces_are_in_the_colours_of_version_and_engine() -> None:
    for by, num_painted in (("version", 2), ("engine", 3), ("ratio", 0)):
        lines = render(3, SAMPLE, SCALES, by=by, as_table=False, in_colour=True)
        (pieces,) = (line for line in lines if line.startswith("pieces"))
        assert len(painted(pieces)) == num_painted


def test_the_table_has_every_number_of_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([make_run(tmp_path), "--table"], capsys).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    #"))
    rows = [re.split(r"  +", line.strip()) for line in lines[start : start + 5]]
    assert rows[0] == ["#", "token", *(measure.title for measure in MEASURES.values())]
    assert rows[2] == ["1", "'\\n'", "6", "sglang-1", "-1.0000", "-0.5000", "1.5000", "clipped high", "0.5000"]
    assert rows[4] == ["3", "'!'", "7", "sglang-0", "-8.0000", "nan", "2.5000", "in range", "1.5000"]


def test_the_table_colours_each_column_by_its_own_measure() -> None:
    lines = list(render(3, SAMPLE, SCALES, by="cell", as_table=True, in_colour=True))
    third = painted(lines[-2])
    wanted = [(PALETTES[m.palette][level].terminal) for n, m in MEASURES.items() if (level := LEVELS[n][2]) is not None]
    assert [index for index, _ in third] == wanted
    assert [words.strip() for _, words in third] == [
        "6",
        "sglang-1",
        "-3.0000",
        "-4.0000",
        "0.4000",
        "clipped low",
        "-1.5000",
    ]


@pytest.mark.parametrize(("color", "is_coloured"), [("auto", False), ("always", True), ("never", False)])
def test_colour_only_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], color: str, is_coloured: bool
) -> None:
    text = shown([make_run(tmp_path), "--color", color], capsys)
    assert ("\x1b" in text) == is_coloured
    assert ("colours are off" in text) != is_coloured


def test_a_terminal_gets_colours_without_asking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[48;5;" in shown([run], capsys)
    assert "\x1b" not in shown([run, "--color", "never"], capsys)


def test_a_response_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x07\r\x9b\u202e\ud83d\t"
    sample = replace(SAMPLE, tokens=(evil, "b", "c", "d"), prompt=evil, answer=evil, reason=evil, sample_id="x")
    for words in ((), ("--table",)):
        text = shown([make_run(tmp_path / f"{len(words)}", [(1, sample)]), *words], capsys)
        assert not set(text) & set("\x1b\x07\r\x9b\u202e\ud83d\t")
        assert "\u241b[2J\u2407\u240d<U+009B><U+202E><U+D83D>\u2409" in text


def test_the_last_step_is_shown_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, [numbered(step, number) for step in (1, 2, 3) for number in range(4)])
    assert re.findall(r"sample (\S+)", shown([run], capsys)) == ["3.0/q0/0.0"]
    assert re.findall(r"sample (\S+)", shown([run, "--limit", "2"], capsys)) == ["3.0/q0/0.0", "3.0/q1/0.0"]
    text = shown([run, "--step", "2", "--limit", "9"], capsys)
    assert len(re.findall(r"sample 2\.0/q\d/0\.0", text)) == 4
    assert "4 of 4 chosen samples shown; 12 of steps 1 to 3 were read" in text
    assert re.findall(r"sample (\S+)", shown([run, "--sample", "q2/", "--limit", "9"], capsys)) == [
        f"{step}.0/q2/0.0" for step in (1, 2, 3)
    ]


def test_a_whole_id_wins_over_ids_that_contain_it() -> None:
    samples = [(1, replace(SAMPLE, sample_id=name)) for name in ("q1", "q10", "q11")]
    assert [s.sample_id for _, s in choose(samples, step=None, sample_id="q1")] == ["q1"]
    assert [s.sample_id for _, s in choose(samples, step=1, sample_id="1")] == ["q1", "q10", "q11"]


def test_choosing_what_is_not_there_says_what_is() -> None:
    samples = [numbered(step, number) for step in (4, 9) for number in range(7)]
    with pytest.raises(DataError, match="no sample of step 5; there are 14 of steps 4 to 9"):
        choose(samples, step=5, sample_id=None)
    with pytest.raises(DataError, match=r"no sample has 'zz' in its id; expected one of 4\.0/q0/0\.0, .*, \.\.\."):
        choose(samples, step=4, sample_id="zz")


def test_a_saved_rollout_is_shown_with_what_the_engine_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([save(tmp_path), "--limit", "2"], capsys)
    for words in (
        "step 2  sample 2.0/p/0.0  reward 0.5000  stop reason stop  3 tokens\nversions 3-4  engines a, b\n",
        "reason   half right\npieces   2 of version 3 by a, 1 of version 4 by b\nprompt   [2][3]\nanswer   42\n",
        "[4][5][6]",
        "sample 2.0/p/0.1  reward none (failed)  stop reason length  1 tokens\nversions 4  engines (no name)\n",
    ):
        assert words in text
    (header,) = (line for line in shown([tmp_path, "--table"], capsys).splitlines() if line.startswith("    #"))
    assert re.split(r"  +", header.strip()) == ["#", "token", "weight version", "engine", "rollout log-prob"]


def test_a_saved_rollout_is_text_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    tokenizer = tokenizer_json()
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    model: Any = tokenizer["model"]
    text_of = {number: token for token, number in model["vocab"].items()}
    save(tmp_path / "saved")
    text = shown([tmp_path / "saved", "--tokenizer", tmp_path / "model"], capsys)
    assert f"\n\n{text_of[4]}{text_of[5]}{text_of[6]}\n\n" in text


def test_the_last_saved_step_of_a_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 11, 3):
        save(tmp_path, step)
    assert "step 11 " in shown([tmp_path], capsys)
    assert "step 3 " in shown([tmp_path, "--step", "3"], capsys)
    with pytest.raises(DataError, match="holds no rollout of step 5; there are steps 2 to 11"):
        main([str(tmp_path), "--step", "5"])


def test_a_saved_rollout_has_no_numbers_of_an_update(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.0 has no ratio: a saved rollout .* --by version, engine, logprob"):
        main([str(save(tmp_path)), "--by", "ratio"])


@pytest.mark.parametrize("line", ["{", "[]", '{"samples": [{}]}', '{"prompt_ids": [1], "answer": "", "samples": [3]}'])
def test_a_malformed_saved_rollout_names_its_line(tmp_path: Path, line: str) -> None:
    path = save(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"line 2 of .*rollout_000002\.jsonl is not a saved group .* save the rollout"):
        read_saved_rollout(path)


def test_a_saved_rollout_whose_pieces_do_not_add_up_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path)
    path.write_text(path.read_text().replace('[2, 3, "a"]', '[9, 3, "a"]'))
    with pytest.raises(DataError, match=r"line 1 of .*3 tokens, 3 rollout_logprobs, pieces of 10 tokens"):
        load_samples(path)


def test_paths_that_hold_no_rollouts_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist; expected the output_dir of an RL run"):
        load_samples(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds neither samples\.jsonl nor saved rollouts; expected the output_dir"):
        load_samples(tmp_path)
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(DataError, match=r"samples\.jsonl holds no sample yet; a run writes some after each RL step"):
        load_samples(tmp_path)


def test_a_tokenizer_that_is_none_is_an_error(tmp_path: Path) -> None:
    saved = str(save(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist; expected the folder of a model"):
        main([saved, "--tokenizer", str(tmp_path)])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer \(.*leave --tokenizer out"):
        main([saved, "--tokenizer", str(tmp_path)])


def test_a_limit_below_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--limit", "0"])
    assert "expected 1 or more, got 0" in capsys.readouterr().err


def test_scales_of_samples_that_are_shown_together() -> None:
    other = replace(SAMPLE, advantages=(math.inf, math.nan, -3.0, 0.3), pieces=(Piece(4, 1, "a"),))
    scales = Scales.of([SAMPLE, other])
    assert scales == Scales(engines=("a", "sglang-0", "sglang-1"), largest_advantage=3.0)
    assert MEASURES["advantage"].levels(other, scales) == [6, None, 0, 4]
    assert MEASURES["advantage"].levels(SAMPLE, scales) == [3, 4, 1, 5]
    assert MEASURES["advantage"].levels(replace(SAMPLE, advantages=(0.0,) * 4), Scales((), 0.0)) == [3] * 4


def test_levels_at_the_edges_are_those_of_the_legend() -> None:
    edges = replace(
        SAMPLE,
        rollout_logprobs=(math.log(0.9), math.log(0.5), -math.inf, 0.0),
        ratios=(0.5, 1.05, 2.0, math.inf),
    )
    assert MEASURES["logprob"].levels(edges, SCALES) == [0, 1, 5, 0]
    assert MEASURES["ratio"].levels(edges, SCALES) == [1, 4, 6, 6]


def test_more_versions_and_engines_than_colours() -> None:
    pieces = tuple(Piece(1, version, f"e{version:02}") for version in range(12))
    record = replace(
        SAMPLE,
        tokens=("x",) * 12,
        rollout_logprobs=(-1.0,) * 12,
        current_logprobs=(),
        ratios=(),
        cells=(),
        advantages=(),
        pieces=pieces,
    )
    scales = Scales.of([record])
    assert MEASURES["version"].levels(record, scales) == [5] * 7 + [4, 3, 2, 1, 0]
    assert MEASURES["engine"].levels(record, scales) == [*range(8), 0, 1, 2, 3]
    *_, legend = render(1, record, scales, by="engine", as_table=False, in_colour=True)
    assert [words.strip() for _, words in painted(legend)] == [f"e{number:02}" for number in range(12)]


def test_numbers_are_aligned_whatever_their_size() -> None:
    text = MEASURES["ratio"].text
    assert [text(value) for value in (1.0, 0.98765, 2.5e-5, 123456.0, 0.0, math.inf)] == [
        "1.0000",
        "0.9877",
        "2.5e-05",
        "1.2e+05",
        "0.0000",
        "inf",
    ]
    lines = list(render(3, SAMPLE, SCALES, by="cell", as_table=True, in_colour=False))
    assert len({len(line) for line in lines[-5:]}) == 1, "the last column ends where its title ends"


def test_version_range() -> None:
    assert version_range(SAMPLE) == "4-7"
    assert version_range(replace(SAMPLE, pieces=(Piece(4, 5),))) == "5"
    empty = dict.fromkeys(("tokens", "rollout_logprobs", "current_logprobs", "ratios", "cells", "advantages"), ())
    assert version_range(replace(SAMPLE, pieces=(), **empty)) == "none"


def run_script(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, **options)


def test_the_script_shows_a_run_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        done = run_script(run)
        seconds.append(time.perf_counter() - begin)
        assert done.returncode == 0 and "sample 3.0/q7/0.1" in done.stdout and done.stderr == ""
    assert min(seconds) < 1.0


def test_the_script_loads_nothing_heavy() -> None:
    code = "import sys, megatron_klear.report.inspect as m; print([n for n in HEAVY if n in sys.modules])"
    code = code.replace("HEAVY", "('torch', 'megatron', 'transformers', 'tensorboard', 'matplotlib', 'numpy')")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_script_tells_errors_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 6, "sample_id": "x", "weight_version": 4}\n')
    done = run_script(tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("inspect_rollouts.py: ") and "older version of megatron-klear" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, [numbered(1, number) for number in range(300)])
    command = f"{sys.executable} {SCRIPT} {run} --limit 300 --table | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1


def test_an_output_without_unicode_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(make_run(tmp_path))], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and b"so?\n6!" in done.stdout


@pytest.mark.parametrize("by", MEASURES)
def test_a_legend_has_a_word_for_every_colour(by: str) -> None:
    measure = MEASURES[by]
    num_words = len(measure.legend(SCALES))
    assert num_words == (len(SCALES.engines) if by == "engine" else len(PALETTES[measure.palette]))
