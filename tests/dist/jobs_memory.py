"""Jobs on memory: gradients with and without recompute, updates with and without an offloaded optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dist.world import (
    TEMPERATURE,
    Arrays,
    Layout,
    World,
    by_sample,
    exported,
    gppo,
    gradients,
    ragged_samples,
    random_fill,
    tiny,
    world,
)
from helpers.tiny_qwen3 import tiny_moe_shape
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.models.build import DTYPES, ModelStage, build_stage
from megatron_klear.models.qwen3 import attention
from megatron_klear.models.qwen3.attention import packed_sequences
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.training.learner import build_trainable
from megatron_klear.training.offload import Offload
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.policy import Policy
from megatron_klear.types import MicroBatch, Prompt, Sample

STILL = OptimizerConfig(lr=0.0, clip_grad=0.0)
BUDGET = 80


def recomputed(
    rank: int, world_size: int, layout: Layout, settings: Sequence[str], dtype: str, max_dense_length: int, moe: bool
) -> list[tuple[Arrays, Arrays]]:
    """Gradients and log-probs of an update under each of these recompute settings.

    Attention takes a micro-batch with a longer sequence than `max_dense_length` one by one.
    """
    attention.MAX_DENSE_LENGTH = attention.MAX_NATIVE_LENGTH = max_dense_length
    shape = tiny_moe_shape() if moe else tiny(True).model_copy(update={"num_hidden_layers": 8})
    found = []
    with world(layout) as here:
        for recompute in settings:
            one = World(replace(layout, recompute=recompute), here.context)
            policy = one.policy(shape, optimizer=STILL, dtype=dtype, sharded_optimizer=False)
            batch, samples = one.batch(ragged_samples(), BUDGET), ragged_samples()
            outcome = policy.update(batch, gppo())
            found.append((gradients(policy), by_sample(policy, batch, outcome.logprobs, samples)))
    return found


@dataclass
class TwoPlaces:
    """A host and a device in one memory: what moves is spoilt where it was, so a use of what was left behind shows."""

    moved: int = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.moved += 1
        copy = tensor.clone()
        tensor.fill_(torch.nan)
        return copy


def offloaded(
    rank: int, world_size: int, layout: Layout, dtype: str, sharded_optimizer: bool, lr: float
) -> tuple[list[Arrays], list[Arrays], list[int]]:
    """Weights at the start and after each of two updates: without offload, with it, and how many tensors it moved."""
    with world(layout) as here:
        settings = here.settings(OptimizerConfig(lr=lr), dtype=dtype, sharded_optimizer=sharded_optimizer)
        weights, moved = [], []
        for offload in (False, True):
            trainable = build_trainable(tiny(False), random_fill(tiny(False)), here.context, settings)
            place = TwoPlaces()
            if offload:
                trainable = replace(trainable, offload=Offload(place, place, lambda: None))
                assert trainable.offload is not None
                trainable.offload.park(trainable.optimizer, trainable.stage.parameters())
                moved.append(place.moved)
            policy = Policy(trainable, here.context, settings, head=HeadSettings(TEMPERATURE))
            seen = [exported(policy)]
            for _ in range(2):
                policy.update(here.batch(ragged_samples(), BUDGET), gppo())
                seen.append(exported(policy))
                moved += [place.moved] if offload else []
            weights.append(seen)
        return weights[0], weights[1], moved


def warned(rank: int, world_size: int, layout: Layout) -> list[str]:
    """What is said when an optimizer is to be offloaded where there is no GPU."""
    with world(layout) as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = here.policy(tiny(False), optimizer=OptimizerConfig(lr=0.0, optimizer_cpu_offload=True))
        assert policy.trainable.offload is None
        return [str(warning.message) for warning in caught if "offload" in str(warning.message)]


def saved_bytes(
    rank: int,
    world_size: int,
    layout: Layout,
    shape: Qwen3Shape,
    settings: Sequence[str],
    lengths: Sequence[int],
    dtype: str,
) -> list[int]:
    """Bytes that a forward pass of this rank's stage keeps for the backward, under each of these recompute settings.

    Weights are left out, and what all layers share and would be there anyway (indices, mask, cos and sin).
    """
    found = []
    with world(layout) as here:
        for recompute in settings:
            config = replace(layout, recompute=recompute).config(sharded_optimizer=False)
            with megatron_scope(here.context.device):
                topology = here.context.topology
                stage = build_stage(shape, config, topology, dtype=DTYPES[dtype], on_cpu=True)
                for parameter in stage.parameters():
                    torch.nn.init.normal_(parameter, std=0.1)
                found.append(_saved_by(stage, _batch_of(here, lengths)))
    return found


def _batch_of(here: World, lengths: Sequence[int]) -> MicroBatch:
    """One micro-batch of such sequences, or this rank's part of it."""
    samples = []
    for i, length in enumerate(lengths):
        sample = Sample(f"s{i}", Prompt(f"p{i}", (1,)))
        sample.append_response([2] * (length - 1), [0.0] * (length - 1), weight_version=0, stop_reason="stop")
        sample.advantage = 1.0
        samples.append(sample)
    # The planner would make several for a virtual pipeline.
    (micro_batch,) = World(replace(here.layout, vpp=1), here.context).batch(samples, 2 * sum(lengths)).micro_batches
    return micro_batch


def _saved_by(stage: ModelStage, micro_batch: MicroBatch) -> int:
    sequences = packed_sequences(
        micro_batch,
        stage.topology,
        head_dim=stage.shape.head_dim,
        rope=stage.shape.rope,
        dtype=stage.core.config.params_dtype,
    )
    shared = [value for value in vars(sequences).values() if isinstance(value, Tensor)]
    left_out = {_storage(tensor) for tensor in (*stage.parameters(), *shared)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and _storage(tensor) not in left_out:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    rows = micro_batch.token_ids.numel() // (stage.topology.tensor_size if stage.core.config.sequence_parallel else 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for chunk in stage.chunks:
            if not chunk.core.pre_process:
                received = torch.randn(
                    rows, 1, stage.shape.hidden_size, dtype=stage.core.config.params_dtype, requires_grad=True
                )
                chunk.core.set_input_tensor(received)
            chunk.module(micro_batch.token_ids[None], None, None, packed_seq_params=sequences)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _storage(tensor: Tensor) -> int:
    """Not its address: that of a freed one is used again."""
    return tensor.untyped_storage()._cdata
