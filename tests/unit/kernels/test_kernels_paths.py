"""Which path is taken, why, and that this is said once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from helpers.linear_cases import CPU, every_path
from megatron_klear_kernels.linear_policy_loss import eager_rows, paths
from megatron_klear_kernels.linear_policy_loss.paths import (
    LogitPath,
    PathChoice,
    PathName,
    ScaledExpPath,
    Shard,
    build_path,
    bytes_per_logit,
    choose_path,
    in_place_of,
    multiply_,
    row_passes,
)
from megatron_klear_kernels.linear_policy_loss.vocabulary import over_ranks

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_chosen_yet() -> None:
    choose_path.cache_clear()


def card(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> None:
    """A CUDA device on which Triton runs, or does not for that reason."""
    monkeypatch.setattr(paths, "why_unavailable", lambda device: obstacle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_on_a_cpu_plain_torch_runs() -> None:
    """Even where Triton's interpreter could: it is there for tests."""
    assert choose_path("auto", CPU) == PathChoice("eager", "tensors are on cpu")
    assert choose_path("eager", CPU) == PathChoice("eager", "asked for")


def test_on_a_gpu_triton_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, obstacle=None)
    choice = choose_path("auto", CUDA)
    assert choice.name == "triton" and choice.why.startswith("CUDA with Triton; nobody has measured triton_scaled_exp")
    assert choose_path("eager", CUDA) == PathChoice("eager", "asked for")
    assert choose_path("triton_scaled_exp", CUDA) == PathChoice("triton_scaled_exp", "asked for")


def test_on_a_gpu_without_triton_plain_torch_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, obstacle="the package triton is not installed")
    assert choose_path("auto", CUDA) == PathChoice("eager", "the package triton is not installed")
    for name in ("triton", "triton_scaled_exp"):
        message = f"path {name} was asked for, but the package triton is not installed; ask for eager or auto"
        with pytest.raises(ValueError, match=message):
            choose_path(name, CUDA)


def test_the_scaled_exponentials_run_where_they_were_measured_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, obstacle=None)
    monkeypatch.setattr(paths, "SCALED_EXP_WINS", frozenset({(9, 0)}))
    assert choose_path("auto", CUDA) == PathChoice("triton_scaled_exp", "measured to be ahead on this card")


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=paths.__name__):
        for _ in range(3):
            choose_path("auto", CPU)
    assert caplog.messages == ["output layer and loss: eager (tensors are on cpu)"]


@every_path
def test_a_choice_is_built(path: PathName) -> None:
    choice = choose_path(path, CPU)
    built = build_path(choice, torch.zeros(32, 8), Shard(0, 32, 1.0), 16)
    assert isinstance(built, ScaledExpPath if path == "triton_scaled_exp" else LogitPath)
    assert (row_passes(choice) is eager_rows) == (path == "eager")


def test_bytes_of_a_logit() -> None:
    found = [
        bytes_per_logit(PathChoice(name, ""), dtype)
        for name in ("eager", "triton", "triton_scaled_exp")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert found == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_gradient_lies_in_the_memory_of_its_row_of_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 10)
    view = in_place_of(logits, dtype)
    assert view.shape == (3, 10) and view.dtype == dtype
    for row in range(3):
        assert view[row].data_ptr() == logits[row].data_ptr()


@pytest.mark.parametrize("factor", (1.0, 3.0, 0.0))
def test_multiply(factor: float) -> None:
    tensor = torch.randn(5, 3)
    expected = tensor * factor
    multiply_(tensor, torch.tensor(factor))
    assert torch.equal(tensor, expected)


def gradient_of(worker: LogitPath | ScaledExpPath, hidden: Tensor, num_rows: int) -> Tensor:
    """Of `num_rows` rows, the others being padding of the chunk."""
    targets, ones = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows)
    rows = over_ranks(worker.statistics(hidden, targets), None)
    return worker.gradient(targets, rows, ones, None).clone()


@every_path
def test_rows_that_fill_a_chunk_up_have_a_gradient_of_zero(path: PathName) -> None:
    """Also those in which a larger chunk has left numbers."""
    weight = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    worker = build_path(choose_path(path, CPU), weight, Shard(0, 200, 1.0), 32)
    assert isinstance(worker, LogitPath | ScaledExpPath)
    assert gradient_of(worker, hidden, 32).all(dim=1).all()
    found = gradient_of(worker, hidden[:16], 9)
    assert found.shape == (16, 200) and found[:9].all(dim=1).all() and not found[9:].any()
