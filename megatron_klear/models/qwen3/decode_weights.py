"""Weights of a Qwen3 for generation: checked, copied, and laid out so that a step takes few products.

Rows of q, k and v share one product, so do those of gate and up. Two orders differ from Hugging Face's, and neither
changes a score: heads stand group by group, a group's queries before its key, so that queries are a view of the
product; and within a head the two halves that rotary positions mix are interleaved, so that turning is one
multiplication of complex numbers.

Letters: N positions (of any rows), H query heads, G key/value groups, Q = H / G, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import WeightSyncError
from megatron_klear_kernels.linear.autograd import product
from megatron_klear_kernels.swiglu.autograd import swiglu


def unweighted_rms_norm(x: Tensor, eps: float) -> Tensor:
    """x [..., D] over the root of its mean square: float32 inside, one rounding, as transformers computes it."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.size(-1),), eps=eps)
    y = x.float()
    return (y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP, or one expert. gate_up [2 F, hidden], down [hidden, F]."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """[N, hidden]; `scale` [N, 1] weighs the activations, as Megatron does it."""
        inner = swiglu(product(x, self.gate_up))
        return product(inner if scale is None else (inner * scale).to(x.dtype), self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which each position takes a few. Routing is models/qwen3/moe.py's, in float32."""

    router: Tensor
    experts: list[Mlp]
    num_per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[N, hidden]."""
        probs, chosen = F.linear(x.float(), self.router.float()).softmax(-1).topk(self.num_per_token)
        if self.normalize:
            probs = probs / probs.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            at, place = torch.where(chosen == number)
            out.index_add_(0, at, self.experts[number](x[at], probs[at, place, None]))
        return out


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer: qkv [G (Q + 1) D + G D, hidden], qk_norm [G, Q + 1, D], o [hidden, H D]."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    o: Tensor
    post_norm: Tensor
    mlp: Mlp | Experts


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. The head is in float32: bf16 logits would put log-probs off by whole percents."""

    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: Tensor


def take_weights(shape: Qwen3Shape, named_tensors: Iterable[tuple[str, Tensor]]) -> Weights:
    """Copies of all tensors. Raises `WeightSyncError` unless exactly the expected ones come."""
    tensors = _collect(shape, named_tensors)
    embedding = tensors["model.embed_tokens.weight"]
    return Weights(
        embedding=embedding,
        layers=[_layer(shape, tensors, i) for i in range(shape.num_hidden_layers)],
        final_norm=tensors["model.norm.weight"],
        head=tensors.get("lm_head.weight", embedding).float(),
    )


def _collect(shape: Qwen3Shape, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
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


def _layer(shape: Qwen3Shape, tensors: dict[str, Tensor], index: int) -> Layer:
    def weight(name: str) -> Tensor:
        return tensors[f"model.layers.{index}.{name}.weight"]

    def mlp(name: str) -> Mlp:
        return Mlp(torch.cat([weight(f"{name}.{p}_proj") for p in ("gate", "up")]), weight(f"{name}.down_proj"))

    def experts() -> Experts:
        each = [mlp(f"mlp.experts.{i}") for i in range(shape.num_experts)]
        return Experts(weight("mlp.gate"), each, shape.num_experts_per_tok, shape.norm_topk_prob)

    qk = _by_group(shape, weight("self_attn.q_proj"), weight("self_attn.k_proj"))
    q_norm = weight("self_attn.q_norm").repeat(shape.num_attention_heads)[:, None]
    k_norm = weight("self_attn.k_norm").repeat(shape.num_key_value_heads)[:, None]
    return Layer(
        input_norm=weight("input_layernorm"),
        qkv=torch.cat([qk.flatten(0, 2), weight("self_attn.v_proj")]),
        qk_norm=_by_group(shape, q_norm, k_norm)[..., 0],
        o=weight("self_attn.o_proj"),
        post_norm=weight("post_attention_layernorm"),
        mlp=experts() if shape.moe_layers[index] else mlp("mlp"),
    )


def _by_group(shape: Qwen3Shape, q: Tensor, k: Tensor) -> Tensor:
    """q [H D, n] and k [G D, n] as [G, Q + 1, D, n], the halves of D interleaved."""
    heads = [part.view(shape.num_key_value_heads, -1, 2, shape.head_dim // 2, part.size(1)) for part in (q, k)]
    return torch.cat(heads, dim=1).transpose(2, 3).flatten(2, 3)
