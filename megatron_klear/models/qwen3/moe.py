"""The experts of a Qwen3-MoE: Megatron's layer and dispatchers, one MLP after the other, our router.

Routing is transformers': softmax over all experts, the best `num_experts_per_tok` of it, divided by their sum where
norm_topk_prob says so (which is a softmax over the best logits alone, and is computed so). It is done in float32 in
bfloat16 models too, here and in the embedded engine: of two experts that are nearly as good, both must take the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.models.qwen3.linear import ColumnLinear, RowLinear
from megatron_klear.models.qwen3.swiglu import SwiGLU


def moe_settings(shape: Qwen3Shape, parallel: ParallelConfig) -> dict[str, Any]:
    """What Megatron's configuration says of experts; nothing for a dense model."""
    if not shape.is_moe:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        # A pattern makes checkpoints name layers one by one; layers that are all alike are stacked.
        "moe_layer_freq": 1 if all(shape.moe_layers) else [int(is_moe) for is_moe in shape.moe_layers],
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        # Set for each update by `scale.balance_loss_coefficient`.
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": parallel.moe_token_dispatcher_type,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        # No capacity: every token reaches every expert it chose, so that the layout decides nothing.
        "moe_expert_capacity_factor": None,
        "moe_permute_fusion": False,
    }


def moe_spec() -> ModuleSpec:
    """The MLP of a layer with experts."""
    # Megatron builds from classes and functions alike; its annotations name only some of them.
    router: Any = Router
    swiglu: Any = SwiGLU
    experts = ModuleSpec(
        module=SequentialMLP,
        submodules=MLPSubmodules(linear_fc1=ColumnLinear, activation_func=swiglu, linear_fc2=RowLinear),
    )
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=router))


class _Logits(torch.autograd.Function):
    """float32 logits that keep the input as it is for the backward, not a float32 copy of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grads[0]
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return (grad @ weight.float()).to(x.dtype), grad_weight.to(weight.dtype)


class Router(TopKRouter):
    """Megatron's router; its load-balancing loss is scaled as parallel/scale.py says, and remembered for a metric."""

    def __init__(self, **megatron: Any) -> None:
        super().__init__(**megatron)
        # Megatron would multiply the loss by this rank's tokens, to undo a division that is never made here.
        self.calculate_per_token_loss = False
        self.balance_losses: list[Tensor] = []

    def gating(self, input: Tensor) -> Tensor:
        """Logits [T, 1, num_experts] float32. Megatron 0.16's own needs Transformer Engine."""
        return _Logits.apply(input, self.weight)

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Keep the loss without its coefficient: this tensor- and context-parallel rank's part of a micro-batch's."""
        self.balance_losses.append(aux_loss.detach() / aux_loss_coeff)
        return super().attach_and_log_load_balancing_loss(activation, aux_loss_coeff, aux_loss, *args, **kwargs)


def mark_experts(module: torch.nn.Module) -> None:
    """Let the ranks that hold the same experts sum their gradients, however many expert-parallel ranks there are.

    Megatron takes the experts of a model without expert parallelism for dense weights, which are summed over replicas.
    But tensor ranks hold whole experts too, and each sends them only its own part of the sequence.
    """
    for experts in module.modules():
        if isinstance(experts, SequentialMLP):
            for weight in experts.parameters():
                setattr(weight, "allreduce", False)  # noqa: B010  an attribute Megatron reads


def take_balance_losses(module: torch.nn.Module) -> Iterator[Tensor]:
    """Load-balancing losses of the layers on this rank since this was last asked, one a layer and micro-batch."""
    for router in module.modules():
        if isinstance(router, Router):
            yield from router.balance_losses
            router.balance_losses.clear()
