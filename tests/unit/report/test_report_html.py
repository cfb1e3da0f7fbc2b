from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_klear.errors import ConfigError, DataError
from megatron_klear.report.html import accuracy_rows, build_report, main
from megatron_klear.report.measures import MEASURES, Scales
from megatron_klear.report.record import RunRecorder
from megatron_klear.report.samples import SampleRecord
from megatron_klear.report.theme import INK, MUTED, PALETTES
from megatron_klear.report.viewer import (
    NUM_HEAD_TOKENS,
    NUM_TAIL_TOKENS,
    choose_samples,
    render_samples,
    render_switch,
    switch_rules,
)
from megatron_klear.types import Piece

EVIL = "<script>alert('x')</script>"
VOID_TAGS = {"meta", "br", "input"}
SCALES = Scales(engines=("",), largest_advantage=1.0)


def sample(name: str = "s", *, reward: float | None = 1.0, tokens: tuple[str, ...] = ("a", "b", "c")) -> SampleRecord:
    num_tokens = len(tokens)
    cells = ("in_range", "clipped_low", "clipped_high") * num_tokens
    return SampleRecord(
        sample_id=name,
        prompt="prompt of " + name,
        response="".join(tokens),
        answer="42",
        reward=reward,
        reason="because",
        stop_reason="length",
        tokens=tokens,
        rollout_logprobs=(-0.25,) * num_tokens,
        current_logprobs=(-0.5,) * num_tokens,
        ratios=(0.75,) * num_tokens,
        cells=cells[:num_tokens],
        advantages=(-0.5,) * num_tokens,
        pieces=(Piece(num_tokens, 9),),
    )


def make_run(folder: Path, *, samples: tuple[SampleRecord, ...] = (), recipe: str = "run: {name: x}\n") -> Path:
    with RunRecorder(folder, name="x", tensorboard=False) as run:
        run.log(0, {"eval/accuracy": 0.25})
        for step in (1, 2):
            phases = {"perf/step_time": 2.0, "perf/rollout_time": 1.0, "perf/train_time": 0.6}
            run.log(step, {"train/loss": 1.0 / step, "rollout/reward": 0.1, "rollout/dropped/stale": 3, **phases})
        run.log(2, {"eval/accuracy": 0.75})
        if samples:
            run.log_samples(2, samples)
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)
    return folder


