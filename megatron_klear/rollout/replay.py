"""Rollouts on disk, one jsonl file a step: saved by one run, trained on by another. For debugging either half alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_klear.errors import DataError
from megatron_klear.rollout.sampler import to_sample
from megatron_klear.types import Completion, Piece, Prompt, RolloutBatch, Sample, SampleGroup


def step_file(folder: str | Path, step: int) -> Path:
    """File of a step."""
    return Path(folder) / f"rollout_{step:06d}.jsonl"


def save_rollout(folder: str | Path, step: int, rollout: RolloutBatch) -> Path:
    """Write the selected samples of a step, rewards included; a group a line."""
    path = step_file(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_group_row(group)) + "\n" for group in rollout.groups]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def load_rollout(folder: str | Path, step: int) -> RolloutBatch:
    """Read back what `save_rollout` wrote. Raises `DataError` for a missing file or a malformed line, by number."""
    path = step_file(folder, step)
    if not path.is_file():
        raise DataError(f"{path} does not exist; expected a rollout saved with debug.save_rollout_data for every step")
    groups = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            groups.append(_group(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"line {number} of {path} is not a saved group ({error!r}); save the rollout again"
            ) from error
    return RolloutBatch(tuple(groups))


def _group_row(group: SampleGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt_id": prompt.prompt_id,
        "prompt_ids": list(prompt.token_ids),
        "answer": prompt.answer,
        "source": prompt.source,
        "samples": [_sample_row(sample) for sample in group.samples],
    }


def _sample_row(sample: Sample) -> dict[str, Any]:
    first = len(sample.prompt.token_ids)
    return {
        "sample_id": sample.sample_id,
        "response_ids": sample.response_ids,
        "rollout_logprobs": sample.rollout_logprobs[first:],
        "reward": sample.reward,
        "shaped_reward": sample.shaped_reward,
        "reason": sample.reward_reason,
        "pieces": [[piece.num_tokens, piece.weight_version, piece.engine] for piece in sample.pieces],
        "stop_reason": sample.stop_reason,
    }


def _group(row: Mapping[str, Any]) -> SampleGroup:
    prompt = Prompt(row["prompt_id"], tuple(row["prompt_ids"]), answer=row["answer"], source=row["source"])
    return SampleGroup(prompt, tuple(_sample(prompt, one) for one in row["samples"]))


def _sample(prompt: Prompt, row: Mapping[str, Any]) -> Sample:
    pieces = tuple(Piece(*piece) for piece in row["pieces"])
    counts = {len(row["response_ids"]), len(row["rollout_logprobs"]), sum(piece.num_tokens for piece in pieces)}
    if len(counts) > 1:
        raise ValueError(f"tokens, log-probs and pieces are not equally many: {sorted(counts)}")
    completion = Completion(
        row["sample_id"], tuple(row["response_ids"]), tuple(row["rollout_logprobs"]), row["stop_reason"], pieces
    )
    sample = to_sample(prompt, completion)
    sample.reward, sample.shaped_reward, sample.reward_reason = row["reward"], row["shaped_reward"], row["reason"]
    return sample
