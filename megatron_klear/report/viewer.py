"""Rollouts on the report page: each response token by token, coloured by what the loss's clip did with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megatron_klear.report.console import format_number
from megatron_klear.report.record import SampleRecord

StepSample = tuple[int, SampleRecord]

# A 32k-token response would be 4 MB of page; its beginning and its end tell the story.
NUM_HEAD_TOKENS = 1200
NUM_TAIL_TOKENS = 400
CELL_CLASS = {"in_range": "t", "clipped_low": "t l", "clipped_high": "t h"}
CELL_NAME = {"in_range": "in range", "clipped_low": "clipped low", "clipped_high": "clipped high"}

LEGEND = """<div class="card legend">
<div><span class="t">in range</span> the probability ratio current / old is inside the clip range,
or outside it while the advantage pulls it back</div>
<div><span class="t l">clipped low</span> advantage below 0 and ratio below 1 - eps_clip: already much less likely
(PPO: no gradient; GPPO: a gradient of weight 1 - eps_clip)</div>
<div><span class="t h">clipped high</span> advantage above 0 and ratio above 1 + eps_clip_high: already much more likely
(PPO: no gradient; GPPO: a gradient of weight 1 + eps_clip_high)</div>
<div class="muted">Hold the pointer over a token for its log-probs, ratio and cell. &#8629; is a line break that the
model wrote. A sample is correct here if its reward is above 0.</div>
</div>"""


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


def render_samples(samples: Sequence[StepSample]) -> str:
    """The samples as foldable blocks, the first correct and the first wrong one open."""
    opened: set[bool] = set()
    blocks: list[str] = []
    for step, sample in samples:
        blocks.append(_block(step, sample, is_open=is_correct(sample) not in opened))
        opened.add(is_correct(sample))
    return "\n".join(blocks)


def _block(step: int, sample: SampleRecord, *, is_open: bool) -> str:
    verdict = '<span class="good">correct</span>' if is_correct(sample) else '<span class="bad">wrong</span>'
    reward = "none (failed)" if sample.reward is None else format_number(sample.reward)
    facts = [
        f"reward {reward}",
        f"advantage {format_number(sample.advantage)}",
        f"{len(sample.tokens)} tokens",
        f"clipped {sample.cells.count('clipped_low')} low, {sample.cells.count('clipped_high')} high",
        f"weights {sample.weight_version}",
        *(["cut off"] if sample.truncated else []),
    ]
    row = "".join(f'<span class="fact">{escape(fact)}</span>' for fact in facts)
    return (
        f'<details class="sample"{" open" if is_open else ""}>'
        f'<summary>step {step} {verdict}{row}<span class="fact muted">{escape(sample.sample_id)}</span></summary>'
        f'<div class="label">prompt</div><pre>{escape(sample.prompt)}</pre>'
        f'<div class="label">response</div>{_response(sample)}'
        f'<div class="label">right answer</div><pre>{escape(sample.answer)}</pre>'
        f'<div class="label">why this reward</div><pre>{escape(sample.reason)}</pre></details>'
    )


def _response(sample: SampleRecord) -> str:
    """Token spans; the plain text if nothing was generated token by token."""
    if not sample.tokens:
        return f"<pre>{escape(sample.response)}</pre>"
    num_tokens = len(sample.tokens)
    if num_tokens <= NUM_HEAD_TOKENS + NUM_TAIL_TOKENS:
        return f'<div class="tokens">{_spans(sample, range(num_tokens))}</div>'
    tail = range(num_tokens - NUM_TAIL_TOKENS, num_tokens)
    return (
        f'<div class="tokens">{_spans(sample, range(NUM_HEAD_TOKENS))}</div>'
        f'<p class="muted">... {num_tokens - NUM_HEAD_TOKENS - NUM_TAIL_TOKENS} tokens left out ...</p>'
        f'<div class="tokens">{_spans(sample, tail)}</div>'
    )


def _spans(sample: SampleRecord, positions: Iterable[int]) -> str:
    return "".join(_span(sample, position) for position in positions)


def _span(sample: SampleRecord, i: int) -> str:
    cell = sample.cells[i]
    tip = (
        f"log-prob current {format_number(sample.current_logprobs[i])}, rollout"
        f" {format_number(sample.rollout_logprobs[i])}; ratio {format_number(sample.ratios[i])}; {CELL_NAME[cell]}"
    )
    # A token of line breaks alone would be an invisible span: the arrow gives it a body to colour and to point at.
    text = escape(sample.tokens[i]).replace("\n", '<span class="eol">&#8629;</span>\n')
    return f'<span class="{CELL_CLASS[cell]}" title="{escape(tip)}">{text}</span>'