class Page(HTMLParser):
    """Collects tags and text of a page, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if attrs.get("class") == name]


def test_report_shows_every_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", samples=(sample("good"), sample("bad", reward=-1.0)))
    out = tmp_path / "out"
    table = [{"stage": "before", "accuracy": "12%"}, {"stage": "after RL", "accuracy": "80%"}]
    path = build_report({"my run": run}, out, title="A title", accuracy_table=table)
    assert path == out / "report.html" and (out / "curves.png").stat().st_size > 0
    page = Page(path.read_text(encoding="utf-8"))
    for words in ("A title", "after RL", "80%", "my run", "run: {name: x}", "Held-out accuracy", "stale 6"):
        assert words in page.text
    for words in (
        "sample responses",
        "everything else",
        "50%",
        "30%",
        "0.40",
        "20%",
        "prompt of good",
        "prompt of bad",
        "because",
    ):
        assert words in page.text
    for words in ("reward -1", "advantage -0.5000", "3 tokens", "clipped 1 low, 1 high", "cut off", "weights 9"):
        assert words in page.text


def test_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = build_report({"r": make_run(tmp_path, samples=(sample(),))}, tmp_path, title="t").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in links)
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}
    assert "@import" not in text and "prefers-color-scheme:dark" in text


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = replace(sample(EVIL, tokens=(EVIL, '"', "&")), prompt=EVIL, answer=EVIL, reason=EVIL)
    folder = make_run(tmp_path / "run", samples=(evil, replace(evil, reward=0.0)), recipe=EVIL)
    path = build_report({EVIL: folder}, tmp_path / "out", title=EVIL, accuracy_table=[{EVIL: EVIL}])
    text = path.read_text()
    assert "<script" not in text
    assert Page(text).text.count(EVIL) >= 14


def test_tokens_carry_their_colours_and_their_numbers() -> None:
    record = replace(
        sample(tokens=("x", "\n", "z")),
        rollout_logprobs=(-0.01, -3.0, -9.0),
        current_logprobs=(-0.25, -0.5, math.nan),
        ratios=(1.0, 0.75, 3.0),
        advantages=(0.0, -0.5, 0.9),
        pieces=(Piece(1, 4, "b"), Piece(2, 6, "a")),
    )
    page = Page(render_samples([(1, record)], Scales.of([record])))
    tokens = [attrs for _, attrs in page.tags if "title" in attrs]
    assert [attrs["class"] for attrs in tokens] == [
        "t v1 e1 l0 u1 r3 c0 a3",
        "t v0 e0 l3 u1 r1 c1 a1",
        "t v0 e0 l5 r6 c2 a6",
    ]
    assert tokens[1]["title"] == (
        "weight version 6\nengine a\nrollout log-prob -3.0000\ncurrent log-prob -0.5000\nratio 0.7500\n"
        "clip cell clipped low\nadvantage -0.5000"
    )
    assert "x\u21b5\nz" in page.text
    assert page.of_class("t v1 e1") and page.of_class("t v0 e0")
    for words in ("1 tokens, version 4, b", "2 tokens, version 6, a", "weights 4-6"):
        assert words in page.text


def test_a_sample_that_no_update_has_seen_has_the_engines_numbers_alone() -> None:
    fresh = replace(sample(), current_logprobs=(), ratios=(), cells=(), advantages=())
    page = Page(render_samples([(1, fresh)], SCALES))
    assert len(page.of_class("t v0 e0 l1")) == 3
    assert page.of_class("t v0 e0 l1")[0]["title"] == "weight version 9\nengine (no name)\nrollout log-prob -0.2500"


def test_the_switch_has_a_button_and_a_legend_for_each_measure() -> None:
    page = Page(render_switch(Scales(engines=(EVIL, "b"), largest_advantage=1.5)))
    buttons = [attrs for tag, attrs in page.tags if tag == "input"]
    assert [attrs["id"] for attrs in buttons] == [f"by-{name}" for name in MEASURES]
    assert {(attrs["type"], attrs["name"]) for attrs in buttons} == {("radio", "by")}
    assert [attrs["id"] for attrs in buttons if "checked" in attrs] == ["by-cell"]
    assert [attrs["for"] for tag, attrs in page.tags if tag == "label"] == [attrs["id"] for attrs in buttons]
    for name, measure in MEASURES.items():
        assert len(page.of_class(f"scale scale-{name}")) == 1
        assert page.of_class(f"t {measure.letter}0")
    for words in (EVIL, "p >= 0.9", "0.95 to 1.05", "1 to 1.500", "clipped high"):
        assert words in page.text


def test_the_page_holds_the_switch_before_what_it_colours(tmp_path: Path) -> None:
    """A checked button reaches only siblings that follow it; and every class of a token has its rule."""
    text = build_report({"r": make_run(tmp_path, samples=(sample(),))}, tmp_path, title="t").read_text()

    class Depths(HTMLParser):
        stack: ClassVar[list[str]] = []
        found: ClassVar[dict[str, tuple[str, ...]]] = {}

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            for name in (named.get("id"), named.get("class")):
                if name in ("by-version", "by-advantage", "card scales", "rollouts"):
                    self.found[str(name)] = tuple(self.stack)
            if tag not in VOID_TAGS:
                self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            self.stack.pop()

    depths = Depths()
    depths.feed(text)
    assert list(depths.found) == ["by-version", "by-advantage", "card scales", "rollouts"]
    assert set(depths.found.values()) == {("html", "body", "main")}
    style = text[text.index("<style>") : text.index("</style>")]
    used = {name for names in re.findall(r'class="t ([^"]*)"', text) for name in names.split()}
    assert {"v0", "e0", "l1", "c2", "r1", "a1"} <= used
    for name in used:
        (measure,) = (one for one in MEASURES.values() if one.letter == name[0])
        assert f"#by-{measure.name}:checked~* .{name}{{background:var(--{measure.palette}-{name[1:]})}}" in style
    for variable in set(re.findall(r"var\((--[\w-]+)\)", switch_rules())):
        assert style.count(f"{variable}:#") == 2, "a value for each scheme"


def luminance(rgb: tuple[int, ...]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """As WCAG defines it; text is asked to have 4.5."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def of_hex(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def of_terminal(index: int) -> tuple[int, ...]:
    """The 6 x 6 x 6 cube and the ramp of greys that follows it."""
    if index >= 232:
        return (8 + 10 * (index - 232),) * 3
    steps = (0, 95, 135, 175, 215, 255)
    return tuple(steps[(index - 16) // by % 6] for by in (36, 6, 1))


@pytest.mark.parametrize("palette", PALETTES)
def test_text_is_readable_on_every_colour(palette: str) -> None:
    for shade in PALETTES[palette]:
        assert contrast(of_hex(shade.light), of_hex(INK.light)) >= 4.5
        assert contrast(of_hex(shade.dark), of_hex(INK.dark)) >= 4.5
        if shade.terminal is not None:
            assert contrast(of_terminal(shade.terminal), (0, 0, 0)) >= 4.5
    assert contrast(of_hex(MUTED.light), of_hex("#fffffe")) >= 4.5


@pytest.mark.parametrize("palette", PALETTES)
def test_the_colours_of_a_palette_differ(palette: str) -> None:
    shades = PALETTES[palette]
    for of_scheme in ([s.light for s in shades], [s.dark for s in shades], [s.terminal for s in shades]):
        assert len(set(of_scheme)) == len(shades)


def test_a_long_response_is_shown_by_its_ends() -> None:
    tokens = tuple(f"[{i}]" for i in range(NUM_HEAD_TOKENS + NUM_TAIL_TOKENS + 7))
    text = Page(render_samples([(1, sample(tokens=tokens))], SCALES)).text
    assert "... 7 tokens left out ..." in text
    assert f"[{NUM_HEAD_TOKENS - 1}]" in text and f"[{NUM_HEAD_TOKENS}]" not in text
    assert f"[{NUM_HEAD_TOKENS + 6}]" not in text and f"[{NUM_HEAD_TOKENS + 7}]" in text


def test_a_response_without_tokens_is_shown_as_text() -> None:
    record = replace(sample(tokens=()), pieces=(), response="nothing <here>")
    assert "nothing <here>" in Page(render_samples([(1, record)], SCALES)).text


def test_samples_are_chosen_from_both_kinds_last_steps_first() -> None:
    samples = [(step, sample(f"{step}", reward=float(step % 2))) for step in range(100)]
    assert [step for step, _ in choose_samples(samples, most=4)] == [99, 98, 97, 96]


@pytest.mark.parametrize(("num_correct", "num_wrong", "expected"), [(9, 1, (3, 1)), (1, 9, (1, 3)), (1, 1, (1, 1))])
def test_one_kind_fills_up_where_the_other_lacks(num_correct: int, num_wrong: int, expected: tuple[int, int]) -> None:
    rewards = [1.0] * num_correct + [None] * num_wrong
    chosen = choose_samples([(i, sample(reward=reward)) for i, reward in enumerate(rewards)], most=4)
    correct = sum(record.reward is not None for _, record in chosen)
    assert (correct, len(chosen) - correct) == expected


def test_the_first_sample_of_each_kind_is_open() -> None:
    samples = [(3, sample()), (2, sample()), (1, sample(reward=0.0)), (0, sample(reward=0.0))]
    assert ["open" in attrs for attrs in Page(render_samples(samples, SCALES)).of_class("sample")] == [
        True,
        False,
        True,
        False,
    ]


def test_at_most_forty_samples_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path, samples=tuple(sample(str(i), reward=float(i % 2)) for i in range(60)))
    page = Page(build_report({"r": run}, tmp_path, title="t").read_text())
    assert len(page.of_class("sample")) == 40


def test_half_a_character_does_not_break_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, samples=(sample(tokens=("\ud83d", "b")),))
    assert build_report({"r": run}, tmp_path, title="t").is_file()


