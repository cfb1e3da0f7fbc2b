"""Corrections for an engine whose probabilities are not the trainer's: weights on the policy loss, without gradient.

With r_t = exp(old_logprob - rollout_logprob), trainer over engine, and a sequence's geometric mean R:
    none            1
    tis             min(r, high)                    truncated importance sampling (fengyao.notion.site, verl)
    mis             r where r <= high, else 0       masked importance sampling
    icepop          r where low <= r <= high, else 0 (arXiv 2510.18855)
    sequence_mask   1 where low <= R <= high, else 0, for whole sequences
A masked token keeps its place in the denominator: `token_scale` is not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_klear.config.loss import CorrectionConfig
from megatron_klear.losses.sequences import sequence_mean, trained
from megatron_klear.losses.terms import token_mean
from megatron_klear.metrics import Metric
from megatron_klear.types import MicroBatch
from megatron_klear_kernels.linear_policy_loss.coefficients import MAX_ABS_LOG_RATIO


@torch.no_grad()
def correction_weights(micro_batch: MicroBatch, config: CorrectionConfig) -> tuple[Tensor, dict[str, Metric]]:
    """Weights [T] (1 where nothing is trained) and metrics; `old_logprobs` must be set."""
    log_ratio = micro_batch.old_logprobs - micro_batch.rollout_logprobs
    if config.type == "sequence_mask":
        log_ratio = sequence_mean(log_ratio, micro_batch)
    ratio = log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    mask = trained(micro_batch)
    weights, masked = _weights(ratio, config)
    weights = torch.where(mask, weights, torch.ones_like(weights))
    metrics = {
        "train/correction_ratio_mean": token_mean(ratio, mask),
        "train/correction_weight_mean": token_mean(weights, mask),
        "train/correction_masked": token_mean(masked, mask),
    }
    return weights, metrics


def _weights(ratio: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """(weight, is it masked or truncated) of each ratio."""
    outside = (ratio < config.low) | (ratio > config.high)
    match config.type:
        case "none":
            return torch.ones_like(ratio), torch.zeros_like(outside)
        case "tis":
            return ratio.clamp(max=config.high), ratio > config.high
        case "mis":
            return ratio.masked_fill(ratio > config.high, 0.0), ratio > config.high
        case "icepop":
            return ratio.masked_fill(outside, 0.0), outside
        case "sequence_mask":
            return torch.ones_like(ratio).masked_fill(outside, 0.0), outside
