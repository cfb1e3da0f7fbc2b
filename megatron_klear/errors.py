"""Errors a user can cause or meet. Each message says what was expected, what came and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KlearError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(KlearError, ValueError):
    """A recipe that cannot run. `faults` lists everything that is wrong with it, not only the first thing."""

    def __init__(self, message: str, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults: tuple[Fault, ...] = tuple(faults)


class DataError(KlearError, ValueError):
    """A data file, record, label or tokenizer that cannot be used."""


class RewardError(KlearError, RuntimeError):
    """The reward machinery itself failed (not: the answer was wrong)."""


class RolloutError(KlearError, RuntimeError):
    """An engine could not generate, or its output contradicts the trainer."""


class EngineUnavailable(RolloutError):
    """A server did not answer, or not sensibly: the same request may succeed later, or on another server."""


class EngineStale(EngineUnavailable):
    """A server drew tokens from weights that this run did not push to it: it was restarted behind our back."""


class RequestRefused(RolloutError):
    """A server answered that the request itself is wrong: no other server would take it."""


class WeightsWanted(RolloutError):
    """No engine can serve before the trainer has pushed its weights again; after that, ask once more."""


class WeightSyncError(KlearError, RuntimeError):
    """An engine did not confirm that it holds the weights that were sent."""


class CheckpointError(KlearError, RuntimeError):
    """A checkpoint or model folder that is missing, incomplete or of another model."""


class TrainingError(KlearError, RuntimeError):
    """Training cannot go on: non-finite values, or a failed health check."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a recipe.

    `key` is the dotted path (`optimizer.lr`), `value` what was given, `reason` what was expected,
    `suggestion` the nearest valid name or the smallest change that would do, or empty.
    """

    key: str
    value: object
    reason: str
    suggestion: str = ""

    def __str__(self) -> str:
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{self.key} = {self.value!r}: {self.reason}{hint}"
