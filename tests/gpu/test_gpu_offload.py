"""An optimizer whose state waits in host memory, on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.checkpoint.optimizer_state import optimizer_parts
from megatron_klear.config.loss import GppoLossConfig, KlConfig
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.data.packing import PackSpec, flatten, pack, unflatten
from megatron_klear.losses.registry import build_loss
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.topology import parallel_context
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import Policy, build_policy
from megatron_klear.types import Prompt, Sample, TrainBatch

pytestmark = pytest.mark.gpu


def batch() -> TrainBatch:
    samples = []
    for i in range(4):
        sample = Sample(str(i), Prompt(str(i), (1, 2)))
        sample.append_response([3 + i, 5, 7, 9], [-4.0] * 4, weight_version=0, stop_reason="stop")
        sample.reward = sample.advantage = 1.0 if i % 2 else -1.0
        samples.append(sample)
    (made,) = pack(samples, PackSpec(1, 128))
    ints, floats = flatten(made)
    made = unflatten(ints.cuda(), floats.cuda())
    for micro_batch in made.micro_batches:
        micro_batch.old_logprobs = micro_batch.rollout_logprobs
    return made


def own_state(policy: Policy) -> Iterator[Tensor]:
    """Main weights (where they are not the model's) and moments."""
    model = {parameter.untyped_storage().data_ptr() for parameter in policy.stage.parameters()}
    for part in optimizer_parts(policy.optimizer):
        for group in part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in model)
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_waits_on_the_host_and_updates_are_the_same(dtype: str, sharded: bool) -> None:
    shape = tiny_shape(tied=True)
    tensors = random_tensors(shape, seed=0)

    def fill(stage: ModelStage) -> None:
        import_weights(stage, qwen3_table(shape), tensors.__getitem__)

    parallel, weights = ParallelConfig(use_distributed_optimizer=sharded), []
    with parallel_context(parallel) as context:
        for offload in (False, True):
            optimizer = OptimizerConfig(lr=1e-2, optimizer_cpu_offload=offload)
            policy = build_policy(shape, fill, context, LearnerSettings(parallel, optimizer, dtype))
            for _ in range(3):
                policy.update(batch(), build_loss(GppoLossConfig(type="gppo"), KlConfig()))
                assert {tensor.device.type for tensor in own_state(policy)} == {"cpu" if offload else "cuda"}
            assert {parameter.device.type for parameter in policy.stage.parameters()} == {"cuda"}
            weights.append({name: tensor.cpu() for name, tensor in policy.export_weights()})
    for name, plain in weights[0].items():
        assert torch.equal(plain, weights[1][name]), name
