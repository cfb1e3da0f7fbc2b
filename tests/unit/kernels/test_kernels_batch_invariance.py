"""A row has the same bits whatever shares its call, its chunk or its block: on-policy, the ratio is exactly 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import (
    TRITON,
    TRITON_SCALED_EXP,
    LinearCase,
    Tokens,
    every_path,
    linear_case,
    policy_tokens,
    with_values,
)
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.paths import PathName
from megatron_klear_kernels.linear_policy_loss.policy_loss import TokenStatistics, fused_linear_policy_loss
from megatron_klear_kernels.linear_policy_loss.rows import RowPlan, plan_rows
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

both_dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


@torch.no_grad()
def statistics(case: LinearCase, rows: RowPlan | None = None, **settings: Any) -> Tensor:
    """[2, T]: log-probs and entropies."""
    layer = LinearSettings(Vocabulary(0, case.num_valid), **settings)
    found = fused_linear_logprobs(case.hidden, case.weight, case.targets, layer, rows=rows)
    return torch.stack((found.logprobs, found.entropy))


def places(num_tokens: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Batches of every size: at the beginning, at an odd place, at the end."""
    for size in sizes:
        for begin in sorted({0, min(7, num_tokens - size), num_tokens - size}):
            yield slice(begin, begin + size)


@both_dtypes
@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize(("width", "num_valid"), [(24, 1000), (64, 1001), (128, 4099), (256, 8192), (1024, 512)])
def test_a_row_has_the_same_bits_in_any_company(
    width: int, num_valid: int, temperature: float, dtype: torch.dtype
) -> None:
    case = linear_case(num_valid, num_tokens=150, width=width, num_padding=13, dtype=dtype)
    whole = statistics(case, temperature=temperature)
    for rows in places(150, (1, 2, 3, 15, 16, 17, 33, 64, 149)):
        assert torch.equal(statistics(case.rows(rows), temperature=temperature), whole[:, rows]), rows
    for rows in (1, 48, 100):
        chunk_bytes = rows * 4 * (num_valid + 13)
        assert torch.equal(statistics(case, temperature=temperature, chunk_bytes=chunk_bytes), whole)
    shuffled = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    assert torch.equal(statistics(case.rows(shuffled), temperature=temperature), whole[:, shuffled])


# The product of the last path is numpy's here, whose rows depend on their place in a tile of 64, and on nothing else.
@pytest.mark.parametrize(("path", "begins"), [with_values(TRITON, (0, 7)), with_values(TRITON_SCALED_EXP, (0, 64))])
@both_dtypes
def test_a_row_has_the_same_bits_in_any_company_on_triton(
    dtype: torch.dtype, path: PathName, begins: tuple[int, ...]
) -> None:
    case = linear_case(1001, num_tokens=70, num_padding=7, dtype=dtype)
    whole = statistics(case, path=path)
    for begin in begins:
        for end in (begin + 1, 69):
            assert torch.equal(statistics(case.rows(slice(begin, end)), path=path), whole[:, begin:end])
    chunk_bytes = 1 if path == "triton" else 64 * dtype.itemsize * 1008
    assert torch.equal(statistics(case, path=path, chunk_bytes=chunk_bytes), whole)


@pytest.fixture(params=(2, 4))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_valid", "num_tokens"), [(40_000, 16), (151_936, 10)])
def test_nor_does_it_depend_on_company_where_torch_has_threads(num_valid: int, num_tokens: int) -> None:
    """torch sums a row of more than 32,768 numbers that is alone in another order: by parts, one for each thread."""
    case = linear_case(num_valid, num_tokens=num_tokens)
    whole = statistics(case)
    for size in (1, 7):
        for rows in places(num_tokens, (size,)):
            assert torch.equal(statistics(case.rows(rows)), whole[:, rows]), rows


def judged(case: LinearCase, old: Tensor, tokens: Tokens, rows: RowPlan | None, **settings: Any) -> TokenStatistics:
    """What the loss, with its gradients, finds of each token."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    fused = fused_linear_policy_loss(
        hidden,
        weight,
        case.targets,
        old,
        tokens.advantages,
        tokens.token_scale,
        vocab_size=case.num_valid,
        rows=rows,
        **settings,
    )
    fused.loss.backward()
    return fused.statistics


@every_path
@both_dtypes
def test_on_policy_the_ratio_is_exactly_one(dtype: torch.dtype, path: PathName) -> None:
    """With one plan for both passes, with two plans, and in other chunks."""
    case = linear_case(1001, num_tokens=40, num_padding=7, dtype=dtype)
    tokens = policy_tokens(case, temperature=0.7)
    nothing = torch.zeros(case.num_tokens)
    plan = plan_rows(tokens.token_scale, nothing, tokens.advantages, every_loss_row_has_gradient=False)
    kept = tokens.token_scale != 0
    assert 0 < plan.num_gradient < plan.index.numel() < case.num_tokens, "the plan tries nothing"
    plans: list[tuple[RowPlan | None, RowPlan | None, int | None]] = [(plan, plan, None), (None, None, None)]
    if path != "triton_scaled_exp":  # see above: numpy's product
        plans += [(None, plan, 1), (plan, None, 1)]
    for old_plan, new_plan, chunk_bytes in plans:
        old = statistics(case, old_plan, temperature=0.7, path=path)
        found = judged(case, old[0], tokens, new_plan, chunk_bytes=chunk_bytes, temperature=0.7, path=path)
        assert (found.ratio[kept] == 1.0).all()
        assert torch.equal(found.entropy[kept], old[1][kept])
        assert not (found.clipped_low | found.clipped_high)[kept].any()


def test_a_width_of_zero_clips_no_token_on_policy() -> None:
    case = linear_case(4099, num_tokens=50)
    tokens = policy_tokens(case)
    found = judged(case, statistics(case)[0], tokens, None, eps_clip=0.0, eps_clip_high=0.0)
    assert not (found.clipped_low | found.clipped_high).any()
