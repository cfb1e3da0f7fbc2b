from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_klear.data.template import ChatTokenizer, load_tokenizer
from megatron_klear.errors import DataError
from megatron_klear.types import Message

WriteTokenizer = Callable[..., Path]

USER: Message = {"role": "user", "content": "1+1?"}
REPLY: Message = {"role": "assistant", "content": "<think>easy</think>2"}
# The shape of DeepSeek-R1's trap: the generation prompt opens the thinking, the conversation does not contain it.
OPENING_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


def trained_text(tokenizer: ChatTokenizer, *messages: Message) -> str:
    rendered = tokenizer.render_sample(messages)
    return tokenizer.decode([t for t, m in zip(rendered.token_ids, rendered.loss_mask, strict=True) if m])


def test_prompt_ends_where_the_assistant_starts(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.render_prompt([USER])
    assert tokenizer.decode(ids) == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


def test_loss_is_on_the_last_turn_and_its_end_token_alone(tokenizer: ChatTokenizer) -> None:
    rendered = tokenizer.render_sample([USER, REPLY])
    whole = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>easy</think>2<|im_end|>\n"
    assert tokenizer.decode(rendered.token_ids) == whole
    assert trained_text(tokenizer, USER, REPLY) == "<think>easy</think>2<|im_end|>"
    assert rendered.loss_mask[-1] == 0


def test_thinking_of_an_earlier_turn_is_neither_trained_on_nor_kept(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, REPLY, USER, {"role": "assistant", "content": "three"}]
    assert trained_text(tokenizer, *messages) == "three<|im_end|>"
    assert "easy" not in tokenizer.decode(tokenizer.render_sample(messages).token_ids)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(alphabet=string.printable), min_size=2, max_size=6).filter(lambda t: len(t) % 2 == 0))
def test_masked_part_is_what_a_rollout_would_have_to_produce(tokenizer: ChatTokenizer, texts: list[str]) -> None:
    roles = ["user", "assistant"] * (len(texts) // 2)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    rendered = tokenizer.render_sample(messages)
    prompt = tokenizer.render_prompt(messages[:-1])
    assert rendered.token_ids[: len(prompt)] == prompt
    assert rendered.loss_mask.index(1) == len(prompt)
    response = [t for t, m in zip(rendered.token_ids, rendered.loss_mask, strict=True) if m]
    assert tokenizer.decode_response(response) == texts[-1]


def test_template_that_promises_another_beginning_is_explained(write_tokenizer: WriteTokenizer) -> None:
    tokenizer = load_tokenizer(write_tokenizer(chat_template=OPENING_TEMPLATE))
    message = r"part at token 21: the prompt has 'sistant\]<think>', the conversation 'sistant\]2<\|im_end\|>'\. Change"
    with pytest.raises(DataError, match=message):
        tokenizer.render_sample([USER, REPLY])
    assert tokenizer.decode(tokenizer.render_prompt([USER])) == "[user]1+1?[assistant]<think>"


def test_tokens_that_merge_over_the_border_are_explained(write_tokenizer: WriteTokenizer) -> None:
    tokenizer = load_tokenizer(write_tokenizer(words=["ab", "cd", "abcd"]))
    with pytest.raises(DataError, match="part at token 0: the prompt has 'ab', the conversation 'abcd"):
        tokenizer.render_sample([{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}])


def test_without_a_template_contents_are_joined_and_the_response_ends(write_tokenizer: WriteTokenizer) -> None:
    tokenizer = load_tokenizer(write_tokenizer(eos_token="<|endoftext|>"))
    assert tokenizer.decode(tokenizer.render_prompt([USER])) == "1+1?"
    assert trained_text(tokenizer, USER, REPLY) == "<think>easy</think>2<|endoftext|>"


@pytest.mark.parametrize("messages", [[], [USER], [REPLY, USER]])
def test_conversation_must_end_with_the_assistant(tokenizer: ChatTokenizer, messages: list[Message]) -> None:
    with pytest.raises(DataError, match="must end with an assistant message; its roles are"):
        tokenizer.render_sample(messages)


def test_turn_without_an_end_token_is_refused(write_tokenizer: WriteTokenizer) -> None:
    tokenizer = load_tokenizer(write_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(
        DataError, match=r"none of the stop tokens \['<\|im_end\|>'\]: the model would never learn to stop"
    ):
        tokenizer.render_sample([USER, REPLY])


def test_template_that_refuses_is_quoted(write_tokenizer: WriteTokenizer) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}<|im_end|>"
    tokenizer = load_tokenizer(write_tokenizer(chat_template=template))
    with pytest.raises(DataError, match=r"refuses a conversation with roles \['system'\]: no system here; change"):
        tokenizer.render_prompt([{"role": "system", "content": "x"}])


def test_stop_tokens_come_from_tokenizer_generation_config_and_template(
    write_tokenizer: WriteTokenizer, tokenizer: ChatTokenizer
) -> None:
    end_of_text, start, end_of_turn = (tokenizer.encode(t)[0] for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    assert tokenizer.stop_token_ids == (end_of_turn,)
    template = tokenizer._tokenizer.chat_template
    base = load_tokenizer(write_tokenizer(eos_token="<|endoftext|>", chat_template=template))
    assert base.stop_token_ids == (end_of_text, end_of_turn)
    listed = load_tokenizer(
        write_tokenizer(eos_token="<|endoftext|>", generation={"eos_token_id": [start, end_of_text]})
    )
    assert listed.stop_token_ids == (end_of_text, start)
    single = load_tokenizer(write_tokenizer(generation={"eos_token_id": start}))
    assert single.stop_token_ids == (end_of_turn, start)


def test_decoding_hides_nothing_but_the_stop_token_at_the_end(tokenizer: ChatTokenizer) -> None:
    text = "<|im_start|><think>a  b\n</think><|im_end|> 7 , . !<|endoftext|><|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_response(ids) == text.removesuffix("<|im_end|>")
    assert tokenizer.decode_response(ids[:-1]) == text.removesuffix("<|im_end|>")
    assert tokenizer.decode_response([]) == ""


def test_vocab_size_bounds_every_id(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.vocab_size == 5 + len(string.printable)
    assert max(tokenizer.encode(string.printable)) == tokenizer.vocab_size - 1


def test_text_outside_the_vocabulary_is_an_error(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=r"cannot encode '1€' .*use text of its vocabulary"):
        tokenizer.encode("1€")


def test_folders_that_hold_no_tokenizer(tmp_path: Path, write_tokenizer: WriteTokenizer) -> None:
    with pytest.raises(DataError, match=r"absent does not exist; expected a Hugging Face folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has no tokenizer_config\.json; copy"):
        load_tokenizer(tmp_path)
    folder = write_tokenizer()
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(DataError, match=r"has no tokenizer that loads: .*copy tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer that loads"):
        load_tokenizer(folder)


def test_folders_without_a_usable_stop_token(write_tokenizer: WriteTokenizer) -> None:
    with pytest.raises(DataError, match=r"names no stop token; set eos_token"):
        load_tokenizer(write_tokenizer(eos_token=None))
    with pytest.raises(DataError, match=r"eos_token_id is '<end>'; expected a token id or a list"):
        load_tokenizer(write_tokenizer(generation={"eos_token_id": "<end>"}))
    folder = write_tokenizer()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json is not valid JSON"):
        load_tokenizer(folder)
