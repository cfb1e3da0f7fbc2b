"""The three matrix products of an output layer, with float32 results where they matter.

    logits = h W^T          float32: bfloat16 logits would put log-probs off by 0.1 and ratios by 10%
    dh = dz W               in the hidden states' type
    dW += dz^T h            summed in float32 whatever the number of chunks

On CUDA half-precision operands are multiplied as they are, into float32 where asked. On a CPU there is no such product,
but float32 operands that hold bfloat16 values can be multiplied by its bfloat16 units without loss: a setting of torch
that is set for the time of our products only. dz has no such values and is rounded, as it is on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def fast_products(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Inside, float32 products of bfloat16 values on a CPU use its bfloat16 units, where it has some.

    Autocast is off: it would take float32 statistics for something to be sped up.
    """
    with torch.autocast(device.type, enabled=False):
        if dtype != torch.bfloat16 or device.type != "cpu" or not _cpu_multiplies_bfloat16():
            yield
            return
        settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before


def _cpu_multiplies_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def operand(tensor: Tensor) -> Tensor:
    """The tensor as our products take it: itself on CUDA, float32 elsewhere."""
    return tensor if tensor.device.type == "cuda" else tensor.float()


def logits_product(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """h W^T of operands [C, H] and [V, H] into float32 `out` [C, V]."""
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)


def hidden_gradient(d_logits: Tensor, weight: Tensor, *, in_float32: bool) -> Tensor:
    """dz W [C, H], in the operands' type or in float32."""
    if in_float32 and weight.dtype != torch.float32:
        return torch.mm(d_logits, weight, out_dtype=torch.float32)
    return torch.mm(d_logits, weight)


def check_main_grad(weight: Tensor, main_grad: Tensor | None) -> None:
    """Raises ValueError unless the weight's gradient can be added there."""
    if main_grad is not None and (main_grad.shape != weight.shape or main_grad.dtype != torch.float32):
        raise ValueError(
            f"main_grad is {main_grad.dtype} {list(main_grad.shape)}: expected float32 {list(weight.shape)}, the shape"
            " of the output weight; without one leave it out, and autograd gets the gradient"
        )


class WeightGradient:
    """The gradient [V, H] of the output weight, summed in float32: in `main_grad` if given, else in its own memory."""

    def __init__(self, weight: Tensor, main_grad: Tensor | None) -> None:
        self._weight = weight
        self._main_grad = main_grad
        self.own: Tensor | None = None

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add dz^T h of operands [C, V] and [C, H]."""
        total, beta = self._main_grad, 1
        if total is None and self.own is None:
            # The first product overwrites what `empty` left, which saves a pass of zeros.
            self.own, beta = torch.empty(self._weight.shape, dtype=torch.float32, device=self._weight.device), 0
        total = self.own if total is None else total
        assert total is not None
        if hidden.dtype == torch.float32:
            torch.addmm(total, d_logits.t(), hidden, beta=beta, out=total)
        else:
            torch.addmm(total, d_logits.t(), hidden, out_dtype=torch.float32, beta=beta, out=total)

    def result(self) -> Tensor:
        """What autograd is to get [V, H]: the gradient, or zeros where there is none or `main_grad` has it already."""
        if self.own is None:
            # Autograd must get something, or nobody is told that this weight is done. Nothing is written for it here.
            return self._weight.new_zeros(()).expand_as(self._weight)
        return self.own.to(self._weight.dtype)
