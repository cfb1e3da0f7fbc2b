"""What can be made to go wrong, from the command line or while the server runs (POST /faults)."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from threading import Lock
from typing import Any, NoReturn

from megatron_klear.errors import RolloutError

COUNTED = ("status_500", "drop", "garbage", "hang", "die_after")
WRONG_TAG = "other-run"


def die(why: str) -> NoReturn:
    """End this process at once, as a crash does: no answer, no farewell to a socket, exit code 1."""
    print(f"fake server: died: {why}", file=sys.stderr, flush=True)
    os._exit(1)


@dataclass(slots=True)
class FaultSettings:
    """Faults in force. A number counts the next calls of /generate that it befalls; a setting stays until changed."""

    slow_s: float = 0.0
    """Seconds that each /generate waits before it starts."""
    status_500: int = 0
    """Number of /generate calls answered by status 500."""
    drop: int = 0
    """Number of /generate calls whose connection is cut after the tokens were drawn, without an answer."""
    garbage: int = 0
    """Number of /generate calls answered by status 200 and half of the JSON."""
    hang: int = 0
    """Number of /generate calls that are never answered; /health stays 200."""
    die_after: int = 0
    """The process dies in the middle of this one of the next /generate calls: 1 is the next. 0: it does not."""
    die: bool = False
    """The process dies now, whatever runs."""
    wrong_version: bool = False
    """Versions in answers and in /model_info are of another run (`WRONG_TAG`); the weights are the right ones."""
    refuse_push: bool = False
    """Every update of weights is answered by status 400 and changes nothing."""
    skip_push: bool = False
    """Every update of weights is answered as done, its version label too, but the old weights stay."""
    hang_push: bool = False
    """An update of weights is never answered."""
    die_in_push: bool = False
    """The process dies in the next update of weights."""
    stale_cache: bool = False
    """/flush_cache says done and forgets nothing."""


class Faults:
    """The settings, shared by the threads of a server."""

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self._lock = Lock()

    def change(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Set some; all as they are then. Raises `RolloutError` for an unknown one or a value of another type."""
        kinds = {field.name: field.default.__class__ for field in fields(FaultSettings)}
        for name, value in changes.items():
            if name not in kinds:
                raise RolloutError(f"unknown fault {name}; expected one of {', '.join(kinds)}")
            kind = kinds[name]
            if not (value.__class__ is kind or (kind is float and value.__class__ is int)):
                raise RolloutError(f"fault {name} must be of type {kind.__name__}, got {value!r}")
            if isinstance(value, int | float) and value < 0:
                raise RolloutError(f"fault {name} must be 0 or more, got {value!r}")
        with self._lock:
            self.settings = FaultSettings(**(asdict(self.settings) | changes))
            return asdict(self.settings)

    def for_generate(self) -> set[str]:
        """Counted faults that befall this call; each that does is counted down."""
        with self._lock:
            left = asdict(self.settings)
            counted = [name for name in COUNTED if left[name] > 0]
            self.settings = replace(self.settings, **{name: left[name] - 1 for name in counted})
            return {name for name in counted if name != "die_after" or left[name] == 1}
