"""Conversations as they stand in data rows, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_klear.errors import DataError
from megatron_klear.types import Message

Conversation = tuple[Message, ...]


def to_messages(value: object, *, where: str) -> Conversation:
    """A prompt field as a conversation: text becomes one user message, a list is checked and copied.

    `where` names row, file and field in the `DataError` of anything else. Empty fields (None, as parquet fills in) are
    left out of a message.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty; expected text or a list of messages")
        return ({"role": "user", "content": value},)
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where} is {value!r}; expected text, or at least one message with 'role' and 'content'")
    return tuple(_to_message(item, where=f"{where}, message {number}") for number, item in enumerate(value, start=1))


def _to_message(item: object, *, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is {item!r}; expected an object with 'role' and 'content'")
    message = {key: text for key, text in item.items() if text is not None}
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{where} has no {key!r}, only {sorted(message)}; expected 'role' and 'content'")
    for key, text in message.items():
        if not isinstance(text, str):
            raise DataError(f"{where}: {key!r} is {text!r}; expected text (tool calls and images are not supported)")
    return message
