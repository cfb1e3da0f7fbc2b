"""Seconds of arithmetic of one micro-batch on one rank of a stage, by a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_klear.config.model import padded_vocab_size
from megatron_klear.launch.activations import Widths
from megatron_klear.launch.hardware import EFFICIENCIES
from megatron_klear.launch.job import Job
from megatron_klear.launch.parameters import LayerParameters
from megatron_klear.launch.traffic import again_fraction

# Norms, rotations, silu and residuals are separate kernels: each saved tensor is written once and read by a few of
# them, and their intermediate results come and go. Bytes moved a byte saved, forward and backward.
ELEMENTWISE_FORWARD = 3.0
ELEMENTWISE_BACKWARD = 5.0


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one micro-batch, by kind of work."""

    matmul: float
    attention: float
    elementwise: float
    head: float

    @property
    def total(self) -> float:
        """All of it, one after the other."""
        return self.matmul + self.attention + self.elementwise + self.head


def active_parameters(job: Job, layer: LayerParameters) -> float:
    """Parameters of a layer that one token is multiplied with, over all ranks."""
    chosen = job.shape.num_experts_per_tok / job.shape.num_experts if job.shape.num_experts else 0.0
    return layer.split + layer.router + layer.experts * chosen


def trained_share(job: Job) -> float:
    """Share of the positions that go through the output layer: those of responses."""
    return job.work.mean_response / job.work.mean_sample


def flops_per_token(job: Job) -> float:
    """Forward and backward of the model itself: 6 a parameter, and 6 L Q a layer for attention among L tokens."""
    matmul = sum(active_parameters(job, layer) for layer in job.model.layers)
    head = trained_share(job) * job.shape.vocab_size * job.shape.hidden_size
    query = job.shape.num_attention_heads * job.shape.head_dim
    return 6 * (matmul + head + len(job.model.layers) * query * job.work.mean_attended)


def _matmul_rate(job: Job) -> float:
    """FLOPs a second of the linear layers."""
    if job.dtype == "bfloat16":
        return job.gpu.bf16_flops * EFFICIENCIES.matmul
    return job.gpu.float32_flops * EFFICIENCIES.float32


def forward_seconds(job: Job, stage: int) -> PassSeconds:
    """Forward of one micro-batch."""
    layers, tensor = [job.model.layers[i] for i in job.layout.stages[stage]], job.layout.tensor
    matmul = 2 * sum(active_parameters(job, layer) for layer in layers) / tensor * job.tokens
    # Causal: two products, each of L^2 / 2 pairs.
    attended = 2 * Widths.of(job.shape, tensor).query * job.work.mean_attended * job.tokens * len(layers)
    plain = job.parallel.model_copy(update={"recompute_granularity": None})
    saved = job.saved_bytes(stage, int(job.tokens), plain)
    return PassSeconds(
        matmul / _matmul_rate(job),
        attended / (job.gpu.bf16_flops * EFFICIENCIES.attention),
        ELEMENTWISE_FORWARD * saved / (job.gpu.hbm_bytes_per_s * EFFICIENCIES.hbm),
        # float32 logits are written and read once.
        _head_seconds(job, stage, num_products=1, bytes_per_logit=8),
    )


def _head_seconds(job: Job, stage: int, *, num_products: int, bytes_per_logit: int) -> float:
    """The output layer on positions with a loss: its matrix products, and what passes over its logits move."""
    if stage != job.layout.pipeline - 1:
        return 0.0
    columns = padded_vocab_size(job.shape.vocab_size, job.layout.tensor) / job.layout.tensor
    logits = columns * trained_share(job) * job.tokens
    products = num_products * 2 * logits * job.shape.hidden_size / _matmul_rate(job)
    return products + bytes_per_logit * logits / (job.gpu.hbm_bytes_per_s * EFFICIENCIES.hbm)


def backward_seconds(job: Job, stage: int) -> PassSeconds:
    """Backward of one micro-batch, with what is computed again."""
    forward, again = forward_seconds(job, stage), again_fraction(job)
    selective = job.parallel.recompute_modules if job.parallel.recompute_granularity == "selective" else ()
    layers = [job.model.layers[i] for i in job.layout.stages[stage]]
    mlp = sum(one.mlp for one in layers) / sum(active_parameters(job, one) for one in layers)
    again_matmul = again + (mlp if "mlp" in selective else 0.0)
    again_attention = again + (1.0 if "core_attn" in selective else 0.0)
    # Roughly half of the elementwise work is the MLP's, a quarter the norms'.
    again_elementwise = again + 0.5 * ("mlp" in selective) + 0.25 * ("layernorm" in selective)
    return PassSeconds(
        matmul=(2 + again_matmul) * forward.matmul,
        # The fused backward computes the scores again: five products instead of two.
        attention=(2.5 + again_attention) * forward.attention,
        elementwise=(ELEMENTWISE_BACKWARD / ELEMENTWISE_FORWARD + again_elementwise) * forward.elementwise,
        # The gradients of both factors. They are made in the forward, but only where something is trained: what a
        # forward without gradient does not have is counted here. float32 logits are read and their gradient written.
        head=_head_seconds(job, stage, num_products=2, bytes_per_logit=4 + job.e),
    )
