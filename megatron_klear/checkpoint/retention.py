"""Which checkpoints stay. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_klear.checkpoint.folder import prune, step_folder
from megatron_klear.checkpoint.manifest import read_manifest
from megatron_klear.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Retention:
    """A checkpoint stays if any of these names it. `keep_last` None keeps all."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    keep_best_metric: str = "eval/accuracy"
    keep_best_mode: Literal["max", "min"] = "max"

    def apply(self, folder: Path) -> list[int]:
        """Delete what need not stay under a folder of checkpoints; the steps deleted.

        Raises `OSError`; with `keep_best` also `CheckpointError`, for a manifest that cannot be read or if none holds
        the metric.
        """
        return prune(folder, lambda steps: self.kept(folder, steps))

    def kept(self, folder: Path, steps: Sequence[int]) -> set[int]:
        """Those of `steps` (rising) that stay."""
        if self.keep_last is None:
            return set(steps)
        kept = set(steps[-self.keep_last :])
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.keep_best is not None:
            kept |= set(self._best(folder, steps))
        return kept

    def _best(self, folder: Path, steps: Sequence[int]) -> list[int]:
        """Of equals the earlier is better; a checkpoint without the metric is none of the best."""
        sign = -1.0 if self.keep_best_mode == "max" else 1.0
        metrics = {step: read_manifest(step_folder(folder, step)).metrics for step in steps}
        ranked = sorted(
            (sign * found[self.keep_best_metric], step)
            for step, found in metrics.items()
            if self.keep_best_metric in found
        )
        if metrics and not ranked:
            held = ", ".join(sorted(set().union(*metrics.values()))) or "none"
            raise CheckpointError(
                f"no checkpoint in {folder} holds the metric {self.keep_best_metric!r}, so none is the best and none"
                f" is deleted; metrics they hold: {held}"
            )
        return [step for _, step in ranked[: self.keep_best]]
