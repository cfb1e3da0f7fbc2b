"""What the jobs of the pool share: layouts, a tiny policy on this rank, and one ragged global batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.config.loss import GppoLossConfig, KlConfig
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.data.aggregation import Aggregation
from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.losses.registry import build_loss
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.context import split_batch, whole_rows
from megatron_klear.parallel.topology import ParallelContext, parallel_context
from megatron_klear.protocols import PolicyLoss
from megatron_klear.training.learner import Learner, LearnerSettings
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.policy import Policy, build_policy
from megatron_klear.types import Prompt, Sample, TrainBatch

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """How a job's ranks share the work. The data-parallel size follows from the number of ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    cp: int = 1
    vpp: int = 1
    ends: tuple[int, int] | None = None
    """Layers of the first and of the last stage, where stages are uneven."""
    ep: int = 1
    """Taken from tp x cp x dp: it needs no ranks of its own."""
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    recompute: str = ""
    """Such as `full`, `full uniform 2`, `full block 1`, `selective core_attn`, `selective core_attn mlp`."""

    def __str__(self) -> str:
        parts = f"tp{self.tp}pp{self.pp}cp{self.cp}dp{self.dp}" if self.cp > 1 else f"tp{self.tp}pp{self.pp}dp{self.dp}"
        uneven = "" if self.ends is None else f" {self.ends[0]}..{self.ends[1]}"
        experts = f"ep{self.ep}{self.dispatcher}" if self.ep > 1 else ""
        again = f" {self.recompute}" if self.recompute else ""
        virtual = f"vpp{self.vpp}" if self.vpp > 1 else ""
        return f"{parts}{'sp' if self.sp else ''}{virtual}{experts}{uneven}{again}"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def config(self, *, sharded_optimizer: bool) -> ParallelConfig:
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=self.ends[0] if self.ends else None,
            num_layers_in_last_pipeline_stage=self.ends[1] if self.ends else None,
            context_parallel_size=self.cp,
            sequence_parallel=self.sp,
            expert_model_parallel_size=self.ep,
            moe_token_dispatcher_type=self.dispatcher,
            **_recompute(self.recompute),
            use_distributed_optimizer=sharded_optimizer,
            distributed_timeout_minutes=1,
        )


def _recompute(text: str) -> dict[str, Any]:
    match text.split():
        case []:
            return {}
        case ["full"]:
            return {"recompute_granularity": "full"}
        case ["full", method, layers]:
            return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(layers)}
        case ["selective", *modules]:
            return {"recompute_granularity": "selective", "recompute_modules": tuple(modules)}
        case _:
            raise ValueError(f"no such recompute: {text}")


ONE = Layout()
# Brings the log-probs of random weights near those of `ragged_samples`, so that ratios are of order one.
TEMPERATURE = 4.0


@dataclass(frozen=True)
class World:
    """A rank that has joined the others."""

    layout: Layout
    context: ParallelContext

    def policy(
        self,
        shape: Qwen3Shape,
        fill: Callable[[ModelStage], None] | None = None,
        *,
        optimizer: OptimizerConfig,
        dtype: str = "float32",
        sharded_optimizer: bool = True,
    ) -> Policy:
        """A policy with random weights, the same in every layout, or with what `fill` sets."""
        settings = self.settings(optimizer, dtype=dtype, sharded_optimizer=sharded_optimizer)
        return build_policy(shape, fill or random_fill(shape), self.context, settings, HeadSettings(TEMPERATURE))

    def settings(
        self, optimizer: OptimizerConfig, *, dtype: str = "float32", sharded_optimizer: bool = True
    ) -> LearnerSettings:
        return LearnerSettings(self.layout.config(sharded_optimizer=sharded_optimizer), optimizer, dtype)

    def batch(
        self,
        samples: Sequence[Sample],
        max_tokens: int,
        *,
        sft_loss_coef: float = 0.1,
        aggregation: Aggregation = Aggregation(),  # noqa: B008  frozen
    ) -> TrainBatch:
        """This rank's part; old log-probs are the samples' rollout log-probs, so that ratios differ from 1."""
        spec = PackSpec(
            self.layout.dp,
            max_tokens,
            self.layout.tp if self.layout.sp else 1,
            context_parallel_size=self.layout.cp,
            num_micro_batches_multiple=self.layout.pp if self.layout.vpp > 1 else 1,
        )
        batches = pack(samples, spec, sft_loss_coef=sft_loss_coef, aggregation=aggregation)
        batch = split_batch(batches[self.context.topology.data_rank], self.context)
        for micro_batch in batch.micro_batches:
            micro_batch.old_logprobs = micro_batch.rollout_logprobs
        return batch


