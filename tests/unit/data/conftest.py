"""Hand-made tokenizers: characters with a chat template like Qwen3's, and words that merge over a border."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_klear.data.template import ChatTokenizer, load_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>")
# Like Qwen3's: thinking is removed from every assistant turn but the last, and a turn ends with a line break.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WriteTokenizer = Callable[..., Path]
WriteRows = Callable[[Iterable[Mapping[str, Any]]], str]


def tokenizer_files(vocab: Mapping[str, int], pre_tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    added = [
        {"id": i, "content": token, "special": token in SPECIAL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, i in vocab.items()
        if token in SPECIAL + TAGS
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> WriteTokenizer:
    def write(*, words: Iterable[str] | None = None, generation: object = None, **config: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        tokens = [*SPECIAL, *TAGS, *(string.printable if words is None else words)]
        single = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        files = tokenizer_files(
            {token: i for i, token in enumerate(tokens)}, single if words is None else {"type": "WhitespaceSplit"}
        )
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (folder / "tokenizer.json").write_text(json.dumps(files))
        (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return write


@pytest.fixture
def tokenizer(write_tokenizer: WriteTokenizer) -> ChatTokenizer:
    return load_tokenizer(write_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(rows: Iterable[Mapping[str, Any]]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
