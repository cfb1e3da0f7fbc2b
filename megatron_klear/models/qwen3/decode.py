"""Qwen3 for generation: a plain torch forward with a key/value cache, free of Megatron.

Rows of the cache are slots: a slot holds one running sequence, `lengths` says how many positions of it are filled.
Rows advance independently, so a finished one can be replaced while the others go on.

Shape letters: R rows, P prompt positions, H query heads, G key/value groups, D head_dim, C cache positions, V tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import WeightSyncError
from megatron_klear.models.qwen3.rope import rope_table


@dataclass(frozen=True, slots=True)
class _Mlp:
    """A dense MLP, or one expert. gate_up [2 F, hidden], down [hidden, F]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """[..., hidden]; `scale` [..., 1] weighs the activations, as Megatron does it."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        return F.linear(inner if scale is None else (inner * scale).to(x.dtype), self.down)


@dataclass(frozen=True, slots=True)
class _Experts:
    """MLPs of which each position takes a few. Routing is models/qwen3/moe.py's, in float32."""

    router: Tensor
    experts: list[_Mlp]
    num_per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[..., hidden]."""
        rows = x.reshape(-1, x.size(-1))
        probs, chosen = F.linear(rows.float(), self.router.float()).softmax(-1).topk(self.num_per_token)
        if self.normalize:
            probs = probs / probs.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            at, place = torch.where(chosen == number)
            out.index_add_(0, at, self.experts[number](rows[at], probs[at, place, None]))
        return out.view_as(x)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, projections that share an input fused into one product."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    mlp: _Mlp | _Experts


def _collect(shape: Qwen3Shape, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy the tensors after checking that exactly the expected ones came."""
    expected = shape.tensor_shapes()
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name not in expected:
            raise WeightSyncError(
                f"unknown weight {name}; a Qwen3 of this shape has {len(expected)} weights, not this one"
            )
        if tuple(tensor.shape) != expected[name]:
            raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}")
        tensors[name] = tensor.detach().clone()
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise WeightSyncError(f"{len(missing)} of {len(expected)} weights did not come, first of them {missing[0]}")
    return tensors


