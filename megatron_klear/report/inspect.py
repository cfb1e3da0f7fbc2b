"""Rollouts on the terminal: one sample at a time, token by token in colour. What tools/inspect_rollouts.py runs."""

from __future__ import annotations

import argparse
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_klear.errors import DataError
from megatron_klear.report.console import format_number
from megatron_klear.report.measures import MEASURES, NO_ENGINE, Measure, Scales, version_range
from megatron_klear.report.samples import SAMPLES_FILE, SampleRecord, StepSample, read_sample_file
from megatron_klear.report.saved_rollout import Decode, load_decoder, read_saved_rollout, show_ids, step_of
from megatron_klear.report.theme import PALETTES

Paint = Callable[[str, Measure, int | None], str]
NUM_IDS_NAMED = 5
_RESET = "\x1b[0m"


def main(argv: Sequence[str]) -> int:
    """`inspect_rollouts.py PATH [--step N] [--sample ID] [--limit N] [--by MEASURE] [--table] [--color WHEN]`."""
    args = _parser().parse_args(argv)
    decode = show_ids if args.tokenizer is None else load_decoder(args.tokenizer)
    found = load_samples(args.path, step=args.step, decode=decode)
    chosen = choose(found, step=args.step, sample_id=args.sample)
    in_colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    shown = chosen[: args.limit]
    scales = Scales.of(sample for _, sample in shown)
    for step, sample in shown:
        lines = render(step, sample, scales, by=args.by, as_table=args.table, in_colour=in_colour)
        _print("\n".join(lines) + "\n")
    _print(_footer(len(shown), len(chosen), found))
    return 0


def load_samples(path: Path, *, step: int | None = None, decode: Decode = show_ids) -> list[StepSample]:
    """Samples of a run folder, of a samples.jsonl, or of one step's saved rollout, oldest first.

    Of a folder of saved rollouts only the file of `step` is read, the last one if None. Raises `DataError` for a path
    that is none of these, or that holds no sample.
    """
    if path.is_dir() and not (path / SAMPLES_FILE).is_file():
        path = _saved_file(path, step)
    elif path.is_dir():
        path = path / SAMPLES_FILE
    elif not path.is_file():
        raise DataError(f"{path} does not exist; {_EXPECTED}")
    samples = read_sample_file(path) if step_of(path) is None else read_saved_rollout(path, decode=decode)
    if not samples:
        raise DataError(f"{path} holds no sample yet; a run writes some after each RL step (SFT writes none)")
    return samples


def choose(samples: Sequence[StepSample], *, step: int | None, sample_id: str | None) -> list[StepSample]:
    """Those of a step (with neither given: the last), and those of which the id is, or else contains, `sample_id`.

    Raises `DataError`, with what there is, where nothing fits.
    """
    if step is None and sample_id is None:
        step = samples[-1][0]
    of_step = [item for item in samples if step in (None, item[0])]
    if not of_step:
        steps = sorted({number for number, _ in samples})
        raise DataError(f"no sample of step {step}; there are {len(samples)} of steps {steps[0]} to {steps[-1]}")
    if sample_id is None:
        return of_step
    chosen = [item for item in of_step if item[1].sample_id == sample_id]
    chosen = chosen or [item for item in of_step if sample_id in item[1].sample_id]
    if not chosen:
        ids = ", ".join(sample.sample_id for _, sample in of_step[:NUM_IDS_NAMED])
        more = ", ..." if len(of_step) > NUM_IDS_NAMED else ""
        raise DataError(f"no sample has {sample_id!r} in its id; expected one of {ids}{more}")
    return chosen


def render(
    step: int, sample: SampleRecord, scales: Scales, *, by: str, as_table: bool, in_colour: bool
) -> Iterator[str]:
    """Lines of one sample: what it is, then its tokens and the legend, or a table with a line a token.

    Raises `DataError` where the sample lacks the measure to colour by.
    """
    measure, paint = MEASURES[by], _paint if in_colour else _leave
    yield from _header(step, sample)
    yield f"pieces   {_pieces(sample, measure, scales, paint)}"
    yield f"prompt   {_visible(sample.prompt)}"
    yield f"answer   {_visible(sample.answer)}"
    if as_table:
        yield ""
        yield from _table(sample, scales, paint)
        return
    levels = measure.levels(sample, scales)
    if sample.tokens and not levels:
        known = [name for name, other in MEASURES.items() if other.values(sample)]
        raise DataError(
            f"sample {sample.sample_id} has no {measure.title}: a saved rollout was not trained on yet;"
            f" expected --by {', '.join(known)}"
        )
    yield f"response, coloured by {measure.title}{'' if in_colour else ' (colours are off: see --color, --table)'}"
    yield ""
    yield "".join(_token(token, measure, level, paint) for token, level in zip(sample.tokens, levels, strict=True))
    yield ""
    yield f"{measure.title}: {_legend(measure, levels, scales, paint)}"


def _header(step: int, sample: SampleRecord) -> Iterator[str]:
    reward = "none (failed)" if sample.reward is None else format_number(sample.reward)
    yield (
        f"step {step}  sample {sample.sample_id}  reward {reward}  stop reason {sample.stop_reason or 'none'}"
        f"  {len(sample.tokens)} tokens"
    )
    engines = ", ".join(_visible(name) or NO_ENGINE for name in sample.engines)
    facts = [f"versions {version_range(sample)}", f"engines {engines or 'none'}"]
    if sample.cells:
        num_low, num_high = sample.cells.count("clipped_low"), sample.cells.count("clipped_high")
        facts.append(f"clipped {num_low} low, {num_high} high")
    if sample.advantages:
        ends = sorted({min(sample.advantages), max(sample.advantages)})
        facts.append(f"advantage {' to '.join(map(format_number, ends))}")
    yield "  ".join(facts)
    yield f"reason   {_visible(sample.reason)}"


