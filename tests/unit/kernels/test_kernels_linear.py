"""Products of a linear layer, by oneDNN and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_klear_kernels.linear import autograd
from megatron_klear_kernels.linear.autograd import is_fast, linear, product

needs_onednn = pytest.mark.skipif(
    not is_fast(torch.empty(2048, 1024), torch.empty(1, 1024)), reason="this torch has no oneDNN product"
)
# Wider in than out and the other way round, above and below where oneDNN pays.
SHAPES = [(4096, 48, 160), (4096, 160, 48), (4096, 64, 64), (3, 8, 5)]


def operands(rows: int, width: int, out: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + width)
    return torch.randn(rows, width, generator=generator), torch.randn(out, width, generator=generator)


def assert_close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert torch.linalg.vector_norm(found.double() - exact) <= 1e-6 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize(("rows", "width", "out"), SHAPES)
def test_a_product_is_exact_to_float32_for_any_strides(rows: int, width: int, out: int) -> None:
    x, weight = operands(rows, width, out)
    exact = x.double() @ weight.double().t()
    assert_close(product(x, weight), exact)
    assert_close(product(x.t().contiguous().t(), weight.t().contiguous().t()), exact)


@pytest.mark.parametrize(("rows", "width", "out"), SHAPES)
@pytest.mark.parametrize("sizes", [(-1,), (-1, 1), (1, -1)])
def test_gradients_are_those_of_float64(rows: int, width: int, out: int, sizes: tuple[int, ...]) -> None:
    x, weight = operands(rows, width, out)
    upstream = operands(rows, out, 1)[0].view(*sizes, out)
    found = [x.view(*sizes, width).requires_grad_(), weight.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in found]
    (output, exact_output) = linear(*found), exact[0] @ exact[1].t()
    assert_close(output, exact_output)
    output.backward(upstream)
    exact_output.backward(upstream.double())
    for leaf, wanted in zip(found, exact, strict=True):
        assert leaf.grad is not None and wanted.grad is not None
        assert_close(leaf.grad, wanted.grad)


def test_the_input_is_kept_as_it_came() -> None:
    x, weight = (one.requires_grad_() for one in operands(7, 4, 3))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear(x[:, None], weight)
    assert [(one.shape, one.data_ptr()) for one in kept] == [
        ((7, 1, 4), x.data_ptr()),
        (weight.shape, weight.data_ptr()),
    ]


@needs_onednn
def test_onednn_multiplies_what_is_large_and_float32() -> None:
    x, weight = torch.empty(2048, 64), torch.empty(16, 64)
    assert is_fast(x, weight) and is_fast(x[:, None], weight)
    assert not is_fast(x[:2047], weight)
    assert not is_fast(x.bfloat16(), weight.bfloat16()) and not is_fast(x, weight.double())
    assert not is_fast(x.to("meta"), weight.to("meta"))


def test_without_onednn_the_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(4096, 48, 160)
    monkeypatch.setattr(autograd, "_fast_product", None)
    assert not is_fast(x, weight)
    assert torch.equal(product(x, weight), x @ weight.t())


def test_bfloat16_is_torchs() -> None:
    x, weight = (one.bfloat16().requires_grad_() for one in operands(64, 48, 16))
    output = linear(x, weight)
    output.sum().backward()
    assert torch.equal(output, x @ weight.t())
    assert x.grad is not None and weight.grad is not None and x.grad.dtype == weight.grad.dtype == torch.bfloat16
