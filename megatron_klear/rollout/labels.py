"""What weights are called on the wire: the trainer's update count behind a tag of the run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VersionLabels:
    """Labels `tag.number`. Weights of another run, or those a server started with, have no number here."""

    tag: str = field(default_factory=lambda: secrets.token_hex(4))

    def text(self, number: int) -> str:
        """Label of version `number`."""
        return f"{self.tag}.{number}"

    def number(self, text: str) -> int | None:
        """Version that a label names; None if it is not of this run."""
        tag, _, digits = text.rpartition(".")
        return int(digits) if tag == self.tag and digits.isascii() and digits.isdigit() else None
