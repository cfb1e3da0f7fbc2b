"""Jobs of the layout law: one update of a ragged batch, measured. What is learnt from it is a `Case`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import megatron_klear.models.qwen3.attention as attention_module
from torch import Tensor

from dist.law_mutants import MUTANTS
from dist.world import TEMPERATURE, Arrays, Layout, World, by_sample, exported, gradients, random_fill, to_array, world
from helpers.tiny_qwen3 import tiny_shape
from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    CorrectionConfig,
    ErcConfig,
    GppoLossConfig,
    GrpoLossConfig,
    GspoLossConfig,
    KlConfig,
    LossAggMode,
    PpoLossConfig,
)
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.recipe import OptimizerConfig
from megatron_klear.data.aggregation import Aggregation
from megatron_klear.losses.corrections import correction_weights
from megatron_klear.losses.gae import ValueLoss
from megatron_klear.losses.registry import build_loss
from megatron_klear.models.build import ModelStage, ValueGPTModel
from megatron_klear.models.hf_bridge import export_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.broadcast import from_last_stage
from megatron_klear.training.critic import Critic, build_critic, critic_shape
from megatron_klear.training.learner import Trainable, build_trainable
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.policy import Policy
from megatron_klear.types import MicroBatch, Prompt, Sample, TrainBatch
from megatron_klear_kernels.linear_policy_loss.paths import PathName

STILL = OptimizerConfig(lr=0.0, clip_grad=0.0)
# A large eps keeps Adam from turning the rounding of a tiny gradient into a whole step.
MOVING = OptimizerConfig(lr=1e-2, adam_eps=1e-2, weight_decay=0.1, clip_grad=0.5)
NUM_UPDATES = 2
CRITIC = "critic"
DENSE = attention_module.MAX_DENSE_LENGTH, attention_module.MAX_NATIVE_LENGTH, attention_module.BLOCK_ROWS
VOCAB_SIZE = 61
FamilyConfig = (
    PpoLossConfig
    | GrpoLossConfig
    | ClipHigherLossConfig
    | CispoLossConfig
    | GspoLossConfig
    | GppoLossConfig
    | CeGppoLossConfig
)


@dataclass(frozen=True)
class Case:
    """What is learnt from the batch."""

    loss: FamilyConfig
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


def _everything(mode: LossAggMode) -> Case:
    """GPPO with every term that can stand beside it."""
    loss = GppoLossConfig(
        type="gppo",
        loss_agg_mode=mode,
        loss_scale_factor=40.0 if mode == "seq-mean-token-sum-norm" else None,
        sft_loss_coef=0.1,
        entropy_coef=0.01,
        erc=ErcConfig(erc_low=0.05, erc_high=0.05),
    )
    return Case(loss, KlConfig(kl_coef=0.1), CorrectionConfig(type="tis", high=1.1))


PLAIN = GppoLossConfig(type="gppo")
CASES: dict[str, Case] = {
    "all token-mean": _everything("token-mean"),
    "all seq-mean-token-sum": _everything("seq-mean-token-sum"),
    "all seq-mean-token-mean": _everything("seq-mean-token-mean"),
    "all seq-mean-token-sum-norm": _everything("seq-mean-token-sum-norm"),
    "ppo": Case(PpoLossConfig(type="ppo")),
    "grpo": Case(GrpoLossConfig(type="grpo", loss_agg_mode="seq-mean-token-mean")),
    "clip_higher dual": Case(ClipHigherLossConfig(type="clip_higher", eps_clip_c=1.35)),
    "cispo": Case(CispoLossConfig(type="cispo")),
    "gspo": Case(GspoLossConfig(type="gspo", eps_clip=0.005, eps_clip_high=0.005)),
    "gppo": Case(PLAIN),
    "ce_gppo": Case(CeGppoLossConfig(type="ce_gppo")),
    "gppo k1": Case(PLAIN, KlConfig(kl_coef=0.1, kl_type="k1")),
    "gppo k2": Case(PLAIN, KlConfig(kl_coef=0.1, kl_type="k2")),
    "gppo k3+": Case(PLAIN, KlConfig(kl_coef=0.1, kl_type="k3+")),
    "gppo mis": Case(PLAIN, correction=CorrectionConfig(type="mis", high=1.1)),
    "gppo icepop": Case(PLAIN, correction=CorrectionConfig(type="icepop", low=0.9, high=1.1)),
    "gppo sequence_mask": Case(PLAIN, correction=CorrectionConfig(type="sequence_mask", low=0.98, high=1.02)),
}


@dataclass(frozen=True)
class Variant:
    """One way to cut the work, what is learnt from it, and one way to break it."""

    case: str = "all token-mean"
    tied: bool = False
    max_tokens: int = 160
    moves: bool = False
    """Also make some updates with the sharded optimizer."""
    mutant: str = ""
    kv_heads: int = 8
    long: bool = False
    """Through the attention path of long sequences."""
    path: PathName = "auto"
    """Which code computes the output layer and the loss."""

    @property
    def learnt(self) -> tuple[str, bool, int]:
        """What the right answer depends on."""
        return self.case, self.tied, self.kv_heads

    @property
    def shape(self) -> Qwen3Shape:
        """Eight layers and eight heads, so that each parallel dimension can be 8; heads for products, and for C."""
        sizes = {
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 8 if self.tied else 16,
        }
        return tiny_shape(self.tied, VOCAB_SIZE).model_copy(update=sizes)


@dataclass(frozen=True)
class Measured:
    """What one rank saw. Arrays by name; gradients and weights are full tensors, on rank 0 only."""

    num_micro_batches: int
    metrics: dict[str, float]
    grad_norm: float
    rows: Arrays
    """Log-probs by sample, or values."""
    gradients: Arrays
    tied_copy: np.ndarray | None
    """Gradient of this rank's shard of the tied embedding, on first and last stage."""
    moved: Arrays
    """Weights after some updates with the sharded optimizer, less those at the start."""


