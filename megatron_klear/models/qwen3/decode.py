"""Qwen3 for generation: a plain torch forward with a key/value cache, free of Megatron.

Letters: R rows, P prompt positions, N positions of any rows, H query heads, G key/value groups, Q = H / G, D head_dim,
L live columns of the cache, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.models.qwen3.decode_weights import Layer, take_weights, unweighted_rms_norm
from megatron_klear.models.qwen3.kv_cache import KvCache
from megatron_klear.models.qwen3.rope import rope_table
from megatron_klear_kernels.attention.decode import decode_attention
from megatron_klear_kernels.linear.autograd import product
from megatron_klear_kernels.native.library import can_attend
from megatron_klear_kernels.rms_norm.autograd import rms_norm

# Positions of prompts that go through the model at a time, and those of one prompt: they bound activations and masks.
PREFILL_POSITIONS = 8192
PREFILL_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class _Projected:
    """What attention takes: q [N, G, Q, D], k and v [N, G, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


class Qwen3Decoder:
    """Weights and cache of a running generation."""

    def __init__(self, shape: Qwen3Shape, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.shape = shape
        self.weights = take_weights(shape, named_tensors)
        embedding = self.weights.embedding
        self.dtype, self.device = embedding.dtype, embedding.device
        self.cache = KvCache(shape, self.dtype, self.device)
        self._turns = self._rotary_table(0)
        self._in_c = can_attend(embedding, shape.head_dim)

    def _rotary_table(self, length: int) -> Tensor:
        """cos + i sin [length, 1, 1, D/2] complex, of the values that the model's dtype has.

        Turned queries and keys are smaller by D^-1/4 each, so that their products need no scaling by D^-1/2.
        """
        positions, dim = torch.arange(length, device=self.device), self.shape.head_dim
        cos, sin = rope_table(positions, self.shape.rope, dim, self.dtype)
        return torch.complex(cos.float(), sin.float())[:, None, None] * dim**-0.25

    def reset(self, longest: int) -> None:
        """Start anew, with sequences of at most `longest` positions."""
        self.cache.clear()
        if longest > self._turns.size(0):
            self._turns = self._rotary_table(longest)

    @torch.inference_mode()
    def prefill(self, prompts: Tensor, lengths: Tensor, copies: Tensor) -> Tensor:
        """Append rows: prompts [n, P] padded on the left, their lengths [n] and, for more rows, which prompt each has.

        Args:
            prompts: int64 on the device.
            lengths: int64 on the host.
            copies: [m] int64 on the host: row n + i holds prompt copies[i] too.

        Returns:
            next-token logits [n, V] float32 of the prompts.
        """
        cache, (num, width) = self.cache, prompts.shape
        first = cache.num_rows
        cache.append(torch.cat([lengths, lengths[copies]]))
        height = max(1, PREFILL_POSITIONS // width)
        last = [self._prefill(part, first + i * height) for i, part in enumerate(prompts.split(height))]
        cache.repeat(first + copies, first + num)
        return self._logits(torch.cat(last))

    def _prefill(self, prompts: Tensor, first: int) -> Tensor:
        """Prompts [n, P] into rows from `first` on; hidden states of their last tokens [n, hidden]."""
        rows, begin = slice(first, first + prompts.size(0)), self.cache.end - prompts.size(1)
        # Columns that are padding in all these rows are left out.
        column = int(self.cache.starts[rows].min())
        last = prompts.new_empty(0)
        for part in prompts[:, column - begin :].split(PREFILL_COLUMNS, dim=1):
            last = self._prefill_columns(part, rows, column)
            column += part.size(1)
        return last

    def _prefill_columns(self, token_ids: Tensor, rows: slice, column: int) -> Tensor:
        """token_ids [n, c] into columns from `column` on, those before being filled; last hidden states [n, hidden]."""
        cache, (num, width) = self.cache, token_ids.shape
        starts, end = cache.starts[rows].to(self.device)[:, None], column + width
        # The columns that padding fills are before a row's start: hidden from it, but each sees itself.
        begin = int(cache.starts[rows].min())
        queries, keys = (torch.arange(at, end, device=self.device) for at in (column, begin))
        itself = queries[:, None] == keys
        seen = (queries[:, None] >= keys) & (keys >= starts[:, None]) | itself
        turns = self._turns[(queries - starts).clamp_(min=0)].flatten(0, 1)
        x = F.embedding(token_ids.flatten(), self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            new = self._project(layer, x, turns)
            q, k, v = (part.unflatten(0, (num, width)) for part in (new.q, new.k, new.v))
            cache.keys[i][rows, :, :, column:end] = k.permute(0, 2, 3, 1)
            cache.values[i][rows, :, column:end] = v.transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                q.flatten(2, 3).transpose(1, 2),
                cache.keys[i][rows, :, :, begin:end].transpose(2, 3).contiguous(),
                cache.values[i][rows, :, begin:end],
                attn_mask=seen[:, None],
                scale=1.0,
                enable_gqa=True,
            )
            self._finish(layer, x, attended.transpose(1, 2).reshape(x.size(0), -1))
        return x.view(num, width, -1)[:, -1]

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token [R] to each row; next-token logits [R, V] float32."""
        self.cache.advance()
        turns = self._turns[self.cache.positions - 1]
        x = F.embedding(token_ids, self.weights.embedding)
        attend = self._attend_in_c if self._in_c else self._attend_by_products
        for i, layer in enumerate(self.weights.layers):
            self._finish(layer, x, attend(i, layer, x, turns))
        return self._logits(x)

    def _attend_in_c(self, index: int, layer: Layer, x: Tensor, turns: Tensor) -> Tensor:
        """The new column of x [R, hidden] into layer `index` of the cache; [R, H D]."""
        cache, qkv = self.cache, product(self._norm(x, layer.input_norm), layer.qkv)
        keys, values = cache.keys[index], cache.values[index]
        by_pairs = torch.view_as_real(turns)
        eps = self.shape.rms_norm_eps
        return decode_attention(qkv, layer.qk_norm, by_pairs, keys, values, cache.starts, cache.end, eps)

    def _attend_by_products(self, index: int, layer: Layer, x: Tensor, turns: Tensor) -> Tensor:
        """The same where the C kernel cannot run."""
        cache, groups, dim = self.cache, self.shape.num_key_value_heads, self.shape.head_dim
        rows, column, live = cache.num_rows, cache.end - 1, slice(cache.begin, cache.end)
        new = self._project(layer, x, turns)
        keys, values = cache.keys[index][:rows], cache.values[index][:rows]
        keys[..., column], values[:, :, column] = new.k, new.v
        # One group's queries are the rows of one of the products of a batch.
        scores = torch.bmm(new.q.view(rows * groups, -1, dim), keys[..., live].flatten(0, 1))
        if cache.bias is not None:
            scores += cache.bias[..., live]
        attended = torch.bmm(scores.softmax(-1), values[:, :, live].flatten(0, 1))
        return attended.view(rows, -1)

    def _project(self, layer: Layer, x: Tensor, turns: Tensor) -> _Projected:
        """Normed and turned q and k, and v, of x [N, hidden]; turns [N, 1, 1, D/2]."""
        groups, dim = self.shape.num_key_value_heads, self.shape.head_dim
        qkv = product(self._norm(x, layer.input_norm), layer.qkv).view(x.size(0), -1, dim)
        qk, v = qkv[:, :-groups].unflatten(1, (groups, -1)), qkv[:, -groups:]
        normed = unweighted_rms_norm(qk, self.shape.rms_norm_eps).mul_(layer.qk_norm)
        turned = torch.view_as_complex(normed.float().unflatten(-1, (-1, 2))) * turns
        qk = torch.view_as_real(turned).flatten(-2).to(x.dtype)
        return _Projected(qk[:, :, :-1], qk[:, :, -1], v)

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> None:
        """Add output projection and MLP to x [N, hidden] in place; attended [N, H D]."""
        x += product(attended, layer.o)
        x += layer.mlp(self._norm(x, layer.post_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.shape.rms_norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        return product(self._norm(x, self.weights.final_norm).float(), self.weights.head)
