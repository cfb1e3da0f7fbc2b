"""What an RL recipe minimises: the policy loss, its extra terms, advantages, corrections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megatron_klear.config.base import Config, NonNegativeFloat, PositiveFloat, PositiveInt

ClipWidth = Annotated[float, Field(gt=0, lt=1)]

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class ErcConfig(Config):
    """Entropy-ratio clipping (arXiv 2512.05591): tokens whose entropy moved too far give no policy gradient."""

    erc_low: ClipWidth = 0.05
    """A token is kept while its entropy / old entropy is above 1 - erc_low ..."""
    erc_high: PositiveFloat = 0.05
    """... and below 1 + erc_high."""


class AggregationConfig(Config):
    """How tokens become one number."""

    loss_agg_mode: LossAggMode = "token-mean"
    """How tokens are averaged: over all tokens of the update, or per sequence (sum, mean, sum / constant) first."""
    loss_scale_factor: PositiveFloat | None = None
    """The constant of seq-mean-token-sum-norm (Dr.GRPO: the longest response); without effect in other modes."""
    sft_loss_coef: NonNegativeFloat = 0.0
    """alpha of the joint SFT term on samples with reward exactly 1 (Klear-Reasoner Eq. 14; 0.1 there)."""


class PolicyLossConfig(AggregationConfig):
    """Parts that every policy loss of this project has."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus."""
    erc: ErcConfig | None = None
    """Entropy-ratio clipping on top of this loss: `erc: {}` takes its defaults; off if not given."""


class PpoLossConfig(PolicyLossConfig):
    """PPO's clipped surrogate with one width (arXiv 1707.06347 Eq. 7)."""

    type: Literal["ppo"]
    """Which loss."""
    eps_clip: ClipWidth = 0.2
    """Clip width on both sides."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip (arXiv 1912.09729): a negative-advantage token above this ratio gets NO gradient; off if not given."""


class GrpoLossConfig(PpoLossConfig):
    """GRPO's policy term (arXiv 2402.03300): PPO's clip; group advantages and aggregation are settings of their own."""

    type: Literal["grpo"]  # type: ignore[assignment]
    """Which loss."""


class ClipHigherLossConfig(PolicyLossConfig):
    """PPO with a wider upper clip (DAPO, arXiv 2503.14476 Eq. 10)."""

    type: Literal["clip_higher"]
    """Which loss."""
    eps_clip: ClipWidth = 0.2
    """Lower clip width."""
    eps_clip_high: PositiveFloat = 0.28
    """Upper clip width."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip (arXiv 1912.09729): a negative-advantage token above this ratio gets NO gradient; off if not given."""


class GppoLossConfig(PolicyLossConfig):
    """Gradient-preserving clipping (arXiv 2508.07629 Eq. 11-12): clipped tokens keep a bounded gradient."""

    type: Literal["gppo"]
    """Which loss."""
    eps_clip: ClipWidth = 0.2
    """Lower clip width: a clipped token with negative advantage keeps weight 1 - eps_clip."""
    eps_clip_high: PositiveFloat = 0.28
    """Upper clip width: a clipped token with positive advantage keeps weight 1 + eps_clip_high."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip, as the released code has it (10): takes away the gradient GPPO promises to keep; off if not given."""


class CeGppoLossConfig(PolicyLossConfig):
    """CE-GPPO (arXiv 2509.20712): GPPO whose clipped tokens weigh gppo_beta_low and gppo_beta_high times as much."""

    type: Literal["ce_gppo"]
    """Which loss."""
    eps_clip: ClipWidth = 0.2
    """Lower clip width."""
    eps_clip_high: PositiveFloat = 0.2
    """Upper clip width; CE-GPPO uses the same on both sides."""
    gppo_beta_low: NonNegativeFloat = 0.75
    """Weight of tokens clipped low: 0.75 for 7B, 0.5 for 1.5B in the paper; 0 leaves them without gradient."""
    gppo_beta_high: NonNegativeFloat = 1.0
    """Weight of tokens clipped high."""


