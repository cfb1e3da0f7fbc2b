"""Drawing from logits: the distribution, its edges, and the log-probs that are reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_klear.rollout.draws import sample, seed_tensor, uniforms

NUM_DRAWS = 40_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0, 0.0, 1.5, -0.5, 0.2, -2.0])
# 9 degrees of freedom: one fair run in 100,000 is above.
CHI_SQUARE_LIMIT = 39.3


def draws(temperature: float, seed: int) -> Tensor:
    uniforms = torch.rand(NUM_DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tokens, _ = sample(LOGITS.expand(NUM_DRAWS, -1), torch.full((NUM_DRAWS,), temperature), uniforms)
    return tokens


def chi_square(tokens: Tensor, temperature: float) -> float:
    expected = (LOGITS.double() / temperature).softmax(dim=0) * NUM_DRAWS
    assert expected.min() > 5
    counts = tokens.bincount(minlength=LOGITS.numel()).double()
    return ((counts - expected).square() / expected).sum().item()


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_draws_follow_the_distribution(temperature: float, seed: int) -> None:
    tokens = draws(temperature, seed)
    assert chi_square(tokens, temperature) < CHI_SQUARE_LIMIT
    # The test can tell: a slightly wrong temperature is far outside.
    assert chi_square(tokens, temperature * 1.1) > 2 * CHI_SQUARE_LIMIT


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.4999, 1), (0.5, 3), (0.9999, 3), (1 - 2**-53, 3)])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, token: int) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs = sample(logits, torch.ones(1), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.tolist() == [token]
    assert logprobs.item() == pytest.approx(-0.693147, abs=1e-6)


@pytest.mark.parametrize("num_tokens", (1000, 50_000, 151_936))
def test_a_draw_next_to_one_does_not_fall_behind_the_last_possible_token(num_tokens: int) -> None:
    """Float sums over many tokens end a little beside 1, some of them below the draw."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, num_tokens + 1, generator=generator)
    logits[:, -1] = -torch.inf
    uniforms = torch.full((8,), 1 - 2**-53, dtype=torch.float64)
    assert (logits.log_softmax(dim=1).double().exp().sum(dim=1) < 1).any()
    tokens, logprobs = sample(logits, torch.ones(8), uniforms)
    assert tokens.tolist() == [num_tokens - 1] * 8 and logprobs.isfinite().all()


def test_each_row_has_its_own_temperature_and_zero_is_greedy() -> None:
    logits = torch.stack((LOGITS, LOGITS, LOGITS))
    temperatures = torch.tensor([0.0, 1.0, 0.5])
    uniforms = torch.tensor([0.99, 0.99, 0.99], dtype=torch.float64)
    tokens, logprobs = sample(logits, temperatures, uniforms)
    assert tokens[0] == LOGITS.argmax() and tokens[1] != LOGITS.argmax()
    for i, temperature in enumerate((1.0, 1.0, 0.5)):
        expected = (LOGITS / temperature).log_softmax(dim=0)[tokens[i]]
        torch.testing.assert_close(logprobs[i], expected)


MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """splitmix64's last steps in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", (0, 1, 2**32 - 1, 2**63, 2**64 - 1, -5, 2**70 + 3))
def test_the_stream_in_whole_numbers(seed: int) -> None:
    found = uniforms(seed_tensor([seed])[:, None], torch.arange(5))[0].tolist()
    wanted = [(splitmix((splitmix(seed & MASK) + (i + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53 for i in range(5)]
    assert found == wanted and all(0 <= number < 1 for number in found)


def test_streams_are_flat_and_unlike_their_neighbours() -> None:
    """Seeds that follow each other, as requests of a step may have; numbers that follow each other, as tokens do."""
    table = uniforms(torch.arange(500)[:, None], torch.arange(500))
    counts = torch.histc(table.float(), bins=100, min=0, max=1)
    # 99 degrees of freedom: one fair run in 100,000 is above 170. Correlations of 250,000 pairs are below 0.01.
    assert ((counts - 2500).square() / 2500).sum() < 170
    centred = table - 0.5
    for one, other in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1]), (centred, centred.t())):
        off_diagonal = one != other
        assert abs((one * other)[off_diagonal].mean() * 12) < 0.01
    assert table.unique().numel() == table.numel()


@pytest.mark.parametrize("num_tokens", (10, 256, 1000, 4096))
def test_drawing_by_blocks_inverts_the_whole_sum(num_tokens: int) -> None:
    logits = 3 * torch.randn(1, num_tokens, generator=torch.Generator().manual_seed(0))
    numbers = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    tokens, _ = sample(logits.expand(5000, -1), torch.ones(5000), numbers)
    sums = logits[0].softmax(-1).double().cumsum(-1)
    wanted = torch.searchsorted(sums, numbers * sums[-1], right=True)
    # Numbers next to a border may fall to either side.
    assert (tokens != wanted).sum() <= 3
    assert (tokens - wanted).abs().max() <= 1
