"""Reads rollouts saved with debug.save_rollout_data (rollout/replay.py writes them) as records of the report.

They hold token ids and what the engine said; no update has seen them, so the numbers of one are missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_klear.errors import DataError
from megatron_klear.report.samples import SampleRecord, StepSample
from megatron_klear.types import Piece

Decode = Callable[[Sequence[int]], str]
_NAME = re.compile(r"rollout_(\d+)\.jsonl")


def step_of(path: Path) -> int | None:
    """The step in the name of a saved rollout's file; None for a file of another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def show_ids(ids: Sequence[int]) -> str:
    """Stands for text where there is no tokenizer: `[12][7]`."""
    return "".join(f"[{token}]" for token in ids)


def load_decoder(folder: Path) -> Decode:
    """Text of token ids by the tokenizer.json of a folder. Raises `DataError` if there is none, or a broken one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{path} does not exist; expected the folder of a model or tokenizer (leave --tokenizer out to see ids)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The Rust tokenizer raises plain `Exception`, so nothing narrower can be caught.
        raise DataError(f"{path} is not a tokenizer ({error}); leave --tokenizer out to see ids") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def read_saved_rollout(path: Path, *, decode: Decode = show_ids) -> list[StepSample]:
    """(step, sample) of one step's file, group after group. Raises `DataError` for a malformed line, by number."""
    step = step_of(path)
    assert step is not None, f"{path.name} is not a name that a saved rollout has"
    samples: list[StepSample] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            group = json.loads(line)
            samples += [(step, _record(group, row, decode)) for row in group["samples"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {path} is not a saved group ({error!r}); expected a file of debug.save_rollout_data"
                " as this version writes it: save the rollout again"
            ) from error
    return samples


def _record(group: Mapping[str, Any], row: Mapping[str, Any], decode: Decode) -> SampleRecord:
    ids = row["response_ids"]
    return SampleRecord(
        sample_id=row["sample_id"],
        prompt=decode(group["prompt_ids"]),
        response=decode(ids),
        answer=group["answer"],
        reward=row["reward"],
        reason=row["reason"],
        stop_reason=row["stop_reason"],
        tokens=tuple(decode([token]) for token in ids),
        rollout_logprobs=tuple(float(value) for value in row["rollout_logprobs"]),
        current_logprobs=(),
        ratios=(),
        cells=(),
        advantages=(),
        pieces=tuple(Piece(*piece) for piece in row["pieces"]),
    )