class CispoLossConfig(PolicyLossConfig):
    """CISPO (arXiv 2506.13585 Eq. 4): REINFORCE with a clipped importance weight; every token keeps its gradient."""

    type: Literal["cispo"]
    """Which loss."""
    eps_clip: ClipWidth | None = 0.2
    """The weight is at least 1 - eps_clip; null for no lower bound (as MiniMax and TRL have it)."""
    eps_clip_high: PositiveFloat = 0.28
    """The weight is at most 1 + eps_clip_high."""


class GspoLossConfig(PolicyLossConfig):
    """GSPO (arXiv 2507.18071 Eq. 5-7): one ratio a sequence, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"]
    """Which loss."""
    eps_clip: ClipWidth = 3e-4
    """Lower clip width of the sequence ratio."""
    eps_clip_high: PositiveFloat = 4e-4
    """Upper clip width of the sequence ratio."""


class UserLossConfig(AggregationConfig):
    """A loss of your own: `package.module:function`, called as function(stats, micro_batch) -> LossOutput."""

    type: str
    """Dotted path; the function returns a SUM over positions (see `megatron_klear.protocols.PolicyLoss`)."""


def _loss_tag(value: Any) -> str | None:
    """The variant of raw data or of a loss config; None where there is nothing to choose by."""
    if isinstance(value, dict):
        name = value.get("type")
    elif isinstance(value, AggregationConfig):
        name = dict(value)["type"]
    else:
        return None
    return "user" if isinstance(name, str) and ":" in name else str(name)


LossConfig = Annotated[
    Annotated[PpoLossConfig, Tag("ppo")]
    | Annotated[GrpoLossConfig, Tag("grpo")]
    | Annotated[ClipHigherLossConfig, Tag("clip_higher")]
    | Annotated[GppoLossConfig, Tag("gppo")]
    | Annotated[CeGppoLossConfig, Tag("ce_gppo")]
    | Annotated[CispoLossConfig, Tag("cispo")]
    | Annotated[GspoLossConfig, Tag("gspo")]
    | Annotated[UserLossConfig, Tag("user")],
    Discriminator(_loss_tag),
]


class KlConfig(Config):
    """A penalty for leaving the reference policy."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 keeps no reference at all."""
    kl_type: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator, with d = log pi - log ref: k1 = d, k2 = d^2/2, k3 = e^-d - 1 + d; k3+ has the value of k3 and the
    gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty acts: in the loss, or subtracted from the reward before advantages (without gradient)."""
    ref_load: str | None = None
    """Megatron checkpoint or Hugging Face folder of the reference; the run's starting weights if not given."""
    ref_update_interval: PositiveInt | None = None
    """Make the current weights the reference every so many steps; never if not given."""


class CorrectionConfig(Config):
    """Correction for an engine whose probabilities differ from the trainer's; r = trainer / engine probability."""

    type: Literal["none", "tis", "icepop", "mis", "sequence_mask"] = "none"
    """tis: weight min(r, high). mis: weight r, masked above high. icepop: weight r, masked outside (low, high).
    sequence_mask: whole sequences masked whose geometric mean of r is outside (low, high)."""
    low: NonNegativeFloat = 0.5
    """Lower bound of r."""
    high: PositiveFloat = 2.0
    """Upper bound of r."""


class AdvantageConfig(Config):
    """From rewards to advantages."""

    type: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"] = "grpo"
    """grpo: against the group. rloo: against the mean of the others. reinforce_pp: against the whole step, normalised.
    reinforce_pp_baseline: against the group's mean, normalised over the step. gae: with the critic."""
    std: Literal["population", "unbiased", "none"] = "population"
    """Divide the variance by n (Klear-Reasoner Eq. 4) or n - 1 (its released code); none: no std at all (Dr.GRPO)."""
    eps: NonNegativeFloat = 1e-6
    """Added to the std."""


class CriticConfig(Config):
    """The value model of GAE: a Qwen3 of the policy's shape with a value head, started from the policy's weights.

    Needed with advantage.type gae, without effect otherwise. `critic: {}` takes every default.
    """

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate of the critic; its other optimizer settings are the policy's."""
    value_clip: PositiveFloat | None = 0.2
    """Widest move of a value within a step that still lowers the loss (PPO's clipped value loss); null for none."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """lambda of GAE (arXiv 1506.02438)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which only the critic learns."""
