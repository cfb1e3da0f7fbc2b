from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from megatron_klear.config.recipe import SftDataConfig
from megatron_klear.data.sft import SftSet, load_sft
from megatron_klear.data.template import ChatTokenizer
from megatron_klear.errors import DataError
from megatron_klear.types import Sample

WriteRows = Callable[[Iterable[Mapping[str, Any]]], str]
USER = {"role": "user", "content": "1+1?"}
REPLY = {"role": "assistant", "content": "<think>easy</think>2"}


def load(path: str, tokenizer: ChatTokenizer, **settings: Any) -> SftSet:
    return load_sft(SftDataConfig(path=path, **settings), tokenizer)


def trained_text(tokenizer: ChatTokenizer, sample: Sample) -> str:
    return tokenizer.decode([t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m])


def test_all_three_ways_to_write_a_row_give_the_same_sample(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    rows = [
        {"messages": [USER, REPLY]},
        {"prompt": "1+1?", "response": REPLY["content"]},
        {"messages": None, "prompt": [USER], "response": REPLY["content"]},
    ]
    loaded = load(write_rows(rows), tokenizer)
    assert [sample.sample_id for sample in loaded.samples] == ["sft-1", "sft-2", "sft-3"]
    assert len({tuple(sample.token_ids) for sample in loaded.samples}) == 1
    for sample in loaded.samples:
        assert trained_text(tokenizer, sample) == "<think>easy</think>2<|im_end|>"
        assert list(sample.prompt.token_ids) == tokenizer.render_prompt([USER])
        assert sample.prompt.messages == (USER,)
        assert sample.rollout_logprobs == [0.0] * len(sample.token_ids)
        assert sample.reward is None
    assert (loaded.dropped, loaded.num_truncated) == (Counter(), 0)


def test_fields_can_have_other_names(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    path = write_rows([{"chat": [USER, REPLY]}, {"q": "1+1?", "a": "2", "prompt": "ignored"}])
    loaded = load(path, tokenizer, messages_key="chat", input_key="q", response_key="a")
    assert [trained_text(tokenizer, s) for s in loaded.samples] == ["<think>easy</think>2<|im_end|>", "2<|im_end|>"]


def lengths(tokenizer: ChatTokenizer) -> tuple[int, int]:
    """Tokens of the prompt, and of the whole sample with a response of four characters."""
    prompt = len(tokenizer.render_prompt([USER]))
    return prompt, prompt + 4 + 2


def test_too_long_samples_stop_by_default(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    _, whole = lengths(tokenizer)
    path = write_rows([{"prompt": "1+1?", "response": text} for text in ("abcd", "abcde")])
    with pytest.raises(
        DataError, match=rf"row 2 of .* has {whole + 1} tokens, more than data\.max_length = {whole}; raise"
    ):
        load(path, tokenizer, max_length=whole)


def test_too_long_samples_are_dropped_and_counted(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    _, whole = lengths(tokenizer)
    path = write_rows([{"prompt": "1+1?", "response": text} for text in ("abcd", "abcde", "abcdef")])
    loaded = load(path, tokenizer, max_length=whole, overlong="drop")
    assert [sample.sample_id for sample in loaded.samples] == ["sft-1"]
    assert (loaded.dropped, loaded.num_truncated) == (Counter(sample_too_long=2), 0)
    with pytest.raises(DataError, match=r"no sample of .* is left .*'sample_too_long': 3.*raise data\.max_length = 2"):
        load(path, tokenizer, max_length=2, overlong="drop")


def test_truncation_cuts_the_end_and_keeps_the_rows_equal(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    prompt, _ = lengths(tokenizer)
    path = write_rows([{"prompt": "1+1?", "response": "abcdef"}, {"prompt": "1+1?" * 9, "response": "z"}])
    loaded = load(path, tokenizer, max_length=prompt + 3, overlong="truncate")
    (sample,) = loaded.samples
    assert trained_text(tokenizer, sample) == "abc"
    assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.rollout_logprobs) == prompt + 3
    assert sample.stop_reason == "length"
    assert (loaded.dropped, loaded.num_truncated) == (Counter(no_response_left=1), 1)


def test_a_sample_cut_to_its_prompt_is_dropped(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    prompt, _ = lengths(tokenizer)
    path = write_rows([{"prompt": "1+1?", "response": "abcdef"}])
    with pytest.raises(DataError, match="no_response_left"):
        load(path, tokenizer, max_length=prompt, overlong="truncate")
    assert load(path, tokenizer, max_length=prompt + 1, overlong="truncate").num_truncated == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"has neither 'messages' nor both 'prompt' and 'response'; its fields are \['text'\]: set"),
        ({"prompt": "1"}, "has neither 'messages' nor both"),
        ({"prompt": "1", "response": 2}, "field 'response' is 2; expected text"),
        ({"prompt": "1", "response": " "}, "the assistant's last message is empty"),
        ({"messages": [USER]}, "must end with an assistant message; its roles are"),
        ({"messages": "hi"}, "must end with an assistant message"),
        ({"messages": [USER, {"role": "assistant"}]}, "field 'messages', message 2 has no 'content'"),
        ({"messages": [{"role": "user", "content": "€"}, REPLY]}, "the tokenizer cannot encode"),
    ],
)
def test_bad_rows_are_named(
    write_rows: WriteRows, tokenizer: ChatTokenizer, row: Mapping[str, Any], message: str
) -> None:
    path = write_rows([{"messages": [USER, REPLY]}, row])
    with pytest.raises(DataError, match=rf"row 2 of .*rows\.jsonl.*{message}"):
        load(path, tokenizer)
