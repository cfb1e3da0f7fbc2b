"""Ways from hidden states to a chunk's statistics and its logits' gradient, and which of them is taken.

eager               plain torch: matrix product into float32 logits, row passes of eager_rows.py
triton              the same product; row passes as Triton kernels: one reads the logits once, one turns them into
                    their gradient in place (triton_rows.py)
triton_scaled_exp   one Triton kernel multiplies and leaves exp(z - k) in half precision where float32 logits would
                    lie, at half the memory and traffic (triton_exp.py)
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_klear_kernels.implementations import load_kernels
from megatron_klear_kernels.linear_policy_loss import eager_rows
from megatron_klear_kernels.linear_policy_loss.products import logits_product
from megatron_klear_kernels.linear_policy_loss.vocabulary import Distribution, Vocabulary
from megatron_klear_kernels.triton_support import why_unavailable

PathName = Literal["auto", "eager", "triton", "triton_scaled_exp"]

# Compute capabilities of cards on which benchmarks/fused_loss.py showed triton_scaled_exp ahead of triton. None yet:
# it has not been measured anywhere.
SCALED_EXP_WINS: frozenset[tuple[int, int]] = frozenset()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathChoice:
    """The way taken, and why it is that one."""

    name: Literal["eager", "triton", "triton_scaled_exp"]
    why: str

    def __str__(self) -> str:
        return f"output layer and loss: {self.name} ({self.why})"


@functools.cache
def choose_path(requested: PathName, device: torch.device) -> PathChoice:
    """What runs for tensors on `device`; logged once. Raises ValueError for a path that cannot run there."""
    choice = _choose(requested, device)
    logger.info("%s", choice)
    return choice


def _choose(requested: PathName, device: torch.device) -> PathChoice:
    if requested == "eager":
        return PathChoice(requested, "asked for")
    if requested == "auto" and device.type != "cuda":
        return PathChoice("eager", f"tensors are on {device.type}")
    obstacle = why_unavailable(device)
    if requested == "auto":
        if obstacle is not None:
            return PathChoice("eager", obstacle)
        if torch.cuda.get_device_capability(device) in SCALED_EXP_WINS:
            return PathChoice("triton_scaled_exp", "measured to be ahead on this card")
        return PathChoice("triton", "CUDA with Triton; nobody has measured triton_scaled_exp ahead on this card")
    if obstacle is not None:
        raise ValueError(f"path {requested} was asked for, but {obstacle}; ask for eager or auto")
    return PathChoice(requested, "asked for")


@dataclass(frozen=True, slots=True)
class Shard:
    """What the row passes need to know of this rank's columns."""

    start: int
    num_valid: int
    """Of this rank's columns."""
    inv_temperature: float

    @classmethod
    def of(cls, vocab: Vocabulary, num_columns: int, temperature: float) -> Shard:
        """This rank's part of a vocabulary. Raises ValueError for a temperature that is not positive."""
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a number above 0: logits are divided by it")
        return cls(vocab.start, vocab.num_local(num_columns), 1.0 / temperature)

    def settings(self) -> dict[str, Any]:
        """As keyword arguments of the row passes."""
        return {"start": self.start, "num_valid": self.num_valid, "inv_temperature": self.inv_temperature}