def test_accuracy_summary_from_the_metrics() -> None:
    lines = [{"step": s, "eval/accuracy": a} for s, a in ((0, 0.25), (5, 0.75), (9, math.nan), (10, 0.5))]
    assert accuracy_rows({"a": lines, "without": [{"step": 1}]}) == [
        {"run": "a", "first": "25.0% (step 0)", "last": "50.0% (step 10)", "best": "75.0% (step 5)"}
    ]


def test_main_writes_beside_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", recipe="")
    assert main([str(first), str(second)]) == 0
    page = Page((first / "report.html").read_text())
    assert "a, b" in page.text and "b: no recipe.yaml in" in page.text
    out = capsys.readouterr().out
    assert "25.0% (step 0)" in out and f"report: {first / 'report.html'}" in out


def test_main_takes_out_and_title(tmp_path: Path) -> None:
    main([str(make_run(tmp_path / "a")), "--out", str(tmp_path / "x" / "y"), "--title", "Hello"])
    assert "<title>Hello</title>" in (tmp_path / "x" / "y" / "report.html").read_text()


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run") for parent in ("p", "q")]
    main([*map(str, runs), "--out", str(tmp_path)])
    assert str(runs[1]) in (tmp_path / "report.html").read_text()


def test_a_run_given_twice_is_an_error(tmp_path: Path) -> None:
    run = str(make_run(tmp_path / "a"))
    with pytest.raises(DataError, match="the same run folder is given twice"):
        main([run, run])


def test_a_missing_run_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected the output_dir of a run .* got .*nowhere, which does not exist"):
        main([str(tmp_path / "nowhere")])


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected the output_dir of a run .* which holds no metrics\.jsonl"):
        main([str(tmp_path)])


def test_a_run_without_a_step_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl holds no line yet; expected a run of at least one step"):
        main([str(tmp_path)])


def test_an_out_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the report into .*file: .*give a writable folder with --out"):
        main([str(run), "--out", str(tmp_path / "file")])
