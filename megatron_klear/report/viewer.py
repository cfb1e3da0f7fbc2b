"""Rollouts on the report page: each response token by token, coloured by one of the measures; a switch says which.

The switch is radio buttons and CSS alone: every token carries its level of each measure as a class, and a checked
button brings the rules of its measure to life. So the page needs no script, and works where scripts are forbidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate

from megatron_klear.report.console import format_number
from megatron_klear.report.measures import MEASURES, NO_ENGINE, Measure, Scales, version_range
from megatron_klear.report.samples import SampleRecord, StepSample
from megatron_klear.report.theme import PALETTES

# A 32k-token response would be 4 MB of page; its beginning and its end tell the story.
NUM_HEAD_TOKENS = 1200
NUM_TAIL_TOKENS = 400
CHECKED = "cell"

NOTES = {
    "version": "A version counts the trainer's updates. A response that was under way while weights were pushed was"
    " drawn from several.",
    "engine": "The server that drew the token.",
    "logprob": "Probability p of the token for the engine that drew it.",
    "current": "Probability p of the token for the trainer, in the last update of the step.",
    "ratio": "Probability current / old: what the update has changed.",
    "cell": "In range: the ratio is inside the clip range, or outside it while the advantage pulls it back. Clipped"
    " low: advantage below 0 and ratio below 1 - eps_clip, already much less likely (PPO: no gradient; GPPO: a gradient"
    " of weight 1 - eps_clip). Clipped high: advantage above 0 and ratio above 1 + eps_clip_high, already much more"
    " likely (PPO: no gradient; GPPO: a gradient of weight 1 + eps_clip_high).",
    "advantage": "The scale ends at the largest advantage of the samples on this page.",
}
HINT = """<p class="muted">Hold the pointer over a token for all its numbers. &#8629; is a line break that the model
wrote. A sample is correct here if its reward is above 0.</p>"""


def switch_rules() -> str:
    """CSS of the switch. The buttons, the legends and the samples must be siblings, in this order."""
    rules = []
    for measure in MEASURES.values():
        checked = f"#by-{measure.name}:checked"
        rules.append(f"{checked}~.scales .scale-{measure.name}{{display:flex}}")
        rules += [
            f"{checked}~* .{measure.letter}{level}{{background:var(--{measure.palette}-{level})}}"
            for level in range(len(PALETTES[measure.palette]))
        ]
    # Cells differ by more than hue.
    for level, line in ((1, "dotted var(--series-1)"), (2, "solid var(--series-2)")):
        rules.append(f"#by-cell:checked~* .{MEASURES['cell'].letter}{level}{{border-bottom:2px {line}}}")
    return "\n".join(rules) + "\n"


def render_switch(scales: Scales) -> str:
    """The buttons, and a legend for each measure."""
    buttons = [
        f'<input type="radio" name="by" class="by" id="by-{name}"{" checked" if name == CHECKED else ""}>'
        f'<label for="by-{name}">{measure.title}</label>'
        for name, measure in MEASURES.items()
    ]
    legends = [_legend(measure, scales) for measure in MEASURES.values()]
    scale_card = f'<div class="card scales">{"".join(legends)}{HINT}</div>'
    return f'<span class="muted">Colour by </span>{"".join(buttons)}\n{scale_card}'


def _legend(measure: Measure, scales: Scales) -> str:
    num_colours = len(PALETTES[measure.palette])
    marks = "".join(
        f'<span class="t {measure.letter}{number % num_colours}">{escape(words)}</span>'
        for number, words in enumerate(measure.legend(scales))
    )
    return f'<div class="scale scale-{measure.name}">{marks}<p class="muted">{NOTES[measure.name]}</p></div>'


def is_correct(sample: SampleRecord) -> bool:
    """Reward above 0; a sample whose reward failed is not."""
    return sample.reward is not None and sample.reward > 0


def choose_samples(samples: Sequence[StepSample], *, most: int) -> list[StepSample]:
    """At most `most` samples, last steps first: half correct, half wrong; one kind fills up where the other lacks."""
    newest = sorted(samples, key=lambda item: item[0], reverse=True)
    correct = [item for item in newest if is_correct(item[1])]
    wrong = [item for item in newest if not is_correct(item[1])]
    num_correct = max(most - most // 2, most - len(wrong))
    chosen = correct[:num_correct]
    chosen += wrong[: most - len(chosen)]
    return sorted(chosen, key=lambda item: item[0], reverse=True)


def render_samples(samples: Sequence[StepSample], scales: Scales) -> str:
    """The samples as foldable blocks, the first correct and the first wrong one open."""
    opened: set[bool] = set()
    blocks: list[str] = []
    for step, sample in samples:
        blocks.append(_block(step, sample, scales, is_open=is_correct(sample) not in opened))
        opened.add(is_correct(sample))
    return "\n".join(blocks)


def _block(step: int, sample: SampleRecord, scales: Scales, *, is_open: bool) -> str:
    verdict = '<span class="good">correct</span>' if is_correct(sample) else '<span class="bad">wrong</span>'
    reward = "none (failed)" if sample.reward is None else format_number(sample.reward)
    facts = [
        f"reward {reward}",
        f"advantage {format_number(sample.mean_advantage)}",
        f"{len(sample.tokens)} tokens",
        f"clipped {sample.cells.count('clipped_low')} low, {sample.cells.count('clipped_high')} high",
        f"weights {version_range(sample)}",
        *(["cut off"] if sample.is_truncated else []),
    ]
    row = "".join(f'<span class="fact">{escape(fact)}</span>' for fact in facts)
    return (
        f'<details class="sample"{" open" if is_open else ""}>'
        f'<summary>step {step} {verdict}{row}<span class="fact muted">{escape(sample.sample_id)}</span></summary>'
        f'<div class="label">prompt</div><pre>{escape(sample.prompt)}</pre>'
        f'<div class="label">drawn by</div><div>{_pieces(sample, scales)}</div>'
        f'<div class="label">response</div>{_response(sample, scales)}'
        f'<div class="label">right answer</div><pre>{escape(sample.answer)}</pre>'
        f'<div class="label">why this reward</div><pre>{escape(sample.reason)}</pre></details>'
    )


def _pieces(sample: SampleRecord, scales: Scales) -> str:
    """Who drew how many tokens, in the colours that the tokens have by version and by engine."""
    pieces = [piece for piece in sample.pieces if piece.num_tokens]
    starts = list(accumulate((piece.num_tokens for piece in pieces), initial=0))[:-1]
    shown = []
    for piece, classes in zip(pieces, _classes(sample, scales, starts, ("version", "engine")), strict=True):
        facts = f"{piece.num_tokens} tokens, version {piece.weight_version}, {piece.engine or NO_ENGINE}"
        shown.append(f'<span class="{classes}">{escape(facts)}</span>')
    return " ".join(shown)


def _response(sample: SampleRecord, scales: Scales) -> str:
    """Token spans; the plain text if nothing was generated token by token."""
    if not sample.tokens:
        return f"<pre>{escape(sample.response)}</pre>"
    num_tokens = len(sample.tokens)
    if num_tokens <= NUM_HEAD_TOKENS + NUM_TAIL_TOKENS:
        return f'<div class="tokens">{_spans(sample, scales, range(num_tokens))}</div>'
    tail = range(num_tokens - NUM_TAIL_TOKENS, num_tokens)
    return (
        f'<div class="tokens">{_spans(sample, scales, range(NUM_HEAD_TOKENS))}</div>'
        f'<p class="muted">... {num_tokens - NUM_HEAD_TOKENS - NUM_TAIL_TOKENS} tokens left out ...</p>'
        f'<div class="tokens">{_spans(sample, scales, tail)}</div>'
    )


def _spans(sample: SampleRecord, scales: Scales, positions: Sequence[int]) -> str:
    classes = _classes(sample, scales, positions, MEASURES)
    rows = zip(positions, classes, _tips(sample, positions), strict=True)
    return "".join(_span(sample.tokens[i], names, tip) for i, names, tip in rows)


def _classes(sample: SampleRecord, scales: Scales, positions: Sequence[int], names: Iterable[str]) -> Iterator[str]:
    """CSS classes of the tokens at some positions: one a measure that the token has."""
    columns = [(measure.letter, measure.levels(sample, scales)) for measure in map(MEASURES.__getitem__, names)]
    columns = [(letter, levels) for letter, levels in columns if levels]
    for i in positions:
        yield " ".join(("t", *(f"{letter}{levels[i]}" for letter, levels in columns if levels[i] is not None)))


def _tips(sample: SampleRecord, positions: Sequence[int]) -> Iterator[str]:
    """What the pointer shows of the tokens at some positions: a line a measure."""
    columns = [(measure, values) for measure in MEASURES.values() if (values := measure.values(sample))]
    for i in positions:
        yield "\n".join(f"{measure.title} {measure.text(values[i])}" for measure, values in columns)


def _span(token: str, classes: str, tip: str) -> str:
    # A token of line breaks alone would be an invisible span: the arrow gives it a body to colour and to point at.
    text = escape(token).replace("\n", '<span class="eol">&#8629;</span>\n')
    return f'<span class="{classes}" title="{escape(tip)}">{text}</span>'
