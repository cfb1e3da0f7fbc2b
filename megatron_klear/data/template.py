"""Text to token ids and back, chat template included. The only importer of a tokenizer (and slow to import)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_klear.errors import DataError
from megatron_klear.types import Message

# Tokens shown on either side of the place where two renderings part.
_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class RenderedSample:
    """A whole conversation as tokens. Entry i of `loss_mask` is 1 where token i itself is to be learnt."""

    token_ids: list[int]
    loss_mask: list[int]


class ChatTokenizer:
    """A tokenizer with its chat template. Special tokens are never added or hidden behind the caller's back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int] = ()) -> None:
        """`stop_token_ids` come on top of the tokenizer's own end of text and the template's end of turn."""
        self._tokenizer = tokenizer
        self.vocab_size: int = 1 + max(tokenizer.get_vocab().values())
        """Every token id is below it (a model may have more rows)."""
        found = [tokenizer.eos_token_id, *stop_token_ids, self._turn_end()]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(token for token in found if token is not None))
        """Tokens that end a response, the tokenizer's end of text first."""

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the vocabulary, the stop tokens and the chat template; equal wherever the folder lies."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        parts = [vocabulary, self.stop_token_ids, self._tokenizer.chat_template]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids of the text as it stands. Raises `DataError` for text that the vocabulary cannot express."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            # The Rust tokenizer raises plain `Exception`, so nothing narrower can be caught.
            shown = repr(text[:200])
            raise DataError(f"the tokenizer cannot encode {shown} ({error}); use text of its vocabulary") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens written out."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode_response(self, ids: Sequence[int]) -> str:
        """Text of a response without the stop token at its end; every other special token is written out."""
        ends = bool(ids) and ids[-1] in self.stop_token_ids
        return self.decode(ids[:-1] if ends else ids)

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation up to where the assistant starts to write."""
        return self.encode(self._render(messages, add_generation_prompt=True))

    def render_sample(self, messages: Sequence[Message]) -> RenderedSample:
        """A conversation that ends with the assistant; the loss is on what that LAST turn says and on its end token.

        Earlier assistant turns are context only (Qwen3's template removes their thinking, so they are not what was
        once generated). The conversation is rendered once; the prompt's own rendering must be its exact beginning,
        or what is trained would not follow what the model sees in a rollout: `DataError`.
        """
        if not messages or messages[-1].get("role") != "assistant":
            roles = [message.get("role") for message in messages]
            raise DataError(f"a training conversation must end with an assistant message; its roles are {roles}")
        token_ids = self.encode(self._render(messages, add_generation_prompt=False))
        prompt = self.render_prompt(messages[:-1])
        self._check_prefix(prompt, token_ids)
        end = self._end_of_turn(token_ids, start=len(prompt))
        mask = [0] * len(prompt) + [1] * (end - len(prompt)) + [0] * (len(token_ids) - end)
        return RenderedSample(token_ids, mask)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            closing = "" if add_generation_prompt else str(self._tokenizer.eos_token or "")
            return "".join(message["content"] for message in messages) + closing
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise DataError(
                f"the chat template refuses a conversation with roles {roles}: {error}; change the data or the template"
            ) from error
        assert isinstance(text, str)
        return text

    def _turn_end(self) -> int | None:
        """The token with which the template ends an assistant turn, if it is a special one.

        A base model's end of text is often another token than the one that ends a turn (Qwen3's base models): what
        was trained on this template would then never stop.
        """
        question, reply = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
        prompt = self.render_prompt([question])
        whole = self.encode(self._render([question, reply], add_generation_prompt=False))
        if whole[: len(prompt)] != prompt:
            return None
        special = [token for token in whole[len(prompt) :] if self._is_special(token)]
        return special[-1] if special else None

    def _is_special(self, token: int) -> bool:
        added = self._tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special

    def _end_of_turn(self, token_ids: list[int], *, start: int) -> int:
        """Index after the last stop token at or after `start` (a template may write a line break behind it)."""
        for index in reversed(range(start, len(token_ids))):
            if token_ids[index] in self.stop_token_ids:
                return index + 1
        names = [self.decode([token]) for token in self.stop_token_ids]
        raise DataError(
            f"the assistant's turn is rendered with the end {self.decode(token_ids[-_CONTEXT:])!r}, which has none of"
            f" the stop tokens {names}: the model would never learn to stop; make the chat template end a turn with one"
            " of them, or add the template's own to generation_config.json"
        )

    def _check_prefix(self, prompt: list[int], whole: list[int]) -> None:
        if whole[: len(prompt)] == prompt:
            return
        shorter = min(len(prompt), len(whole))
        at = next((index for index in range(shorter) if prompt[index] != whole[index]), shorter)
        near = slice(max(0, at - _CONTEXT), at + _CONTEXT)
        raise DataError(
            "the chat template does not render the prompt as a beginning of the whole conversation; they part at token"
            f" {at}: the prompt has {self.decode(prompt[near])!r}, the conversation {self.decode(whole[near])!r}."
            " Change the template, or the response (does it start as the generation prompt promises?)"
        )


def load_tokenizer(hf_dir: str | Path) -> ChatTokenizer:
    """The tokenizer of a local Hugging Face folder; nothing is fetched. `DataError` if it has none that works."""
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; expected a Hugging Face folder with tokenizer.json")
    if not (folder / "tokenizer_config.json").is_file():
        raise DataError(f"{folder} has no tokenizer_config.json; copy the tokenizer files of the model into it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # A damaged tokenizer.json raises plain `Exception` from Rust; a missing one OSError, ValueError or TypeError.
        raise DataError(
            f"{folder} has no tokenizer that loads: {error}; copy tokenizer.json of the model anew"
        ) from error
    chat = ChatTokenizer(tokenizer, stop_token_ids=_configured_stops(folder / "generation_config.json"))
    if not chat.stop_token_ids:
        raise DataError(
            f"{folder} names no stop token; set eos_token in tokenizer_config.json, or eos_token_id in"
            " generation_config.json"
        )
    return chat


def _configured_stops(path: Path) -> list[int]:
    """`eos_token_id` of a generation_config.json (one id or a list); nothing if the file is absent."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    value = content.get("eos_token_id") if isinstance(content, dict) else None
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(stop, int) for stop in stops):
        raise DataError(f"{path}: eos_token_id is {value!r}; expected a token id or a list of token ids")
    return stops
