"""Packed causal attention with rotary positions, as a Megatron core-attention module.

Megatron hands over q, k and v after the q/k norms; no rotary embedding was applied (position_embedding_type "none"):
it is applied here, from positions that are worked out once a micro-batch instead of once a layer and a sequence.

backend.py chooses a CUDA kernel where there is one. Otherwise sequences are scattered to a dense [S, L, ...] batch and
attended by two batched products with the query groups folded into rows: on a CPU many times faster than a loop over
sequences, and its backward faster than the fused CPU kernel's on short sequences. Long sequences go one by one through
scaled_dot_product_attention, whose memory is linear in their length.

Under context parallelism each rank has its own queries, and gathers keys and values of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from megatron_klear.config.rope import RopeConfig
from megatron_klear.models.qwen3.backend import (
    TEDotProductAttention,
    VarlenPlan,
    attention_kernel,
    ends,
    varlen_attention,
    varlen_plan,
)
from megatron_klear.models.qwen3.rope import rope_table
from megatron_klear.parallel.context import GatherRows, gather_order
from megatron_klear.types import MicroBatch, Topology
from megatron_klear_kernels.rope.autograd import rotate

# Above this length the [S, L, L] scores of the dense path cost more than they save: 3 times the time at 256.
MAX_DENSE_LENGTH = 128
# Rows whose scores are held at a time where a long sequence is shared by several ranks.
BLOCK_ROWS = 1024


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus what every layer would otherwise compute again.

    t are the positions of this rank, T those of the packed micro-batch: the same without context parallelism.
    """

    starts: Tensor = field(kw_only=True)  # [S+1] int32, places of the sequences, padding of each included
    cos: Tensor = field(kw_only=True)  # [t, 1, D/2]
    sin: Tensor = field(kw_only=True)  # [t, 1, D/2]
    key_order: Tensor | None = field(kw_only=True)  # [T] int64, place of each key among those gathered; None without CP
    query_index: Tensor = field(kw_only=True)  # [t] int64, row of each own position in the flattened [S, Lq] batch
    key_index: Tensor = field(kw_only=True)  # [T] int64, row of each position in the flattened [S, L] batch
    dense_mask: Tensor | None = field(kw_only=True)  # [L, L] or [S, Lq, L], additive; None above MAX_DENSE_LENGTH
    varlen: VarlenPlan = field(kw_only=True)
    context_size: int = field(kw_only=True, default=1)
    context_rank: int = field(kw_only=True, default=0)

    @property
    def num_sequences(self) -> int:
        """Sequences, padding sequences included."""
        return self.starts.numel() - 1


