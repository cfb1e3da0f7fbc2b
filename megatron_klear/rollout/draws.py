"""Random numbers that depend on a request's seed alone, and drawing tokens with them."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens whose probabilities are summed first, so that the running sum goes over few numbers.
BLOCK = 64


def _signed(value: int) -> int:
    """A number of 64 bits as torch's int64 holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mixed(x: Tensor) -> Tensor:
    """Scramble int64 [...]: the last steps of the generator splitmix64 (Steele, Lea, Flood 2014). Products wrap."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros moving in: torch's own shift repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def uniforms(seeds: Tensor, indices: Tensor) -> Tensor:
    """Number `indices` of the stream `seeds`, both int64 and broadcast; float64 in [0, 1).

    Each is computed from its seed and index alone, so that streams can be read anywhere and in bulk.
    """
    bits = _mixed(_mixed(seeds) + (indices + 1) * _signed(0x9E3779B97F4A7C15))
    return _shifted(bits, 11).double() * 2.0**-53


def seed_tensor(seeds: list[int]) -> Tensor:
    """Seeds of any size as int64 [N], on the host."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)


def sample(logits: Tensor, temperatures: Tensor, numbers: Tensor, *, any_greedy: bool = True) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logits: [R, V] float32.
        temperatures: [R] float32; 0 takes the most likely token.
        numbers: [R] float64 in [0, 1).
        any_greedy: False promises that no temperature is 0, and saves the search for the most likely tokens.

    Returns:
        token ids [R] int64 and their log-probs [R] float32 under softmax(logits / temperature).
    """
    greedy = temperatures == 0
    probs = (logits / temperatures.masked_fill(greedy, 1.0)[:, None]).softmax(dim=-1)
    tokens = _draw(probs, numbers)
    if any_greedy:
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def _draw(probs: Tensor, numbers: Tensor) -> Tensor:
    """First a block of tokens, then with what is left of the number a token of it. probs [R, V], numbers [R]."""
    num_blocks = probs.size(1) // BLOCK
    if num_blocks < 4:
        return _invert(probs, numbers)[0]
    missing = -probs.size(1) % BLOCK
    blocks = torch.nn.functional.pad(probs, (0, missing)) if missing else probs
    blocks = blocks.unflatten(1, (-1, BLOCK))
    block, rest = _invert(blocks.sum(-1), numbers)
    within = blocks[torch.arange(block.numel(), device=block.device), block]
    return block * BLOCK + _invert(within, rest)[0]


def _invert(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The index [R] at which the running share of weights [R, n] passes numbers [R], and how far into it they lie.

    An index of weight 0 is never returned.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Below the total even where rounding says otherwise: what follows the last weight above 0 stays out of reach.
    aim = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(sums, aim, right=True)
    weight = weights.gather(1, index).double()
    below = sums.gather(1, index) - weight
    return index[:, 0], ((aim - below) / weight).clamp_(0.0, 1.0)[:, 0]
