"""What a rank holds of a model. The forward gives hidden states: the head is apart, so nothing ever holds [T, V]."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_klear.config.layers import layers_by_stage
from megatron_klear.config.model import Qwen3Shape, padded_vocab_size
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.models.qwen3.attention import packed_sequences
from megatron_klear.models.qwen3.moe import mark_experts
from megatron_klear.models.qwen3.spec import qwen3_block, qwen3_config, recomputes_norms
from megatron_klear.types import MicroBatch, Topology

VALUE_HEAD = "value_head.weight"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HiddenGPTModel(GPTModel):
    """A GPT stage whose last stage gives final-norm hidden states [T, 1, H] (or [T/tp, 1, H]) instead of logits."""

    def _postprocess(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """[V/tp, H] rows of the output layer on this rank; last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "an untied output layer holds its own weight"
        return weight


class ValueGPTModel(HiddenGPTModel):
    """One number a position. The head [1, H] is whole on every tensor-parallel rank of the last stage.

    Its input is too, so every rank computes the same gradient and none must be summed.
    """

    def __init__(self, **megatron: Any) -> None:
        super().__init__(**megatron)
        if self.post_process:
            weight = next(self.decoder.parameters())
            self.value_head = torch.nn.Linear(
                self.config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype
            )
            # Values of zero make the first advantages the returns themselves, whatever the trunk.
            torch.nn.init.zeros_(self.value_head.weight)

    def values(self, hidden: Tensor) -> Tensor:
        """Final hidden states [T, 1, H] (or [T/tp, 1, H]) -> values [T] float32."""
        if self.config.sequence_parallel:
            # Every rank uses all positions the same way: the backward takes its own part, and sums nothing.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return (hidden[:, 0].float() @ self.value_head.weight.float().t())[:, 0]


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Consecutive layers, with the embedding before them or the final norm and head behind them where they belong."""

    module: torch.nn.Module  # the HiddenGPTModel, inside Float16Module for bfloat16
    core: HiddenGPTModel
    layers: range
    """Global layer numbers."""


@dataclass(frozen=True, slots=True)
class ModelStage:
    """What one rank holds of a model: a chunk of it, or with virtual pipeline several."""

    chunks: tuple[ModelChunk, ...]
    shape: Qwen3Shape
    topology: Topology
    layers: tuple[tuple[range, ...], ...]
    """Global layer numbers of every chunk of every stage."""

    @property
    def core(self) -> HiddenGPTModel:
        """The last chunk, which on the last stage has the head; its config is that of all."""
        return self.chunks[-1].core

    @property
    def vocab_start(self) -> int:
        """Global id of this rank's first vocabulary row."""
        return self.topology.tensor_rank * (
            padded_vocab_size(self.shape.vocab_size, self.topology.tensor_size) // self.topology.tensor_size
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Megatron's names, but with global numbers of layers and experts: none is twice in a model but a tied head."""
        first_expert = self.topology.expert_rank * self.experts_per_rank
        for chunk in self.chunks:
            for name, parameter in chunk.core.named_parameters():
                name = _LAYER.sub(lambda found: f"{found[1]}{chunk.layers[int(found[2])]}.", name)  # noqa: B023
                yield _EXPERT.sub(lambda found: f"{found[1]}{first_expert + int(found[2])}.", name), parameter

    @property
    def experts_per_rank(self) -> int:
        """Experts of a layer that this rank holds; 0 for a dense model."""
        return self.shape.num_experts // self.topology.expert_size

    def parameters(self) -> list[torch.nn.Parameter]:
        """All of them."""
        return [parameter for chunk in self.chunks for parameter in chunk.core.parameters()]

    def stage_of(self, layer: int) -> int:
        """Pipeline rank that holds a layer."""
        return next(rank for rank, chunks in enumerate(self.layers) if any(layer in chunk for chunk in chunks))

    def forward_hidden(self, module: torch.nn.Module, micro_batch: MicroBatch) -> Tensor:
        """Run `module` (a chunk of this stage, possibly wrapped for training) on a packed micro-batch."""
        sequences = packed_sequences(
            micro_batch,
            self.topology,
            head_dim=self.shape.head_dim,
            rope=self.shape.rope,
            dtype=self.core.config.params_dtype,
        )
        # Megatron's wrapper for bfloat16 would hand out a float32 copy, which the head has no use for.
        as_it_is = {"fp32_output": False} if self.core.config.params_dtype == torch.bfloat16 else {}
        return module(micro_batch.token_ids[None], None, None, packed_seq_params=sequences, **as_it_is)


_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(\.local_experts\.)(\d+)\.")


def build_stage(
    shape: Qwen3Shape,
    parallel: ParallelConfig,
    topology: Topology,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
    value_head: bool = False,
) -> ModelStage:
    """This rank's stage, weights uninitialised (a value head is zero). Call inside `megatron_scope`."""
    config = qwen3_config(shape, parallel, dtype=dtype, on_cpu=on_cpu)
    layers = layers_by_stage(shape.num_hidden_layers, parallel)
    own = layers[topology.pipeline_rank]
    chunks = []
    for number, expected in enumerate(own):
        virtual = number if len(own) > 1 else None
        # TransformerBlock takes block submodules too, which carry our final norm; GPTModel's annotation is narrower.
        block: Any = qwen3_block(shape, expected, recompute_norms=recomputes_norms(parallel))
        model = ValueGPTModel if value_head else HiddenGPTModel
        core = model(
            config=config,
            transformer_layer_spec=block,
            vocab_size=padded_vocab_size(shape.vocab_size, topology.tensor_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=topology.is_first_stage and number == 0,
            post_process=topology.is_last_stage and number == len(own) - 1,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            # Rotary positions are applied inside PackedAttention.
            position_embedding_type="none",
            vp_stage=virtual,
        )
        # Megatron counts from 1.
        built: Any = core.decoder.layers
        found = [layer.layer_number - 1 for layer in built]
        assert found == list(expected), f"Megatron put layers {found} where {list(expected)} were expected"
        _mark_tensor_parallel(core)
        mark_experts(core)
        chunks.append(ModelChunk(_as_module(core, config, dtype, on_cpu=on_cpu), core, expected))
    return ModelStage(tuple(chunks), shape, topology, layers)


def _as_module(core: HiddenGPTModel, config: TransformerConfig, dtype: torch.dtype, *, on_cpu: bool) -> torch.nn.Module:
    module: torch.nn.Module = core
    if dtype == torch.bfloat16:
        module = Float16Module(config, core)
    if not on_cpu:
        module.cuda()
    return module


def _mark_tensor_parallel(core: HiddenGPTModel) -> None:
    """Mark sharded weights as such. Megatron 0.16 does it while initialising them, which import makes needless.

    Unmarked, the gradient norm would count the shards of tensor rank 0 only, and clipping would depend on the layout.
    """
    for module in core.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            _mark(module.weight, dim=0)
        elif isinstance(module, RowParallelLinear):
            _mark(module.weight, dim=1)


def _mark(weight: Tensor, *, dim: int) -> None:
    # 0.19 marks them whether they are initialised or not, and refuses to do it twice.
    if "tensor_model_parallel" not in vars(weight):
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
