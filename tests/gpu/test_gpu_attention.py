"""The attention kernels of a CUDA device against attention written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.micro_batches import micro_batch_of_lengths
from megatron_klear.models.qwen3.backend import Kernel, attention_kernel, varlen_attention, varlen_plan
from megatron_klear.parallel.context import context_rows

pytestmark = pytest.mark.gpu

HEADS, GROUPS, DIM, SCALE = 8, 2, 64, 0.125
LENGTHS = (8, 264, 16, 1024)
KERNELS: tuple[Kernel, ...] = ("flash_attn", "torch_varlen")


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outputs = []
    for query, key, value in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", query, key) * SCALE
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value))
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_varlen_kernel_is_causal_attention_on_every_context_rank(kernel: Kernel, size: int) -> None:
    function = varlen_attention(kernel)
    if kernel == "flash_attn" and attention_kernel(torch.bfloat16).kernel != "flash_attn":
        pytest.importorskip("flash_attn")
    assert function is not None
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(sum(LENGTHS), n, DIM, generator=generator).cuda() for n in (HEADS, GROUPS, GROUPS)]
    low = [x.bfloat16().requires_grad_() for x in operands]
    high = [x.detach().double().requires_grad_() for x in low]
    weights = torch.randn(sum(LENGTHS), HEADS, DIM, generator=generator).cuda()
    wanted = written_out(*high)
    right = torch.autograd.grad((wanted * weights).sum(), high)
    cu_seqlens = micro_batch_of_lengths(LENGTHS).cu_seqlens.cuda()
    total = torch.zeros((), device="cuda")
    for rank in range(size):
        own = context_rows(cu_seqlens, rank, size) if size > 1 else torch.arange(sum(LENGTHS), device="cuda")
        plan = varlen_plan(cu_seqlens, max(LENGTHS), own.numel(), size, rank)
        key, value = (x if plan.key_rows is None else x[plan.key_rows] for x in low[1:])
        out = function(low[0][own], key, value, plan, SCALE)
        torch.testing.assert_close(out.double(), wanted[own], atol=2e-2, rtol=2e-2)
        total = total + (out.float() * weights[own]).sum()
    for found, grad in zip(torch.autograd.grad(total, low), right, strict=True):
        assert float((found.double() - grad).norm() / grad.norm()) < 2e-2
