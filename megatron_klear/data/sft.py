"""Supervised samples from data rows."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_klear.config.recipe import SftDataConfig
from megatron_klear.data.messages import Conversation, to_messages
from megatron_klear.data.prompts import fingerprint
from megatron_klear.data.records import Row, read_rows
from megatron_klear.errors import DataError
from megatron_klear.types import Prompt, Sample

if TYPE_CHECKING:
    from megatron_klear.data.template import ChatTokenizer


@dataclass(frozen=True, slots=True)
class SftSet:
    """Samples in the order of the file. `dropped` counts rows by reason; a cut sample is kept and counted apart."""

    samples: tuple[Sample, ...]
    dropped: Counter[str]
    num_truncated: int = 0

    @property
    def fingerprint(self) -> str:
        """Changes with any token, any mask entry, or the order of samples."""
        rows = (array("q", sample.token_ids).tobytes() + bytes(sample.loss_mask) for sample in self.samples)
        return fingerprint(rows)


def load_sft(cfg: SftDataConfig, tokenizer: ChatTokenizer) -> SftSet:
    """Render every row; too long ones are dropped, cut or an error as `cfg.overlong` says. None left: `DataError`."""
    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    num_truncated = 0
    for number, row in enumerate(read_rows(cfg.path), start=1):
        sample = _to_sample(row, cfg, tokenizer, number=number)
        if len(sample.token_ids) <= cfg.max_length:
            samples.append(sample)
        elif cfg.overlong == "error":
            raise DataError(
                f"row {number} of {cfg.path} has {len(sample.token_ids)} tokens, more than data.max_length ="
                f" {cfg.max_length}; raise it, or set data.overlong to drop or truncate"
            )
        elif cfg.overlong == "drop":
            dropped["sample_too_long"] += 1
        elif len(sample.prompt.token_ids) >= cfg.max_length:
            dropped["no_response_left"] += 1
        else:
            samples.append(_truncated(sample, cfg.max_length))
            num_truncated += 1
    if not samples:
        raise DataError(f"no sample of {cfg.path} is left ({dict(dropped)}); raise data.max_length = {cfg.max_length}")
    return SftSet(tuple(samples), dropped, num_truncated)


def _to_sample(row: Row, cfg: SftDataConfig, tokenizer: ChatTokenizer, *, number: int) -> Sample:
    where = f"row {number} of {cfg.path}"
    messages = _conversation(row, cfg, where=where)
    try:
        rendered = tokenizer.render_sample(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    num_prompt = rendered.loss_mask.index(1)
    return Sample(
        sample_id=f"sft-{number}",
        prompt=Prompt(f"sft-{number}", tuple(rendered.token_ids[:num_prompt]), messages=messages[:-1]),
        token_ids=rendered.token_ids,
        loss_mask=rendered.loss_mask,
        rollout_logprobs=[0.0] * len(rendered.token_ids),
        stop_reason="stop",
    )


def _conversation(row: Row, cfg: SftDataConfig, *, where: str) -> Conversation:
    if row.get(cfg.messages_key) is not None:
        messages = to_messages(row[cfg.messages_key], where=f"{where}, field {cfg.messages_key!r}")
    else:
        messages = _from_pair(row, cfg, where=where)
    if messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip():
        raise DataError(f"{where}: the assistant's last message is empty; expected a response to learn")
    return messages


def _from_pair(row: Row, cfg: SftDataConfig, *, where: str) -> Conversation:
    for key in (cfg.input_key, cfg.response_key):
        if row.get(key) is None:
            raise DataError(
                f"{where} has neither {cfg.messages_key!r} nor both {cfg.input_key!r} and {cfg.response_key!r};"
                f" its fields are {sorted(row)}: set data.messages_key, or data.input_key and data.response_key"
            )
    response = row[cfg.response_key]
    if not isinstance(response, str):
        raise DataError(f"{where}, field {cfg.response_key!r} is {response!r}; expected text")
    prompt = to_messages(row[cfg.input_key], where=f"{where}, field {cfg.input_key!r}")
    return (*prompt, {"role": "assistant", "content": response})


def _truncated(sample: Sample, max_length: int) -> Sample:
    return Sample(
        sample_id=sample.sample_id,
        prompt=sample.prompt,
        token_ids=sample.token_ids[:max_length],
        loss_mask=sample.loss_mask[:max_length],
        rollout_logprobs=sample.rollout_logprobs[:max_length],
        stop_reason="length",
    )
