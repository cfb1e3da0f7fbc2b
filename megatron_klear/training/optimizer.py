"""Data-parallel wrapping and Megatron's optimizer, with what they need on a machine without Apex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_klear.checkpoint.optimizer_state import optimizer_parts
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.models.build import ModelStage
from megatron_klear.parallel.scale import assert_sum_contract


class _DataParallel(DistributedDataParallel):
    """Megatron's DDP without an all-gather among one rank, which slows the next steps of a CPU run by a third."""

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None:
        # Parameters are spread over replicas and context ranks, those of experts over the ranks that hold the same.
        if max(self.intra_dp_cp_group.size(), self.intra_expt_dp_group.size()) > 1:
            super().start_param_sync(*args, **kwargs)


class _TorchAdamDistributedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer made right for torch's AdamW, which keeps a `step` tensor per parameter.

    Apex and Transformer Engine keep one number instead, and Megatron's load was written for them: it looks for `step`
    among the checkpointed tensors (KeyError), and gives ONE step tensor to all parameters, to which AdamW then adds 1
    once per parameter. Present in 0.16.1 and 0.19.2.
    """

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        super()._set_main_param_and_optimizer_states(model_param, {"step": state["step"], **tensors})

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer.state:
            return super().state_dict()
        # The part for experts on a pipeline stage without any: Megatron asks its parameters for their step.
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {"optimizer": {"param_groups": [group | {"step": 0.0} for group in groups]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


def wrap_data_parallel(stage: ModelStage, *, use_distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """DDP over each chunk, gradients summed in float32. Call inside `megatron_scope`, after the weights were filled."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    wrapped = [_DataParallel(stage.core.config, ddp_config, chunk.module) for chunk in stage.chunks]
    for ddp in wrapped:
        gradient_buffers: Any = ddp.buffers  # Megatron's DDP gives this name of torch.nn.Module another meaning
        # Experts have buffers of their own, summed over the ranks that hold the same ones.
        for buffer in (*gradient_buffers, *ddp.expert_parallel_buffers):
            assert_sum_contract(
                calculate_per_token_loss=stage.core.config.calculate_per_token_loss,
                gradient_scaling_factor=buffer.gradient_scaling_factor,
            )
    return list(wrapped)


def build_optimizer(
    ddps: Sequence[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    dtype: torch.dtype,
    use_distributed_optimizer: bool,
) -> MegatronOptimizer:
    """AdamW over the wrapped stage; float32 main weights are taken from the model now. Call inside `megatron_scope`."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=use_distributed_optimizer,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        ),
        list(ddps),
    )
    for group in optimizer.param_groups:
        # Megatron leaves this to its own scheduler; without it norm weights, whose factor is 0, would decay too.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    for part in optimizer_parts(optimizer):
        # Only torch's own AdamW needs the correction and knows the fused flag; Apex and TE come with their own classes.
        if type(part) is DistributedOptimizer and isinstance(part.optimizer, torch.optim.AdamW):
            part.__class__ = _TorchAdamDistributedOptimizer
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