def law_samples() -> list[Sample]:
    """Seven groups of two, 6 to 42 tokens long: a group without advantage, a sample without loss, five right ones."""
    numbers = random.Random(0)
    lengths = (6, 42, 11, 24, 17, 9, 31, 13, 37, 28, 7, 21, 15, 40)
    samples = []
    for i, length in enumerate(lengths):
        tokens = [numbers.randrange(VOCAB_SIZE) for _ in range(length)]
        sample = Sample(f"s{i}", Prompt(f"p{i // 2}", tuple(tokens[:3])))
        sample.append_response(tokens[3:], [0.0] * (length - 3), weight_version=0, stop_reason="stop")
        sample.reward = 1.0 if i in (0, 1, 6, 9, 13) else -1.0
        sample.advantage = 0.0 if i // 2 == 2 else numbers.uniform(-1.5, 1.5)
        samples.append(sample)
    samples[7].loss_mask = [0] * len(samples[7].token_ids)
    return samples


def noise(micro_batch: MicroBatch, seed: int, scale: float) -> Tensor:
    """[T] numbers that depend on the sample and the position in it alone; 0 for padding."""
    table = scale * torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    owner = micro_batch.sample_index[micro_batch.sequence_ids]
    return torch.where(owner >= 0, table[owner.clamp(min=0), micro_batch.positions], 0.0)


def measure(rank: int, world_size: int, layout: Layout, variants: list[Variant]) -> list[Measured]:
    with world(layout) as here:
        trainables: dict[Qwen3Shape, Trainable] = {}
        measured = []
        for variant in variants:
            # Blocks smaller than the sequences, so that there are several.
            limits = (8, 8, 4) if variant.long else DENSE
            attention_module.MAX_DENSE_LENGTH, attention_module.MAX_NATIVE_LENGTH, attention_module.BLOCK_ROWS = limits
            measured.append(
                _measure_critic(here, variant) if variant.case == CRITIC else _measure(here, variant, trainables)
            )
        return measured


def _measure(here: World, variant: Variant, trainables: dict[Qwen3Shape, Trainable]) -> Measured:
    """Updates with learning rate 0 leave the weights, so variants share a trainable."""
    case, shape, samples = CASES[variant.case], variant.shape, law_samples()
    settings = here.settings(STILL, sharded_optimizer=False)
    if shape not in trainables:
        trainables[shape] = build_trainable(shape, random_fill(shape), here.context, settings)
    bonus = case.loss.entropy_coef > 0
    head = HeadSettings(
        TEMPERATURE,
        entropy_gradient=bonus,
        advantage_decides=case.kl.kl_coef == 0 and not bonus,
        path=variant.path,
        # So small that there are several chunks.
        chunk_bytes=16 * 4 * VOCAB_SIZE,
    )
    policy = Policy(trainables[shape], here.context, settings, head=head)
    batch = _batch(here, variant, samples)
    _annotate(policy, batch, case)
    loss = MUTANTS[variant.mutant](policy, build_loss(case.loss, case.kl))
    outcome = policy.update(batch, loss)
    return Measured(
        len(batch.micro_batches),
        outcome.report.metrics,
        outcome.report.grad_norm,
        by_sample(policy, batch, outcome.logprobs, samples),
        gradients(policy),
        _tied_copy(policy),
        _moved(here, variant, batch) if variant.moves else {},
    )


