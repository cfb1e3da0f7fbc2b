"""Megatron's parallel linear layers with products of our own on a CPU."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from torch import Tensor

from megatron_klear_kernels.linear.autograd import is_fast, linear


class ColumnLinear(ColumnParallelLinear):
    """Rows of the weight are split over tensor-parallel ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **megatron: Any) -> Any:
        if not _is_ours(input, weight, **megatron):
            return super()._forward_impl(input, weight, **megatron)
        if megatron["allreduce_dgrad"]:
            # Each rank's rows give a part of the input's gradient; the backward of this adds them up.
            input = copy_to_tensor_model_parallel_region(input, group=megatron["tp_group"])
        return linear(input, weight)


class RowLinear(RowParallelLinear):
    """Columns of the weight are split over tensor-parallel ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **megatron: Any) -> Any:
        if not _is_ours(input, weight, **megatron):
            return super()._forward_impl(input, weight, **megatron)
        return linear(input, weight)


def _is_ours(input: Tensor, weight: Tensor, *, bias: Tensor | None, sequence_parallel: bool, **_megatron: Any) -> bool:
    """Under sequence parallelism the input is gathered, again in the backward: that stays Megatron's."""
    return bias is None and not sequence_parallel and weight.requires_grad and is_fast(input, weight)