def _pieces(sample: SampleRecord, measure: Measure, scales: Scales, paint: Paint) -> str:
    """Who drew how many tokens; painted if that is what the tokens are coloured by."""
    shown, begin = [], 0
    levels = measure.levels(sample, scales)
    for piece in sample.pieces:
        words = f"{piece.num_tokens} of version {piece.weight_version} by {_visible(piece.engine) or NO_ENGINE}"
        is_scale = measure.name in ("version", "engine") and piece.num_tokens > 0
        shown.append(paint(words, measure, levels[begin]) if is_scale else words)
        begin += piece.num_tokens
    return ", ".join(shown) or "none"


def _token(token: str, measure: Measure, level: int | None, paint: Paint) -> str:
    """A token in its colour; the colour ends before a line break, or it would fill the rest of the line."""
    lines = token.split("\n")
    parts = [_visible(line) + ("\u21b5" if i < len(lines) - 1 else "") for i, line in enumerate(lines)]
    return "\n".join(paint(part, measure, level) if part else "" for part in parts)


def _legend(measure: Measure, levels: Sequence[int | None], scales: Scales, paint: Paint) -> str:
    """What each colour means, and how many tokens have it."""
    num_colours = len(PALETTES[measure.palette])
    words = measure.legend(scales)
    shown = [paint(_visible(text), measure, number % num_colours) for number, text in enumerate(words)]
    if len(words) <= num_colours:
        counts = [levels.count(number) for number in range(len(words))]
        shown = [f"{text}: {count}" for text, count in zip(shown, counts, strict=True)]
    return "   ".join(shown)


def _table(sample: SampleRecord, scales: Scales, paint: Paint) -> Iterator[str]:
    """A line a token, a column a measure that the sample has, each in its own colours."""
    columns = [(measure, values) for measure in MEASURES.values() if (values := measure.values(sample))]
    levels = [measure.levels(sample, scales) for measure, _ in columns]
    tokens = _column("token", map(_quoted, sample.tokens), to_right=False)
    cells = [
        _column(m.title, (_visible(m.text(value)) for value in values), to_right=not isinstance(values[0], str))
        for m, values in columns
    ]
    yield "  ".join(("    #", tokens[0], *(column[0] for column in cells))).rstrip()
    for i, token in enumerate(tokens[1:]):
        painted = [paint(cells[j][i + 1], measure, levels[j][i]) for j, (measure, _) in enumerate(columns)]
        yield "  ".join((f"{i:>5}", token, *painted)).rstrip()


def _column(title: str, cells: Iterable[str], *, to_right: bool) -> list[str]:
    """Title and cells, of one width."""
    lines = [title, *cells]
    width = max(map(len, lines))
    return [line.rjust(width) if to_right else line.ljust(width) for line in lines]


def _paint(text: str, measure: Measure, level: int | None) -> str:
    """Black text on the level's colour, whatever colours the terminal has; its own colours where there is no level."""
    index = None if level is None else PALETTES[measure.palette][level].terminal
    return text if index is None else f"\x1b[48;5;{index};38;5;16m{text}{_RESET}"


def _leave(text: str, _: Measure, __: int | None) -> str:
    return text


def _quoted(token: str) -> str:
    return "'" + _visible(token.replace("\n", "\\n")) + "'"


def _visible(text: str) -> str:
    """The text without control characters: a response must not be able to command the terminal."""
    return "".join(char if char == "\n" or unicodedata.category(char)[0] != "C" else _name(char) for char in text)


def _name(char: str) -> str:
    """A sign for a control character (Unicode draws the first 32), <U+202E> for others."""
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"<U+{ord(char):04X}>"


def _print(text: str) -> None:
    # A terminal that cannot show a character gets a question mark, not the end of the program.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def _footer(num_shown: int, num_chosen: int, found: Sequence[StepSample]) -> str:
    steps = sorted({step for step, _ in found})
    return (
        f"{num_shown} of {num_chosen} chosen samples shown; {len(found)} of steps {steps[0]} to {steps[-1]} were read"
        " (--step, --sample, --limit choose others)"
    )


def _saved_file(folder: Path, step: int | None) -> Path:
    """The file of a step, the last one if None, in a folder of saved rollouts."""
    by_step = {number: path for path in folder.iterdir() if (number := step_of(path)) is not None}
    if not by_step:
        raise DataError(f"{folder} holds neither {SAMPLES_FILE} nor saved rollouts; {_EXPECTED}")
    if step is not None and step not in by_step:
        raise DataError(f"{folder} holds no rollout of step {step}; there are steps {min(by_step)} to {max(by_step)}")
    return by_step[max(by_step) if step is None else step]


_EXPECTED = (
    "expected the output_dir of an RL run, its samples.jsonl, or a folder or file of debug.save_rollout_data"
    " (rollout_000001.jsonl)"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inspect_rollouts.py", description="Rollouts of a run on the terminal, token by token in colour."
    )
    parser.add_argument(
        "path", type=Path, help="output_dir of an RL run, or a folder or file of debug.save_rollout_data"
    )
    parser.add_argument("--step", type=int, help="samples of this step; the last one if neither this nor --sample")
    parser.add_argument("--sample", metavar="ID", help="samples of this id, or of which the id contains this text")
    parser.add_argument("--limit", type=_at_least_one, default=1, help="show so many samples at most (1)")
    parser.add_argument("--by", choices=list(MEASURES), default="logprob", help="what the colours mean (logprob)")
    parser.add_argument("--table", action="store_true", help="a line a token with all its numbers")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal only")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="for saved rollouts, which hold token ids: whose text to show"
    )
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number
