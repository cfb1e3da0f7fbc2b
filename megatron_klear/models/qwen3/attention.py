"""Packed causal attention with rotary positions, as a Megatron core-attention module.

Megatron hands over q, k and v after the q/k norms; no rotary embedding was applied (position_embedding_type "none"):
it is applied here, from positions that are worked out once a micro-batch instead of once a layer and a sequence.

Kernels, chosen once by what is there:
- Transformer Engine on CUDA, where it imports;
- otherwise dense: sequences are scattered to a [S, L, ...] batch and attended by two batched products with the query
  groups folded into rows. On a CPU this is many times faster than a loop over sequences, and its backward faster than
  the fused CPU kernel's on short sequences. Long sequences go one by one through scaled_dot_product_attention, whose
  memory is linear in their length.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_klear.types import MicroBatch

try:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
except ImportError:
    TEDotProductAttention = None

# Above this length the [L, L] scores of the dense path cost more than they save.
MAX_DENSE_LENGTH = 512


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus what every layer would otherwise compute again."""

    cos: Tensor = field(kw_only=True)  # [T, 1, D/2]
    sin: Tensor = field(kw_only=True)  # [T, 1, D/2]
    dense_index: Tensor = field(kw_only=True)  # [T] int64, row of each position in the flattened [S, L] batch
    dense_mask: Tensor | None = field(kw_only=True)  # [L, L] additive causal mask, None above MAX_DENSE_LENGTH

    @property
    def num_sequences(self) -> int:
        """Sequences, padding sequences included."""
        return self.cu_seqlens_q.numel() - 1


def packed_sequences(
    micro_batch: MicroBatch, *, head_dim: int, rope_theta: float, dtype: torch.dtype
) -> PackedSequences:
    """Everything the attention layers of one forward pass share."""
    device, longest = micro_batch.positions.device, micro_batch.max_seqlen
    frequencies = rope_theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = micro_batch.positions[:, None].float() * frequencies
    mask = None
    if longest <= MAX_DENSE_LENGTH:
        mask = torch.full((longest, longest), -torch.inf, dtype=dtype, device=device).triu_(1)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=angles.cos().to(dtype)[:, None],
        sin=angles.sin().to(dtype)[:, None],
        dense_index=micro_batch.sequence_ids * longest + micro_batch.positions,
        dense_mask=mask,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension of x [T, heads, D] (Hugging Face's layout of rotary pairs)."""
    out = torch.empty_like(x)
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=out_a)
    out_a.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b)
    out_b.addcmul_(a, sin)
    return out


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle: nothing but cos and sin needs to be kept."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _rotate(grads[0], cos, -sin), None, None


class _ToDense(torch.autograd.Function):
    """[T, ...] -> [rows, ...] by index; index_copy's own backward would also build a gradient for the zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, index), None, None


class _FromDense(torch.autograd.Function):
    """[rows, ...] -> [T, ...]; every index occurs once, so the backward copies instead of adding."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.size(0)  # type: ignore[attr-defined]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0]
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None  # type: ignore[attr-defined]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention of a dense batch: q [S, L, H, D], k and v [S, L, G, D] -> [S, L, H, D].

    Padding sits behind the real tokens, so causality alone keeps real rows from seeing it.
    """
    batch, length, heads, dim = query.shape
    groups = key.size(2)
    fold = heads // groups
    q = query.view(batch, length, groups, fold, dim).permute(0, 2, 3, 1, 4).reshape(batch * groups, fold * length, dim)
    k = key.permute(0, 2, 3, 1).reshape(batch * groups, dim, length)
    v = value.transpose(1, 2).reshape(batch * groups, length, dim)
    scores = torch.baddbmm(mask.repeat(fold, 1), q, k, alpha=scale)
    out = torch.bmm(scores.softmax(dim=-1), v)
    return out.view(batch, groups, fold, length, dim).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _loop_attention(query: Tensor, key: Tensor, value: Tensor, starts: list[int], scale: float) -> Tensor:
    """One sequence at a time: [T, heads, D] each."""
    outputs = []
    for begin, end in itertools.pairwise(starts):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class PackedAttention(torch.nn.Module):
    """Core attention for packed sequences; built by Megatron through the layer spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **megatron: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = 1.0 / math.sqrt(config.kv_channels)
        self.engine = None
        if TEDotProductAttention is not None and torch.cuda.is_available():
            self.engine = TEDotProductAttention(
                config=config,
                layer_number=layer_number,
                attn_mask_type=AttnMaskType.padding_causal,
                attention_type=attention_type,
                **megatron,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSequences,
        **_megatron: Any,
    ) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H x D]."""
        p = packed_seq_params
        query, key = _Rotary.apply(query, p.cos, p.sin), _Rotary.apply(key, p.cos, p.sin)
        if self.engine is not None:
            return self.engine(
                query, key, value, attention_mask, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=p
            )
        if p.dense_mask is None:
            return _loop_attention(query, key, value, p.cu_seqlens_q.tolist(), self.scale).flatten(1)
        rows = p.num_sequences * p.max_seqlen_q
        shape = (p.num_sequences, p.max_seqlen_q)
        dense = [_ToDense.apply(x, p.dense_index, rows).unflatten(0, shape) for x in (query, key, value)]
        out = dense_attention(dense[0], dense[1], dense[2], p.dense_mask, self.scale)
        return _FromDense.apply(out.flatten(0, 1), p.dense_index).flatten(1)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to checkpoint."""
        return {}