class Qwen3Decoder:
    """Weights and cache of a running generation."""

    def __init__(self, shape: Qwen3Shape, named_tensors: Iterable[tuple[str, Tensor]], *, num_slots: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        tensors = _collect(shape, named_tensors)
        self.embedding = tensors["model.embed_tokens.weight"]
        # Log-probs are promised in float32: bf16 logits would be off by whole percents.
        self.head = tensors.get("lm_head.weight", self.embedding).float()
        self.final_norm = tensors["model.norm.weight"]
        self.layers = [_layer(shape, tensors, i) for i in range(shape.num_hidden_layers)]
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=self.embedding.device)
        self._cache = self._new_cache(0)
        self._cos, self._sin = self._rotary_table(0)

    def _new_cache(self, capacity: int) -> Tensor:
        """[layers, 2 (key, value), slots, G, C, D]."""
        s = self.shape
        size = (s.num_hidden_layers, 2, self.num_slots, s.num_key_value_heads, capacity, s.head_dim)
        return self.embedding.new_zeros(size)

    def _rotary_table(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin [C, D/2]."""
        positions = torch.arange(capacity, device=self.embedding.device)
        return rope_table(positions, self.shape.rope, self.shape.head_dim, self.embedding.dtype)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions in every slot; what is cached stays."""
        old = self._cache.size(4)
        if capacity > old:
            grown = self._new_cache(capacity)
            grown[..., :old, :] = self._cache
            self._cache = grown
            self._cos, self._sin = self._rotary_table(capacity)

    @torch.inference_mode()
    def prefill(self, slots: Tensor, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Start sequences in `slots` [R] from right-padded prompts [R, P]; next-token logits [R, V] float32."""
        rows, width = token_ids.shape
        mask = token_ids.new_full((width, width), 1).tril_().bool()[None, None]
        positions = torch.arange(width, device=token_ids.device)
        x = self.embedding[token_ids]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, positions)
            self._cache[i, 0, slots, :, :width] = k
            self._cache[i, 1, slots, :, :width] = v
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = self._finish(layer, x, out)
        self.lengths[slots] = lengths
        return self._logits(x[torch.arange(rows, device=x.device), lengths - 1])

    @torch.inference_mode()
    def step(self, slots: Tensor, token_ids: Tensor, longest: int) -> Tensor:
        """Append one token [R] to each of `slots` [R]; next-token logits [R, V] float32.

        `longest` is an upper bound of the lengths after this step, known on the host.
        """
        rows = slots.size(0)
        positions = self.lengths[slots]
        heads, groups, dim = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        hidden_keys = torch.arange(longest, device=slots.device) > positions[:, None]
        bias = torch.zeros(rows, 1, longest, device=slots.device, dtype=self.embedding.dtype)
        bias.masked_fill_(hidden_keys[:, None], -torch.inf)
        bias = bias.repeat_interleave(groups, 0)
        all_slots = rows == self.num_slots
        x = self.embedding[token_ids][:, None]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, positions[:, None])
            self._cache[i, 0, slots, :, positions] = k[:, :, 0]
            self._cache[i, 1, slots, :, positions] = v[:, :, 0]
            cached = self._cache[i, :, :, :, :longest]
            keys, values = cached if all_slots else cached[:, slots]
            # One key/value group serves heads/groups query heads: fold those into rows of one batched product.
            folded = q.reshape(rows * groups, heads // groups, dim)
            scores = torch.baddbmm(bias, folded, keys.flatten(0, 1).transpose(1, 2), alpha=dim**-0.5)
            out = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
            x = self._finish(layer, x, out.view(rows, heads, 1, dim))
        self.lengths[slots] = positions + 1
        return self._logits(x[:, 0])

    def _project(self, layer: _Layer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed, rotated q [R, H, P, D] and k, v [R, G, P, D] of x [R, P, hidden]."""
        s = self.shape
        heads, groups = s.num_attention_heads, s.num_key_value_heads
        qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv).unflatten(-1, (heads + 2 * groups, s.head_dim))
        q, k, v = qkv.transpose(1, 2).split([heads, groups, groups], dim=1)
        cos, sin = self._cos[positions], self._sin[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return (
            self._rotate(self._norm(q, layer.q_norm), cos, sin),
            self._rotate(self._norm(k, layer.k_norm), cos, sin),
            v,
        )

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP: x [R, P, hidden], attended [R, H, P, D]."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), layer.o)
        return x + layer.mlp(self._norm(x, layer.post_norm))

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, self.final_norm).float(), self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as transformers computes it: float32 inside, one rounding, then the weight."""
        y = x.float()
        inverse = y.square().mean(-1, keepdim=True).add_(self.shape.rms_norm_eps).rsqrt_()
        return (y * inverse).to(x.dtype) * weight

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _layer(shape: Qwen3Shape, tensors: dict[str, Tensor], index: int) -> _Layer:
    def weight(name: str) -> Tensor:
        return tensors[f"model.layers.{index}.{name}.weight"]

    def mlp(name: str) -> _Mlp:
        return _Mlp(torch.cat([weight(f"{name}.{p}_proj") for p in ("gate", "up")]), weight(f"{name}.down_proj"))

    def experts() -> _Experts:
        each = [mlp(f"mlp.experts.{i}") for i in range(shape.num_experts)]
        return _Experts(weight("mlp.gate"), each, shape.num_experts_per_tok, shape.norm_topk_prob)

    return _Layer(
        input_norm=weight("input_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{p}_proj") for p in "qkv"]),
        q_norm=weight("self_attn.q_norm"),
        k_norm=weight("self_attn.k_norm"),
        o=weight("self_attn.o_proj"),
        post_norm=weight("post_attention_layernorm"),
        mlp=experts() if shape.moe_layers[index] else mlp("mlp"),
    )