def _batch(here: World, variant: Variant, samples: Sequence[Sample]) -> TrainBatch:
    loss = CASES[variant.case].loss if variant.case != CRITIC else PLAIN
    aggregation = Aggregation(loss.loss_agg_mode, loss.loss_scale_factor)
    return here.batch(samples, variant.max_tokens, sft_loss_coef=loss.sft_loss_coef, aggregation=aggregation)


def _annotate(policy: Policy, batch: TrainBatch, case: Case) -> None:
    """What other policies said: this one's numbers and a fixed distance, so that nothing is equal by accident."""
    # Earlier stages have no numbers.
    for micro_batch, stats in zip(batch.micro_batches, policy.stats(batch), strict=False):
        assert stats.entropy is not None
        micro_batch.old_logprobs = stats.logprobs + noise(micro_batch, 1, 0.25)
        micro_batch.old_entropy = stats.entropy * (1 + noise(micro_batch, 2, 0.05))
        micro_batch.reference_logprobs = stats.logprobs + noise(micro_batch, 3, 0.3)
        micro_batch.rollout_logprobs = micro_batch.old_logprobs + noise(micro_batch, 4, 0.1)
        micro_batch.policy_weights, _ = correction_weights(micro_batch, case.correction)


def _tied_copy(policy: Policy) -> np.ndarray | None:
    topology = policy.context.topology
    at_an_end = topology.is_first_stage or topology.is_last_stage
    if not (policy.stage.shape.tie_word_embeddings and at_an_end):
        return None
    at_this_end = policy.stage.chunks[0 if topology.is_first_stage else -1]
    weight = at_this_end.core.shared_embedding_or_output_weight()
    return to_array(weight.main_grad)  # type: ignore[attr-defined]


def _moved(here: World, variant: Variant, batch: TrainBatch) -> Arrays:
    case = CASES[variant.case]
    policy = here.policy(variant.shape, optimizer=MOVING)
    before, loss = exported(policy), build_loss(case.loss.model_copy(update={"entropy_coef": 0.0}), case.kl)
    for _ in range(NUM_UPDATES):
        policy.update(batch, loss)
    return {name: tensor - before[name] for name, tensor in exported(policy).items()}


def _measure_critic(here: World, variant: Variant) -> Measured:
    """The value loss, with a head that is not zero: the trunk would get no gradient through one that is."""
    shape, samples = critic_shape(variant.shape), law_samples()

    def fill(stage: ModelStage) -> None:
        random_fill(shape)(stage)
        if isinstance(stage.core, ValueGPTModel) and stage.topology.is_last_stage:
            with torch.no_grad():
                weight = stage.core.value_head.weight
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))

    critic = build_critic(shape, fill, here.context, here.settings(STILL, sharded_optimizer=False))
    MUTANTS[variant.mutant](critic, build_loss(PLAIN, KlConfig()))
    batch = _batch(here, variant, samples)
    rows = critic.values(batch)
    for micro_batch, values in zip(batch.micro_batches, rows, strict=False):
        micro_batch.values = values + noise(micro_batch, 1, 0.3)
        micro_batch.returns = values + noise(micro_batch, 2, 0.5)
    report = critic.update(batch, ValueLoss(0.2))
    return Measured(
        len(batch.micro_batches),
        report.metrics,
        report.grad_norm,
        by_sample(critic, batch, rows, samples),
        _critic_gradients(critic),
        None,
        {},
    )


def _critic_gradients(critic: Critic) -> Arrays:
    """Full gradients of trunk and value head on rank 0."""
    core = critic.stage.core
    assert isinstance(core, ValueGPTModel)
    parameters = critic.stage.parameters()
    own = core.value_head.weight.main_grad if critic.context.topology.is_last_stage else None  # type: ignore
    head = from_last_stage(own, (1, critic.stage.shape.hidden_size), critic.context)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    table = qwen3_table(critic.stage.shape)
    found = {name: to_array(tensor) for name, tensor in export_weights(critic.stage, table, critic.context)}
    return found | {"value_head": to_array(head)} if critic.context.is_main else found
