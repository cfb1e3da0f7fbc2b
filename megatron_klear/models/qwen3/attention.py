"""Packed causal attention with rotary positions, as a Megatron core-attention module.

Megatron hands over q, k and v after the q/k norms; no rotary embedding was applied (position_embedding_type "none"):
it is applied here, from positions that are worked out once a micro-batch instead of once a layer and a sequence.

backend.py chooses a CUDA kernel where there is one. Otherwise short sequences go all at once, through a kernel in C
where that can run, else through the products of dense_attention.py: on a CPU both are many times faster than a loop
over sequences. Long ones go one by one through scaled_dot_product_attention, whose memory is linear in their length.

Under context parallelism each rank has its own queries, and gathers keys and values of all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
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
from megatron_klear.models.qwen3.dense_attention import Share, dense_attention, dense_plan
from megatron_klear.models.qwen3.rope import rope_table
from megatron_klear.parallel.context import GatherRows, gather_order
from megatron_klear.types import MicroBatch, Topology
from megatron_klear_kernels.attention.short import Sequences, short_attention
from megatron_klear_kernels.native.library import can_attend
from megatron_klear_kernels.rope.autograd import rotate

# Above this length the dense path gains less than a fifth, and its probabilities are a multiple of all else it keeps.
MAX_DENSE_LENGTH = 256
# Above this length, and heads of 128 numbers, the C kernel gains nothing: its keys leave the cache.
MAX_NATIVE_LENGTH = 1024
# Rows whose scores are held at a time where a long sequence is shared by several ranks.
BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ShortSequences:
    """How the short sequences of a micro-batch are computed together, and which ones are too long for that."""

    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None
    """q [t, H, D], k and v [T, G, D], scale -> [t, H, D], zero in the others; None if there are no short ones."""
    left_out: tuple[int, ...]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters plus what every layer would otherwise compute again.

    t are the positions of this rank, T those of the packed micro-batch: the same without context parallelism.
    """

    starts: Tensor = field(kw_only=True)  # [S+1] int32, places of the sequences, padding of each included
    cos: Tensor = field(kw_only=True)  # [t, 1, D/2]
    sin: Tensor = field(kw_only=True)  # [t, 1, D/2]
    key_order: Tensor | None = field(kw_only=True)  # [T] int64, place of each key among those gathered; None without CP
    varlen: VarlenPlan = field(kw_only=True)
    share: Share = field(kw_only=True, default=Share())
    short: ShortSequences | None = field(init=False, default=None)

    def short_sequences(self, query: Tensor, key: Tensor) -> ShortSequences:
        """For q [t, H, D] and k [T, G, D]; made when asked for, as kernels need none and it waits for `starts`."""
        if self.short is None:
            native = self.share.size == 1 and can_attend(query, query.size(2))
            # C would read and write behind the end.
            assert int(self.starts[-1]) == key.size(0), f"sequences of {self.starts[-1]} of {key.size(0)} positions"
            self.short = _in_c(self.starts) if native else _by_products(self.starts, self.share, query, key)
        return self.short


def _in_c(starts: Tensor) -> ShortSequences:
    begins, lengths = starts[:-1].long(), starts.diff().long()
    is_short = lengths <= MAX_NATIVE_LENGTH
    left_out = tuple((~is_short).nonzero()[:, 0].tolist())
    sequences = Sequences(begins[is_short], lengths[is_short], cover_all=not left_out)
    attend = functools.partial(short_attention, sequences=sequences)
    return ShortSequences(attend if sequences.begins.numel() else None, left_out)


def _by_products(starts: Tensor, share: Share, query: Tensor, key: Tensor) -> ShortSequences:
    plan = dense_plan(
        starts, share, heads=query.size(1), groups=key.size(1), longest=MAX_DENSE_LENGTH, dtype=query.dtype
    )
    attend = functools.partial(dense_attention, plan=plan)
    return ShortSequences(attend if plan.blocks else None, plan.left_out)


def packed_sequences(
    micro_batch: MicroBatch, topology: Topology, *, head_dim: int, rope: RopeConfig, dtype: torch.dtype
) -> PackedSequences:
    """Everything the attention layers of one forward pass share."""
    longest, size = micro_batch.max_seqlen, topology.context_size
    cos, sin = rope_table(micro_batch.positions, rope, head_dim, dtype)
    key_order = gather_order(micro_batch.cu_seqlens, size) if size > 1 else None
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
        varlen=varlen_plan(micro_batch.cu_seqlens, longest, micro_batch.positions.numel(), size, topology.context_rank),
        share=Share(size, topology.context_rank),
    )


def torch_attention(query: Tensor, key: Tensor, value: Tensor, p: PackedSequences, scale: float) -> Tensor:
    """Short sequences together, long ones one at a time: q [t, H, D], k and v [T, G, D] -> [t, H, D]."""
    short, lengths = p.short_sequences(query, key), p.starts.diff().tolist()
    if short.attend is not None and not short.left_out:
        return short.attend(query, key, value, scale)
    own = [length // p.share.size for length in lengths]
    # One split, not slices: the backward of a slice is as large as the whole, so S of them would cost S x T.
    parts = list(zip(query.split(own), key.split(lengths), value.split(lengths), strict=True))
    outputs = dict[int, Tensor]()
    if short.attend is not None:
        outputs |= enumerate(short.attend(query, key, value, scale).split(own))
    for i in short.left_out:
        q, k, v = (x.transpose(0, 1)[None] for x in parts[i])
        outputs[i] = _long_attention(q, k, v, p.share, scale)[0].transpose(0, 1)
    return torch.cat([outputs[i] for i in range(len(own))])


def _long_attention(query: Tensor, key: Tensor, value: Tensor, share: Share, scale: float) -> Tensor:
    """One sequence: own queries [1, H, n, D], k and v [1, G, m, D] -> [1, H, n, D]."""
    if share.size == 1:
        return _late_attention(query, key, value, scale)
    first, last = query.chunk(2, dim=2)
    chunk = first.size(2)
    seen = [(share.rank + 1) * chunk, (2 * share.size - share.rank) * chunk]
    halves = zip((first, last), seen, strict=True)
    return torch.cat([_late_attention(half, key[:, :, :n], value[:, :, :n], scale) for half, n in halves], dim=2)


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
        return torch_attention(query, key, value, p, self.scale).flatten(1)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """No parameters, nothing to checkpoint."""
        return {}
