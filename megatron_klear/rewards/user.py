"""A reward function of your own, by its dotted path."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Sequence
from numbers import Real

from megatron_klear.errors import ConfigError, Fault, RewardError
from megatron_klear.types import RewardRequest, Score

# It should return a float; what it does return is checked, call by call.
UserFunction = Callable[[RewardRequest], object]


def _config_error(path: str, reason: str, suggestion: str) -> ConfigError:
    fault = Fault("reward.type", path, reason, suggestion)
    return ConfigError(str(fault), [fault])


def load_function(path: str) -> UserFunction:
    """Import `package.module:function`. Raises `ConfigError` naming the path, and the nearest name the module has."""
    module_name, _, function_name = path.partition(":")
    try:
        names = vars(importlib.import_module(module_name))
    except Exception as error:
        # Whatever the module raised, it is the recipe's path that does not work; the cause stays attached.
        reason = f"module {module_name!r} does not import: {type(error).__name__}: {error}"
        raise _config_error(path, reason, "it must be importable from where you start the run") from error
    function = names.get(function_name)
    if callable(function):
        return function
    reason = "is not callable" if function_name in names else "does not exist"
    callables = [name for name, value in names.items() if callable(value) and not name.startswith("__")]
    nearest = difflib.get_close_matches(function_name, callables, n=1, cutoff=0.0)
    suggestion = f"did you mean {module_name}:{nearest[0]}?" if nearest else f"{module_name} defines no function"
    raise _config_error(path, f"{function_name!r} {reason} in module {module_name!r}", suggestion)


class UserReward:
    """Calls your function once a request. Its exceptions become failures, its wrong types an error."""

    def __init__(self, function: UserFunction, path: str, *, correct: float) -> None:
        """`correct` is the value that counts as a right answer where accuracies are measured."""
        self._function = function
        self._path = path
        self._correct = correct

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order."""
        return [self._score(request) for request in requests]

    def _score(self, request: RewardRequest) -> Score:
        try:
            value = self._function(request)
        except Exception as error:
            # One bad sample must not end a run of days; the failure is counted and shown, never scored.
            what = f"user_error: {type(error).__name__}: {error} (prompt {request.prompt.prompt_id})"
            return Score(None, "user_error", failure=what)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(
                f"{self._path} returned {value!r} ({type(value).__name__}) for prompt {request.prompt.prompt_id};"
                " expected a finite float: return float(...) from your function, or raise to have the sample dropped"
            )
        return Score(float(value), "correct" if value == self._correct else "user")

    def close(self) -> None:
        """Nothing to end."""