def packed_sequences(
    micro_batch: MicroBatch, topology: Topology, *, head_dim: int, rope: RopeConfig, dtype: torch.dtype
) -> PackedSequences:
    """Everything the attention layers of one forward pass share."""
    device, longest, size = micro_batch.positions.device, micro_batch.max_seqlen, topology.context_size
    cos, sin = rope_table(micro_batch.positions, rope, head_dim, dtype)
    key_index = query_index = micro_batch.sequence_ids * longest + micro_batch.positions
    key_order = None
    if size > 1:
        starts = micro_batch.cu_seqlens.to(torch.int64)
        sequence = torch.repeat_interleave(torch.arange(starts.numel() - 1, device=device), starts.diff())
        key_index = sequence * longest + torch.arange(sequence.numel(), device=device) - starts[sequence]
        key_order = gather_order(micro_batch.cu_seqlens, size)
        own = torch.arange(micro_batch.positions.numel(), device=device)
        query_index = micro_batch.sequence_ids * (longest // size) + own - (starts // size)[micro_batch.sequence_ids]
    mask = _dense_mask(micro_batch, query_index, size, dtype) if longest <= MAX_DENSE_LENGTH else None
    return PackedSequences(
        qkv_format="thd",
        # Transformer Engine tells a sequence's tokens from its place; ours need only the place.
        cu_seqlens_q=ends(micro_batch.true_lengths),
        cu_seqlens_kv=ends(micro_batch.true_lengths),
        cu_seqlens_q_padded=micro_batch.cu_seqlens,
        cu_seqlens_kv_padded=micro_batch.cu_seqlens,
        starts=micro_batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cos=cos[:, None],
        sin=sin[:, None],
        key_order=key_order,
        query_index=query_index,
        key_index=key_index,
        dense_mask=mask,
        varlen=varlen_plan(micro_batch.cu_seqlens, longest, micro_batch.positions.numel(), size, topology.context_rank),
        context_size=size,
        context_rank=topology.context_rank,
    )


def _dense_mask(micro_batch: MicroBatch, query_index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Additive causal mask: one for all sequences, or where ranks share them one for each sequence's own rows."""
    device, longest = query_index.device, micro_batch.max_seqlen
    if size == 1:
        return torch.full((longest, longest), -torch.inf, dtype=dtype, device=device).triu_(1)
    num_sequences = micro_batch.cu_seqlens.numel() - 1
    # Rows without a position see the first key, so that no row of scores is empty.
    positions = torch.zeros(num_sequences * (longest // size), dtype=torch.int64, device=device)
    positions[query_index] = micro_batch.positions
    hidden = positions.view(num_sequences, -1, 1) < torch.arange(longest, device=device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


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
    """Causal grouped-query attention of a dense batch: q [S, Lq, H, D], k and v [S, L, G, D] -> [S, Lq, H, D].

    Padding sits behind the real tokens, so causality alone keeps real rows from seeing it. The mask is [Lq, L] for all
    or [S, Lq, L].
    """
    batch, length, heads, dim = query.shape
    groups, num_keys = key.size(2), key.size(1)
    fold = heads // groups
    q = query.view(batch, length, groups, fold, dim).permute(0, 2, 3, 1, 4).reshape(batch * groups, fold * length, dim)
    k = key.permute(0, 2, 3, 1).reshape(batch * groups, dim, num_keys)
    v = value.transpose(1, 2).reshape(batch * groups, num_keys, dim)
    if mask.dim() == 3:
        mask = mask.repeat_interleave(groups, dim=0)
    scores = torch.baddbmm(mask.repeat(*[1] * (mask.dim() - 2), fold, 1), q, k, alpha=scale)
    out = torch.bmm(scores.softmax(dim=-1), v)
    return out.view(batch, groups, fold, length, dim).permute(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _loop_attention(query: Tensor, key: Tensor, value: Tensor, p: PackedSequences, scale: float) -> Tensor:
    """One sequence at a time: q [t, H, D], k and v [T, G, D] -> [t, H, D]."""
    lengths = p.starts.diff().tolist()
    own = [length // p.context_size for length in lengths]
    outputs = []
    # One split, not slices: the backward of a slice is as large as the whole, so S of them would cost S x T.
    for parts in zip(query.split(own), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        if p.context_size == 1:
            out = _late_attention(q, k, v, scale)
        else:
            first, last = q.chunk(2, dim=2)
            chunk = first.size(2)
            seen = [(p.context_rank + 1) * chunk, (2 * p.context_size - p.context_rank) * chunk]
            halves = zip((first, last), seen, strict=True)
            out = torch.cat([_late_attention(half, k[:, :, :n], v[:, :, :n], scale) for half, n in halves], dim=2)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _late_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last n of m positions: q [1, H, n, D], k and v [1, G, m, D] -> [1, H, n, D].

    torch's own causal mask is for the first n. Ours is made a block of rows at a time, and again in the backward:
    memory stays linear in m.
    """
    ahead = key.size(2) - query.size(2)
    if ahead == 0:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scale)

    def block(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        rows = torch.arange(first, first + q.size(2), device=q.device)
        mask = rows[:, None] >= torch.arange(k.size(2), device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=scale)

    outputs = []
    for begin in range(0, query.size(2), BLOCK_ROWS):
        q, first = query[:, :, begin : begin + BLOCK_ROWS], ahead + begin
        seen = first + q.size(2)
        outputs.append(checkpoint(block, q, key[:, :, :seen], value[:, :, :seen], first, use_reentrant=False))
    return torch.cat(outputs, dim=2)


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
        groups: ProcessGroupCollection | None = megatron.get("pg_collection")
        self.context = groups.cp if groups is not None else None
        self.engine = None
        kernel = attention_kernel(config.params_dtype).kernel
        self.varlen = varlen_attention(kernel)
        if kernel == "transformer_engine":
            assert TEDotProductAttention is not None
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
        """q [t, H, D], k and v [t, G, D] of this rank's positions -> [t, H x D]."""
        p = packed_seq_params
        query, key = rotate(query, key, p.cos, p.sin)
        if self.engine is not None:
            return self.engine(
                query, key, value, attention_mask, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=p
            )
        if p.key_order is not None:
            # Keys and values of all ranks, in the order of the packed micro-batch.
            both = GatherRows.apply(torch.stack((key, value), dim=1), self.context).index_select(0, p.key_order)
            key, value = both[:, 0], both[:, 1]
        if self.varlen is not None:
            if p.varlen.key_rows is not None:
                key, value = (x.index_select(0, p.varlen.key_rows) for x in (key, value))
            return self.varlen(query, key, value, p.varlen, self.scale).flatten(1)
        if p.dense_mask is None:
            return _loop_attention(query, key, value, p, self.scale).flatten(1)

        def to_dense(x: Tensor, index: Tensor, length: int) -> Tensor:
            return _ToDense.apply(x, index, p.num_sequences * length).unflatten(0, (p.num_sequences, length))

        q = to_dense(query, p.query_index, p.max_seqlen_q // p.context_size)
        k, v = (to_dense(x, p.key_index, p.max_seqlen_q) for x in (key, value))
        out = dense_attention(q, k, v, p.dense_mask, self.scale)
        return _FromDense.apply(out.flatten(0, 1), p.query_index).flatten(1)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to checkpoint."""
        return {}
