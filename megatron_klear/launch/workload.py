"""How much text a step holds: lengths of samples, and the micro-batches they become."""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_klear.config.recipe import Recipe, RlRecipe
from megatron_klear.errors import ConfigError, Fault

# Spread of the logarithm of response lengths: answers of reasoning models vary several-fold, with a tail at the limit.
LENGTH_SIGMA = 0.8
# Mean response as a share of the longest, unless --mean-response-len says better.
MEAN_SHARE = 0.35
# Problems are short: a mean prompt, unless the recipe's longest is shorter.
MEAN_PROMPT = 256
_GRID = 200


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a recipe does not say."""

    mean_response: int | None = None
    """Tokens of a mean response (RL) or sample (SFT); `MEAN_SHARE` of the longest if not given."""
    kept: float = 1.0
    """Share of the sampled responses that are trained on: selection drops groups without spread."""
    engine: str = "embedded"
    """embedded: rank 0 samples alone. server: engines on all GPUs, which give their memory back while training."""
    engine_tensor: int = 1
    """GPUs of one engine, with server."""


@functools.cache
def response_lengths(mean: int, longest: int, count: int) -> tuple[int, ...]:
    """`count` evenly likely lengths, ascending, of a lognormal cut off at `longest` whose mean is `mean`."""
    normal = NormalDist()
    factors = [math.exp(LENGTH_SIGMA * normal.inv_cdf((i + 0.5) / _GRID)) for i in range(_GRID)]

    def mean_of(median: float) -> float:
        return sum(min(longest, median * factor) for factor in factors) / _GRID

    low, high = 0.0, 64.0 * longest
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    wanted = (math.exp(LENGTH_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count))
    return tuple(max(1, min(longest, round(high * factor))) for factor in wanted)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of a recipe. Lengths are tokens."""

    num_responses: int
    """Sampled in the step; 0 for SFT."""
    num_samples: int
    """Trained on in the step."""
    num_updates: int
    mean_prompt: int
    mean_response: int
    """Mean and longest of what is generated, for SFT of whole samples."""
    longest_response: int
    longest_sample: int
    num_forward_passes: int
    """Passes without a gradient over the same samples: old log-probs, and those of a reference."""
    has_critic: bool

    @property
    def mean_sample(self) -> int:
        """Tokens of a mean sample."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens_per_step(self) -> int:
        """Tokens trained on."""
        return self.num_samples * self.mean_sample

    @property
    def mean_attended(self) -> float:
        """Tokens of the sample that a mean token is in, E[L^2] / E[L]: what causal attention costs, doubled."""
        lengths = [self.mean_prompt + n for n in response_lengths(self.mean_response, self.longest_response, _GRID)]
        return sum(n * n for n in lengths) / sum(lengths)

    def samples_of_update(self) -> list[int]:
        """Lengths of the samples of one update, as far as the assumed distribution says."""
        count = max(1, self.num_samples // self.num_updates)
        return [self.mean_prompt + n for n in response_lengths(self.mean_response, self.longest_response, count)]


def workload_of(recipe: Recipe, assumed: Assumptions) -> Workload:
    """What a step of the recipe holds. Raises `ConfigError` for a mean that the recipe's limits rule out."""
    longest = recipe.rollout.rollout_max_response_len if isinstance(recipe, RlRecipe) else recipe.data.max_length
    mean = assumed.mean_response or max(1, round(MEAN_SHARE * longest))
    if mean > longest:
        reason = f"is longer than the longest, {longest}"
        fault = Fault("--mean-response-len", mean, reason, f"at most {longest}")
        raise ConfigError(str(fault), [fault])
    if not isinstance(recipe, RlRecipe):
        return Workload(0, recipe.batch.global_batch_size, 1, 0, mean, longest, longest, 0, False)
    rollout = recipe.rollout
    responses = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    samples = max(1, round(responses * assumed.kept))
    return Workload(
        num_responses=responses,
        num_samples=samples,
        num_updates=math.ceil(samples / recipe.batch.global_batch_size),
        mean_prompt=min(MEAN_PROMPT, recipe.data.max_prompt_len),
        mean_response=mean,
        longest_response=longest,
        longest_sample=recipe.data.max_prompt_len + longest,
        num_forward_passes=(recipe.train.old_logprobs == "recompute") + (recipe.kl.kl_coef > 0),
        has_critic=recipe.critic is not None and recipe.advantage.type == "gae",
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one update: `count` on each data-parallel rank, all of `tokens` (padding included)."""

    count: int
    tokens: int
    useful: float
    """Share of the positions that are no padding."""


def packed(samples: list[int], data_size: int, budget: int, *, multiple: int = 1, counted_in: int = 1) -> Packed:
    """About as data/packing.py packs: longest sample first into the lightest bin, one common length for all."""
    fill = max(budget, max(samples))
    count = math.ceil(sum(samples) / (data_size * fill))
    while True:
        count = math.ceil(count / counted_in) * counted_in
        heaviest = _heaviest(samples, count * data_size)
        if heaviest <= fill:
            break
        count += 1
    tokens = math.ceil(heaviest / multiple) * multiple
    return Packed(count, tokens, sum(samples) / (count * data_size * tokens))


def _heaviest(samples: list[int], num_bins: int) -> int:
    loads = [0] * num_bins
    for length in sorted(samples, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)
