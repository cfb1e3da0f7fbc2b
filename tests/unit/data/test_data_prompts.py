from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_klear.config.recipe import PromptDataConfig
from megatron_klear.data.prompts import ItemStream, PromptSet, load_prompts, validate_answers
from megatron_klear.data.template import ChatTokenizer
from megatron_klear.errors import CheckpointError, DataError

WriteRows = Callable[[Iterable[Mapping[str, Any]]], str]


def load(path: str, tokenizer: ChatTokenizer, **settings: Any) -> PromptSet:
    return load_prompts(PromptDataConfig(prompt_data=path, **settings), tokenizer)


def test_slime_rows(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    path = write_rows(
        [
            {"prompt": "1+1?", "label": "2", "metadata": {"level": 1}},
            {"prompt": messages, "label": 4, "metadata": None},
        ]
    )
    first, second = load(path, tokenizer).prompts
    assert (first.answer, first.source, dict(first.metadata)) == ("2", "", {"level": 1})
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert list(first.token_ids) == tokenizer.render_prompt(first.messages)
    assert (second.answer, list(second.messages), dict(second.metadata)) == ("4", messages, {})


def test_verl_rows(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    row = {
        "data_source": "coder1_longcot",
        "prompt": [{"role": "user", "content": "add one"}],
        "ability": "code",
        "reward_model": {"ground_truth": tests, "style": "rule"},
        "extra_info": {"index": 7, "split": None},
        "hash": "abc",
    }
    (prompt,) = load(write_rows([row]), tokenizer).prompts
    assert prompt.answer == tests
    assert prompt.source == "coder1_longcot"
    assert dict(prompt.metadata) == {"ability": "code", "style": "rule", "extra_info": {"index": 7, "split": None}}


def test_fields_can_have_other_names(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    path = write_rows([{"problem": "1+1?", "answer": "2"}])
    (prompt,) = load(path, tokenizer, input_key="problem", label_key="answer").prompts
    assert prompt.answer == "2"


def test_ids_follow_the_content_and_are_unique(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    a, b = {"prompt": "1+1?", "label": "2"}, {"prompt": "1+1?", "label": "3"}
    first, again, other = (prompt.prompt_id for prompt in load(write_rows([a, a, b]), tokenizer).prompts)
    assert again == f"{first}-2"
    assert other != first
    assert len(first) == 16
    assert [prompt.prompt_id for prompt in load(write_rows([b, a]), tokenizer).prompts] == [other, first]


def test_too_long_prompts_are_counted_or_refused(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    path = write_rows([{"prompt": "1" * n, "label": "1"} for n in (1, 50, 2, 60)])
    longest = len(tokenizer.render_prompt([{"role": "user", "content": "11"}]))
    kept = load(path, tokenizer, max_prompt_len=longest)
    assert [len(prompt.messages[0]["content"]) for prompt in kept.prompts] == [1, 2]
    assert kept.dropped == Counter(prompt_too_long=2)
    with pytest.raises(DataError, match=r"row 2 of .*has \d+ tokens, more than data\.max_prompt_len = \d+; raise it"):
        load(path, tokenizer, max_prompt_len=longest, overlong="error")
    with pytest.raises(
        DataError, match=r"no prompt of .* is left .*'prompt_too_long': 4.*raise data\.max_prompt_len = 3"
    ):
        load(path, tokenizer, max_prompt_len=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1"}, "neither 'label' nor 'reward_model.ground_truth'; its fields are .*data.label_key"),
        ({"prompt": "1", "label": None}, "neither 'label' nor"),
        ({"prompt": "1", "label": " "}, "'label' is empty; expected the answer"),
        ({"prompt": "1", "reward_model": {"ground_truth": ""}}, "'reward_model.ground_truth' is empty"),
        ({"prompt": "1", "label": ["2"]}, r"'label' is \['2'\]; expected the answer as text or a whole number"),
        ({"prompt": "1", "label": 0.5}, "'label' is 0.5; expected"),
        ({"prompt": "1", "label": True}, "'label' is True; expected"),
        ({"prompt": "1", "reward_model": "2"}, "'reward_model' is '2'; expected an object"),
        ({"prompt": "1", "label": "2", "metadata": "x"}, "'metadata' is 'x'; expected an object"),
        ({"question": "1", "label": "2"}, r"has no 'prompt'; its fields are \['label', 'question'\].*data.input_key"),
        ({"prompt": "", "label": "2"}, "field 'prompt' is empty; expected text or a list of messages"),
        ({"prompt": [], "label": "2"}, r"field 'prompt' is \[\]; expected text, or at least one message"),
        ({"prompt": 5, "label": "2"}, "field 'prompt' is 5; expected text"),
        ({"prompt": ["hi"], "label": "2"}, "message 1 is 'hi'; expected an object with 'role' and 'content'"),
        ({"prompt": [{"role": "user"}], "label": "2"}, "message 1 has no 'content', only"),
        (
            {"prompt": [{"role": "user", "content": ["x"]}], "label": "2"},
            r"message 1: 'content' is \['x'\]; expected text",
        ),
        ({"prompt": [{"role": "assistant", "content": "x"}], "label": "2"}, "ends with an assistant message"),
        ({"prompt": "€", "label": "2"}, "the tokenizer cannot encode"),
    ],
)
def test_bad_rows_are_named(
    write_rows: WriteRows, tokenizer: ChatTokenizer, row: Mapping[str, Any], message: str
) -> None:
    path = write_rows([{"prompt": "1", "label": "1"}, row])
    with pytest.raises(DataError, match=rf"row 2 of .*rows\.jsonl.*{message}"):
        load(path, tokenizer)


def test_fields_that_parquet_fills_with_nothing_are_left_out(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    row = {"prompt": [{"role": "user", "content": "1", "tool_calls": None}], "label": "1", "extra_info": None}
    (prompt,) = load(write_rows([row]), tokenizer).prompts
    assert prompt.messages == ({"role": "user", "content": "1"},)
    assert prompt.metadata == {}


def test_answers_that_parse_to_nothing_are_counted(write_rows: WriteRows, tokenizer: ChatTokenizer) -> None:
    path = write_rows([{"prompt": "1" * n, "label": label} for n, label in ((1, "7"), (50, "8"), (1, "$$"))])
    loaded = load(path, tokenizer, max_prompt_len=60)
    checked = validate_answers(loaded, lambda prompt: prompt.answer.isdigit())
    assert [prompt.answer for prompt in checked.prompts] == ["7"]
    assert checked.dropped == Counter(prompt_too_long=1, answer_parses_to_nothing=1)
    with pytest.raises(
        DataError, match=r"none of the 2 answers can be read by the reward, for example \['7', '\$\$'\]"
    ):
        validate_answers(loaded, lambda _: False)


@given(num_items=st.integers(1, 30), seed=st.integers(0, 2**40), takes=st.lists(st.integers(0, 40), max_size=8))
def test_stream_is_one_permutation_an_epoch_however_it_is_taken(num_items: int, seed: int, takes: list[int]) -> None:
    stream = ItemStream(num_items, seed)
    taken = [index for n in takes for index in stream.next(n)]
    assert taken == ItemStream(num_items, seed).next(sum(takes))
    for start in range(0, len(taken) - num_items + 1, num_items):
        assert sorted(taken[start : start + num_items]) == list(range(num_items))


@given(num_items=st.integers(1, 30), seed=st.integers(0, 1000), before=st.integers(0, 70))
def test_stream_resumes_exactly(num_items: int, seed: int, before: int) -> None:
    stream = ItemStream(num_items, seed)
    stream.next(before)
    state = json.loads(json.dumps(stream.state()))
    resumed = ItemStream(num_items, seed)
    resumed.restore(state)
    assert resumed.next(50) == stream.next(50)
    assert resumed.state() == stream.state()


def test_orders_differ_between_epochs_and_seeds() -> None:
    stream = ItemStream(50, 3)
    first, second = stream.next(50), stream.next(50)
    assert first != second
    assert first != ItemStream(50, 4).next(50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_items": 9}, "made with num_items = 9, this run has 10; resume with the same data"),
        ({"seed": 2}, "made with seed = 2, this run has 1; resume with the same data and run.seed"),
        ({"position": 11}, "points outside its 10 items"),
        ({"epoch": -1}, "points outside its 10 items"),
        (
            {"cursor": 1},
            r"has the fields .*'cursor'.*expected \['epoch', 'fingerprint', 'num_items'",
        ),
    ],
)
def test_foreign_states_are_refused(change: dict[str, int], message: str) -> None:
    stream = ItemStream(10, 1)
    before = stream.state()
    with pytest.raises(CheckpointError, match=message):
        stream.restore(before | change)
    assert stream.state() == before


def test_stream_over_nothing() -> None:
    with pytest.raises(DataError, match="cannot draw from 0 items"):
        ItemStream(0, 1)