@contextmanager
def world(layout: Layout) -> Iterator[World]:
    with parallel_context(layout.config(sharded_optimizer=True)) as context:
        yield World(layout, context)


def random_fill(shape: Qwen3Shape, seed: int = 0) -> Callable[[ModelStage], None]:
    tensors = random_tensors(shape, seed)
    return lambda stage: import_weights(stage, qwen3_table(shape), lambda name: tensors[name])


def gppo() -> PolicyLoss:
    return build_loss(GppoLossConfig(type="gppo"), KlConfig())


def ragged_samples(vocab_size: int = 61) -> list[Sample]:
    """Seven samples, 6 to 42 tokens long: one without advantage, one without loss, three that are right (SFT term)."""
    numbers = random.Random(0)
    lengths = (6, 42, 11, 24, 17, 9, 31)
    samples = []
    for i, length in enumerate(lengths):
        tokens = [numbers.randrange(vocab_size) for _ in range(length)]
        sample = Sample(f"s{i}", Prompt(f"p{i}", tuple(tokens[:3])))
        # Near the log-probs of an untrained model; far enough off that both clips are reached.
        logprobs = [numbers.uniform(-4.8, -3.6) for _ in tokens[3:]]
        sample.append_response(tokens[3:], logprobs, weight_version=0, stop_reason="stop")
        sample.reward = 1.0 if i in (0, 1, 6) else -1.0
        sample.advantage = numbers.uniform(-1.5, 1.5)
        samples.append(sample)
    samples[2].advantage = 0.0
    samples[4].loss_mask = [0] * len(samples[4].token_ids)
    return samples


def tiny(tied: bool) -> Qwen3Shape:
    return tiny_shape(tied)


def exported(policy: Policy) -> Arrays:
    """Full weights under Hugging Face names on rank 0, empty elsewhere. Bit-exact: bfloat16 as float32."""
    return {name: to_array(tensor) for name, tensor in policy.export_weights()}


def to_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def gradients(policy: Policy) -> Arrays:
    """Full gradients under Hugging Face names on rank 0. Needs an unsharded optimizer."""
    parameters = policy.stage.parameters()
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        found = exported(policy)
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


def by_sample(learner: Learner, batch: TrainBatch, rows: Sequence[Tensor], samples: Sequence[Sample]) -> Arrays:
    return rows_by_sample(learner.context, batch, rows, samples)


def rows_by_sample(
    context: ParallelContext, batch: TrainBatch, rows: Sequence[Tensor], samples: Sequence[Sample]
) -> Arrays:
    """Rows of per-token numbers cut into samples; on one last-stage rank a replica, else empty."""
    if not context.topology.is_last_stage or context.topology.tensor_rank != 0:
        return {}
    found = {}
    for micro_batch, row in zip(batch.micro_batches, rows, strict=True):
        whole = whole_rows(row, micro_batch, context)
        starts = micro_batch.cu_seqlens.tolist()[:-1]
        for index, begin in zip(micro_batch.sample_index.tolist(), starts, strict=True):
            if index >= 0:
                length = len(samples[index].token_ids)
                found[samples[index].sample_id] = to_array(whole[begin : begin + length])
    return found
