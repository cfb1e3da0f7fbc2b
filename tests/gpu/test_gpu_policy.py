"""What only a CUDA device can show. tools/gpu_check.sh runs these; everywhere else they are not selected."""

from __future__ import annotations

import pytest
import torch

from helpers.tiny_qwen3 import random_tensors, tiny_shape
from megatron_klear.config.loss import GppoLossConfig, KlConfig
from megatron_klear.config.recipe import OptimizerConfig, ParallelConfig
from megatron_klear.data.packing import PackSpec, flatten, pack, unflatten
from megatron_klear.losses.registry import build_loss
from megatron_klear.models.build import ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.topology import parallel_context
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import build_policy
from megatron_klear.types import GenerationRequest, Prompt, Sample
from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

pytestmark = pytest.mark.gpu


def test_logprobs_on_cuda_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator)
    weight = torch.randn(1001, 64, generator=generator)
    targets = torch.randint(0, 1001, (300,), generator=generator)
    settings = LinearSettings(Vocabulary(0, 1001))
    found = fused_linear_logprobs(hidden.cuda(), weight.cuda(), targets.cuda(), settings)
    logprobs, entropy = found.logprobs, found.entropy
    wanted = (hidden.double() @ weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(logprobs.cpu().double(), wanted.gather(1, targets[:, None])[:, 0], atol=1e-3, rtol=0)
    torch.testing.assert_close(entropy.cpu().double(), -(wanted.exp() * wanted).sum(-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_samples_and_updates_on_cuda(dtype: str) -> None:
    shape = tiny_shape(tied=True)
    tensors = random_tensors(shape, seed=0)

    def fill(stage: ModelStage) -> None:
        import_weights(stage, qwen3_table(shape), tensors.__getitem__)

    parallel = ParallelConfig()
    with parallel_context(parallel) as context:
        assert context.device.kind == "cuda"
        policy = build_policy(shape, fill, context, LearnerSettings(parallel, OptimizerConfig(lr=1e-3), dtype))
        engine = EmbeddedEngine(shape, max_running_requests=4)
        engine.load_weights(policy.export_weights(), 0)
        requests = [GenerationRequest(str(i), (1, 2, 3 + i), 8, seed=i) for i in range(8)]
        samples = []
        for i, completion in enumerate(engine.generate(requests)):
            sample = Sample(completion.request_id, Prompt(str(i), (1, 2, 3 + i)))
            sample.append_response(completion.token_ids, completion.logprobs, weight_version=0, stop_reason="length")
            sample.reward = sample.advantage = 1.0 if i % 2 else -1.0
            samples.append(sample)
        (batch,) = pack(samples, PackSpec(1, 128), sft_loss_coef=0.1)
        ints, floats = flatten(batch)
        batch = unflatten(ints.cuda(), floats.cuda())
        for micro_batch, stats in zip(batch.micro_batches, policy.stats(batch), strict=True):
            micro_batch.old_logprobs = stats.logprobs
            mask = micro_batch.token_scale != 0
            difference = (stats.logprobs - micro_batch.rollout_logprobs)[mask].abs().mean()
            assert float(difference) < (1e-3 if dtype == "float32" else 0.1)
        loss = build_loss(GppoLossConfig(type="gppo"), KlConfig())
        first, second = policy.update(batch, loss).report, policy.update(batch, loss).report
        assert first.metrics["train/ratio_deviation_max"] < 1e-3
        assert second.metrics["train/loss"] < first.metrics["train/loss"]
