"""The Qwen3 layer as a Megatron spec: Megatron's linear layers, our norm and packed attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.models.qwen3.attention import PackedAttention
from megatron_klear.models.qwen3.linear import ColumnLinear, RowLinear
from megatron_klear.models.qwen3.moe import moe_settings, moe_spec
from megatron_klear.models.qwen3.norm import RMSNorm
from megatron_klear.models.qwen3.renorm import LinearAfterNorm, RecomputableNorm
from megatron_klear.models.qwen3.swiglu import SwiGLU

# What of a layer can be computed again by our own modules; the rest is Megatron's to do.
_OWN_RECOMPUTE = "layernorm"


class ThriftySelfAttention(SelfAttention):
    """Values of their own memory: as a part of the QKV projection's output they would keep all of it."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        made: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value = made
        return query, key, value.contiguous()


def qwen3_config(shape: Qwen3Shape, parallel: ParallelConfig, *, dtype: torch.dtype, on_cpu: bool) -> TransformerConfig:
    """Megatron's configuration of a Qwen3. Weights are filled by import, so none are initialised here."""
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=_last_stage(parallel),
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **_recompute(parallel),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Gloo matches messages between two ranks in the order they were posted, so that batched ones of two virtual
        # stages would be taken for each other: wrong losses, no error.
        batch_p2p_comm=not on_cpu,
        # The scaling contract of parallel/scale.py.
        calculate_per_token_loss=True,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        # Fusions that need Apex or CUDA kernels.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        # Which is ours: the name says where Megatron looks for a module instead of a function.
        use_te_activation_func=True,
        apply_rope_fusion=False,
        **moe_settings(shape, parallel),
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def recomputes_norms(parallel: ParallelConfig) -> bool:
    """Whether norms are computed again in the backward: see `qwen3_block`."""
    return parallel.recompute_granularity == "selective" and _OWN_RECOMPUTE in parallel.recompute_modules


def _last_stage(parallel: ParallelConfig) -> int | None:
    """Of two stages Megatron wants one size at most: with both it divides by the number of stages between them."""
    both = parallel.num_layers_in_first_pipeline_stage is not None and parallel.pipeline_model_parallel_size == 2
    return None if both else parallel.num_layers_in_last_pipeline_stage


def _recompute(parallel: ParallelConfig) -> dict[str, Any]:
    """What is computed again in the backward, in Megatron's words: it refuses settings that would have no effect."""
    settings: dict[str, Any] = {"recompute_granularity": parallel.recompute_granularity}
    if parallel.recompute_granularity == "full":
        settings |= {
            "recompute_method": parallel.recompute_method,
            "recompute_num_layers": parallel.recompute_num_layers,
        }
    if parallel.recompute_granularity == "selective":
        settings["recompute_modules"] = [name for name in parallel.recompute_modules if name != _OWN_RECOMPUTE]
    return settings


def qwen3_block(shape: Qwen3Shape, layers: range, *, recompute_norms: bool) -> TransformerBlockSubmodules:
    """These layers, and the final norm."""
    norm: Any = RMSNorm
    specs = [_layer(is_moe=shape.moe_layers[i], recompute_norms=recompute_norms) for i in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _layer(*, is_moe: bool, recompute_norms: bool) -> ModuleSpec:
    # Megatron builds from classes and functions alike; its annotations name only some of them.
    norm: Any = RMSNorm
    layer_norm: Any = RecomputableNorm if recompute_norms else RMSNorm
    linear: Any = LinearAfterNorm if recompute_norms else ColumnLinear
    attention: Any = PackedAttention
    dropout_add: Any = get_bias_dropout_add
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=layer_norm,
            self_attention=ModuleSpec(
                module=ThriftySelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=linear,
                    core_attention=attention,
                    linear_proj=RowLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=dropout_add,
            # The router and every expert read what this norm gives, so that with experts it is kept.
            pre_mlp_layernorm=norm if is_moe else layer_norm,
            mlp=moe_spec() if is_moe else _mlp(linear),
            mlp_bda=dropout_add,
        ),
    )


def _mlp(linear: Any) -> ModuleSpec:
    swiglu: Any = SwiGLU
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=linear, activation_func=swiglu, linear_fc2=RowLinear),
    )
