"""What a push must leave behind on a server: its version, its checksums, and the log-probs of a probe."""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_klear.errors import WeightSyncError
from megatron_klear.types import Probe


def check_version(server: str, expected: int, found: int | None) -> None:
    """Raises `WeightSyncError` if a server does not say it has the pushed version."""
    if found != expected:
        said = "none of this run" if found is None else str(found)
        raise WeightSyncError(f"{server} reports weight version {said} after a push of {expected}")


def check_probe(server: str, probe: Probe, found: list[float], limit: float) -> None:
    """Raises `WeightSyncError` if a server's log-probs are further than `limit` from the trainer's, or not finite."""
    if len(found) != len(probe.logprobs):
        raise WeightSyncError(
            f"{server} scored {len(found)} tokens of the probe; expected {len(probe.logprobs)}, all but the first"
        )
    gaps = [abs(theirs - ours) for theirs, ours in zip(found, probe.logprobs, strict=True)]
    # A comparison with NaN is false: what is not within the limit is wrong.
    wrong = [i for i, gap in enumerate(gaps) if not gap <= limit]
    if wrong:
        worst = max(wrong, key=lambda i: gaps[i] if gaps[i] == gaps[i] else float("inf"))
        raise WeightSyncError(
            f"{server} disagrees with the trainer on the probe: log-prob of token {worst + 1} expected"
            f" {probe.logprobs[worst]:.4f}, found {found[worst]:.4f} ({len(wrong)} of {len(found)} tokens differ by"
            f" more than {limit:g}). Either it draws from other weights, or it computes otherwise than the trainer"
            " (dtype, kernels): then raise max_probe_logprob_abs_diff"
        )


class PushedTensors:
    """An iterator of named tensors that goes through once, counts, times and fingerprints what it hands out."""

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._stream = iter(named_tensors)
        self._labels: list[str] = []
        self._sums: list[Tensor] = []
        self.num_tensors = 0
        self.num_bytes = 0
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        started = time.perf_counter()
        name, tensor = next(self._stream)
        tensor = tensor.detach()
        self._labels.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
        self._sums.append(content_sum(tensor))
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.seconds += time.perf_counter() - started
        return name, tensor

    def exhaust(self) -> None:
        """Take part in the collective to its end. Nothing is counted any more."""
        for _ in self._stream:
            pass

    def fingerprint(self) -> str:
        """Equal for equal contents (names, dtypes, shapes, bits), as good as surely different for others."""
        sums = [int(total) for total in self._sums]
        text = "\n".join(f"{label} {total}" for label, total in zip(self._labels, sums, strict=True))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_ODD = 0x1E3779B97F4A7C15


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """A factor for each place in a chunk: odd, so that no change of a single word is lost in 64 bits."""
    return torch.arange(_CHUNK, dtype=torch.int64, device=device) * (2 * _ODD) + 1


def content_sum(tensor: Tensor) -> Tensor:
    """A 64-bit sum (int64, 0-d, on the tensor's device) over a tensor's bits and their places; no copy to the host."""
    words = tensor.contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in words.split(_CHUNK):
        total = total * _ODD + (chunk * _factors(tensor.device)[: len(chunk)]).sum()
    return total


@dataclass(frozen=True, slots=True)
class Held:
    """The checksums a server reports. Only servers of one `layout` (release, ranks) can be compared."""

    server: str
    layout: str
    sums: Mapping[str, str]

    @property
    def digest(self) -> str:
        """All of them in one."""
        return hashlib.sha256(repr(sorted(self.sums.items())).encode()).hexdigest()[:16]


class Checksums:
    """Compares checksums over servers, and over pushes: they change exactly if the pushed tensors did.

    Assumes that tensors are pushed in the dtype that servers hold: where a server rounds, a change may vanish.
    """

    def __init__(self) -> None:
        # Checksums are a function of the weights: what is known of a server outlives its restart.
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def faults(self, held: Iterable[Held], fingerprint: str, *, is_last: bool = True) -> dict[str, str]:
        """What is wrong, by server; what is right is remembered with the fingerprint of the push.

        Servers that differ without a majority are all wrong, unless more will be known: not `is_last`.
        """
        wrong: dict[str, str] = {}
        by_layout: dict[str, list[Held]] = {}
        for one in held:
            if reason := self._against_last_push(one, fingerprint):
                wrong[one.server] = reason
            else:
                by_layout.setdefault(one.layout, []).append(one)
        for peers in by_layout.values():
            if not (is_last or _has_majority(peers)):
                continue
            wrong |= _against_peers(peers)
            for one in peers:
                if one.server not in wrong:
                    self._known[one.server, one.layout] = (fingerprint, one.digest)
        return wrong

    def _against_last_push(self, one: Held, fingerprint: str) -> str:
        pushed, digest = self._known.get((one.server, one.layout), ("", ""))
        if pushed and pushed != fingerprint and digest == one.digest:
            return (
                f"{one.server}: other weights were pushed than last time, but its checksum did not change:"
                f" expected other than {digest}, found {one.digest}"
            )
        if pushed == fingerprint and digest != one.digest:
            return (
                f"{one.server}: the same weights were pushed as last time, but its checksum changed:"
                f" expected {digest}, found {one.digest}"
            )
        return ""


def _has_majority(peers: list[Held]) -> bool:
    return 2 * max(Counter(one.digest for one in peers).values()) > len(peers)


def _against_peers(peers: list[Held]) -> dict[str, str]:
    (digest, count), *others = Counter(one.digest for one in peers).most_common()
    if not others:
        return {}
    if not _has_majority(peers):
        found = ", ".join(f"{one.server} {one.digest}" for one in peers)
        reason = (
            f"servers hold different weights and no majority says which are right: expected one checksum, found {found}"
        )
        return {one.server: reason for one in peers}
    right = next(one for one in peers if one.digest == digest)
    return {one.server: _difference(one, right, count) for one in peers if one.digest != digest}


def _difference(one: Held, right: Held, count: int) -> str:
    names = sorted(one.sums.keys() | right.sums.keys())
    first = next(name for name in names if one.sums.get(name) != right.sums.get(name))
    return (
        f"{one.server}: checksum expected {right.digest}, as on {count} servers, found {one.digest};"
        f" first that differs: {first}"
    )
