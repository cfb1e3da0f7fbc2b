"""Problems for rollouts, and the order in which they are taken."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_klear.config.recipe import PromptDataConfig
from megatron_klear.data.messages import to_messages
from megatron_klear.data.records import Row, read_rows
from megatron_klear.errors import CheckpointError, DataError
from megatron_klear.types import Prompt

if TYPE_CHECKING:
    from megatron_klear.data.template import ChatTokenizer


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the order of the file, each with an id of its own. `dropped` counts rows by reason."""

    prompts: tuple[Prompt, ...]
    dropped: Counter[str]

    @property
    def fingerprint(self) -> str:
        """Changes with any prompt, answer or their order."""
        return fingerprint(prompt.prompt_id.encode() for prompt in self.prompts)


def load_prompts(cfg: PromptDataConfig, tokenizer: ChatTokenizer) -> PromptSet:
    """Read and render every row; too long ones are dropped or an error, as `cfg.overlong` says. None left: error."""
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for number, row in enumerate(read_rows(cfg.prompt_data), start=1):
        where = f"row {number} of {cfg.prompt_data}"
        prompt = _to_prompt(row, cfg, tokenizer, where=where)
        if len(prompt.token_ids) > cfg.max_prompt_len:
            if cfg.overlong == "error":
                raise DataError(
                    f"{where}: the prompt has {len(prompt.token_ids)} tokens, more than data.max_prompt_len ="
                    f" {cfg.max_prompt_len}; raise it, or set data.overlong to drop"
                )
            dropped["prompt_too_long"] += 1
            continue
        copies[prompt.prompt_id] += 1
        prompts.append(_with_unique_id(prompt, copy=copies[prompt.prompt_id]))
    if not prompts:
        raise DataError(
            f"no prompt of {cfg.prompt_data} is left ({dict(dropped)});"
            f" raise data.max_prompt_len = {cfg.max_prompt_len}"
        )
    return PromptSet(tuple(prompts), dropped)


def validate_answers(prompt_set: PromptSet, parses: Callable[[Prompt], bool]) -> PromptSet:
    """Leave out (and count) prompts whose answer the verifier cannot read: every response to them would be wrong."""
    kept = tuple(prompt for prompt in prompt_set.prompts if parses(prompt))
    if not kept:
        examples = [prompt.answer for prompt in prompt_set.prompts[:3]]
        raise DataError(
            f"none of the {len(prompt_set.prompts)} answers can be read by the reward, for example {examples};"
            " check data.label_key and reward.type"
        )
    num_dropped = len(prompt_set.prompts) - len(kept)
    return PromptSet(kept, prompt_set.dropped + Counter(answer_parses_to_nothing=num_dropped))


def _to_prompt(row: Row, cfg: PromptDataConfig, tokenizer: ChatTokenizer, *, where: str) -> Prompt:
    if row.get(cfg.input_key) is None:
        raise DataError(
            f"{where} has no {cfg.input_key!r}; its fields are {sorted(row)}: name the right one in data.input_key"
        )
    messages = to_messages(row[cfg.input_key], where=f"{where}, field {cfg.input_key!r}")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant message; expected a question to the assistant")
    answer = _answer(row, cfg.label_key, where=where)
    try:
        token_ids = tokenizer.render_prompt(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return Prompt(
        prompt_id=_prompt_id(token_ids, answer),
        token_ids=tuple(token_ids),
        messages=messages,
        answer=answer,
        source=str(row.get("data_source") or ""),
        metadata=_metadata(row, where=where),
    )


def _answer(row: Row, label_key: str, *, where: str) -> str:
    name, value = label_key, row.get(label_key)
    if value is None:
        name, value = "reward_model.ground_truth", _mapping(row, "reward_model", where=where).get("ground_truth")
    if value is None:
        raise DataError(
            f"{where} has neither {label_key!r} nor 'reward_model.ground_truth'; its fields are {sorted(row)}:"
            " name the field with the answer in data.label_key"
        )
    # Whole numbers have one spelling as text; of a float it would be our guess which digits the author meant.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: {name!r} is {value!r}; expected the answer as text or a whole number")
    if not str(value).strip():
        raise DataError(f"{where}: {name!r} is empty; expected the answer")
    return str(value)


def _metadata(row: Row, *, where: str) -> dict[str, object]:
    """slime's `metadata`, and what verl's rows say besides prompt, source and answer."""
    fields = {key: row[key] for key in ("ability", "extra_info") if row.get(key) is not None}
    verifier = _mapping(row, "reward_model", where=where)
    fields |= {key: value for key, value in verifier.items() if key != "ground_truth" and value is not None}
    return {**fields, **_mapping(row, "metadata", where=where)}


def _mapping(row: Row, key: str, *, where: str) -> Mapping[str, object]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {key!r} is {value!r}; expected an object")
    return value


def _prompt_id(token_ids: list[int], answer: str) -> str:
    """The same in every run and on every machine, wherever the row stands in its file."""
    text = " ".join(map(str, token_ids)) + "\n" + answer
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]


def _with_unique_id(prompt: Prompt, *, copy: int) -> Prompt:
    return prompt if copy == 1 else replace(prompt, prompt_id=f"{prompt.prompt_id}-{copy}")


def fingerprint(items: Iterable[bytes]) -> str:
    """Short hash of a sequence of items."""
    total = hashlib.sha256()
    for item in items:
        total.update(len(item).to_bytes(8, "little"))
        total.update(item)
    return total.hexdigest()[:16]


class ItemStream:
    """Endless order over `num_items` indices: each epoch a new permutation, fixed by the seed and the epoch alone."""

    def __init__(self, num_items: int, seed: int, *, fingerprint: str = "") -> None:
        """`fingerprint` tells the items apart from others of the same number. Raises `DataError` if there are none."""
        if num_items < 1:
            raise DataError(f"cannot draw from {num_items} items; expected at least one row of data")
        self._num_items, self._seed, self._fingerprint = num_items, seed, fingerprint
        self._epoch, self._position = 0, 0
        self._order = self._permutation()

    def next(self, n: int) -> list[int]:
        """The next `n` indices. Across the border of two epochs an index may come twice."""
        assert n >= 0, f"cannot take {n} items"
        taken: list[int] = []
        while len(taken) < n:
            if self._position == self._num_items:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            part = self._order[self._position : self._position + n - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def state(self) -> dict[str, int | str]:
        """All that `restore` needs."""
        return {
            "num_items": self._num_items,
            "seed": self._seed,
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. Raises `CheckpointError` for a state of other data or another seed."""
        own = self.state()
        if set(state) != set(own):
            raise CheckpointError(
                f"data state has the fields {sorted(state)}, expected {sorted(own)}; the checkpoint is damaged"
                " or of another version: resume from an older one"
            )
        for name in ("num_items", "seed", "fingerprint"):
            if state[name] != own[name]:
                raise CheckpointError(
                    f"the checkpoint's data order was made with {name} = {state[name]}, this run has {own[name]};"
                    " resume with the same data and run.seed, or start a fresh run"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] <= self._num_items:
            raise CheckpointError(
                f"data state {dict(state)} points outside its {self._num_items} items;"
                " the checkpoint is damaged: resume from an older one"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._num_items).tolist()