class ChunkPath(Protocol):
    """Works on one chunk at a time: `gradient` is of the chunk that `statistics` or `reload` saw last."""

    def statistics(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[4, C] of operands [C', H], C' >= C: rows beyond the targets [C] are padding."""
        ...

    def reload(self, hidden: Tensor, targets: Tensor) -> None:
        """What `gradient` needs of a chunk whose statistics are known already."""
        ...

    def gradient(self, targets: Tensor, rows: Distribution, d_logprob: Tensor, d_entropy: Tensor | None) -> Tensor:
        """d loss / d logits [C', V/tp] in the operands' type, 0 in padding; valid until the next chunk."""
        ...


class LogitPath:
    """float32 logits of the chunk lie in one buffer, and their gradient takes their place."""

    def __init__(self, weight: Tensor, shard: Shard, most_rows: int, row_passes: Any) -> None:
        self._weight = weight
        self._shard = shard
        self._passes = row_passes
        self._buffer = torch.empty(most_rows, weight.size(0), dtype=torch.float32, device=weight.device)
        self._num_rows = 0

    def statistics(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As the protocol says."""
        self.reload(hidden, targets)
        return self._passes.row_statistics(self._buffer[: targets.numel()], targets, **self._shard.settings())

    def reload(self, hidden: Tensor, targets: Tensor) -> None:
        """As the protocol says."""
        self._num_rows = hidden.size(0)
        logits_product(hidden, self._weight, out=self._buffer[: self._num_rows])

    def gradient(self, targets: Tensor, rows: Distribution, d_logprob: Tensor, d_entropy: Tensor | None) -> Tensor:
        """As the protocol says."""
        logits, num = self._buffer[: self._num_rows], targets.numel()
        out = in_place_of(logits, self._weight.dtype)
        out[num:].zero_()
        self._passes.logit_gradient(
            logits[:num],
            targets,
            rows.peak,
            rows.log_sum,
            rows.entropy,
            d_logprob,
            d_entropy,
            **self._shard.settings(),
            out=out[:num],
        )
        return out


def in_place_of(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [C, V] -> the memory of its rows as [C, V] of `dtype`: a narrower type fills the first half of each."""
    return logits if dtype == torch.float32 else logits.view(dtype)[:, : logits.size(1)]


class ScaledExpPath:
    """exp(z - k) of the chunk in the operands' type, with statistics from the product's float32 accumulators."""

    def __init__(self, weight: Tensor, shard: Shard, most_rows: int, kernels: Any) -> None:
        # The kernel reads whole rows.
        self._weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._shard = shard
        self._kernels = kernels
        self._buffer = torch.empty(most_rows, weight.size(0), dtype=weight.dtype, device=weight.device)
        self._tiles: Any = None
        self._num_rows = 0

    def statistics(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As the protocol says."""
        self.reload(hidden, targets)
        return self._kernels.merge_tiles(self._tiles)

    def reload(self, hidden: Tensor, targets: Tensor) -> None:
        """As the protocol says."""
        num, self._num_rows = targets.numel(), hidden.size(0)
        self._tiles = self._kernels.exp_statistics(
            hidden[:num], self._weight, targets, **self._shard.settings(), out=self._buffer[:num]
        )

    def gradient(self, targets: Tensor, rows: Distribution, d_logprob: Tensor, d_entropy: Tensor | None) -> Tensor:
        """As the protocol says."""
        num, out = targets.numel(), self._buffer[: self._num_rows]
        out[num:].zero_()
        self._kernels.exp_gradient(
            out[:num],
            self._tiles,
            targets,
            rows.peak,
            rows.log_sum,
            rows.entropy,
            rows.logprob,
            d_logprob,
            d_entropy,
            **self._shard.settings(),
        )
        return out


def row_passes(choice: PathChoice) -> Any:
    """The module with the row passes over logits."""
    return eager_rows if choice.name == "eager" else load_kernels("linear_policy_loss.triton_rows")


def build_path(choice: PathChoice, weight: Tensor, shard: Shard, most_rows: int) -> ChunkPath:
    """The path of a choice, with memory for chunks of `most_rows`; `weight` [V/tp, H] is an operand."""
    if choice.name == "triton_scaled_exp":
        return ScaledExpPath(weight, shard, most_rows, load_kernels("linear_policy_loss.triton_exp"))
    return LogitPath(weight, shard, most_rows, row_passes(choice))


def bytes_per_logit(choice: PathChoice, operand_dtype: torch.dtype) -> int:
    """What a chunk holds for each of its logits."""
    return operand_dtype.itemsize if choice.name == "triton_scaled_exp" else 4


def multiply_(tensor: Tensor, factor: Tensor) -> None:
    """In place by a 0-d tensor, and for nothing where that is 1, as it nearly always is; a GPU is not waited for."""
    if tensor.device.type == "cpu":
        if float(factor) != 1:
            tensor.mul_(factor)
    elif why_unavailable(tensor.device) is None:
        load_kernels("linear_policy_loss.triton_rows").scale_(tensor, factor)
    else:
        tensor.mul_(factor)
