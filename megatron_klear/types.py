"""The nouns. Standard library only at import; tensors appear in annotations alone.

One alignment holds everywhere a sequence is a row of numbers per position ([T] or [L]):
position t holds token `token_ids[t]`, `labels[t]` is the token that follows it, and every per-token number
(log-prob, scale, advantage) at t belongs to PREDICTING `labels[t]`. The last position of a sequence predicts nothing
and carries zeros.

A log-prob is named by the policy that made it: `rollout_` (the engine that sampled), `old_` (the trainer before the
update), `current_` (the trainer now), `reference_`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_klear.metrics import Metric

StopReason = Literal["stop", "length", "abort"]
Transport = Literal["disk", "tensor", "broadcast"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this rank stands. Ints only: it can be passed to code that must not know of process groups."""

    rank: int = 0
    world_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    """Replicas: groups of ranks that see different samples."""
    context_rank: int = 0
    context_size: int = 1
    """Ranks of a replica that see different parts of the same sequences."""
    expert_rank: int = 0
    expert_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        """True where the embedding lives."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the head lives, log-probs and losses exist."""
        return self.pipeline_rank == self.pipeline_size - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, already tokenized: `token_ids` is the rendered template up to where the model starts to write."""

    prompt_id: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    answer: str = ""
    source: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one engine drew in a row from one version of the weights. `engine` is its name, if it has one."""

    num_tokens: int
    weight_version: int
    engine: str = ""


@dataclass(slots=True)
class Sample:
    """One trainable token sequence with its story. Grows only through `append_response`.

    Example: prompt ids (5, 6), response 7, 8 with log-probs -0.1, -0.2 ->
    token_ids [5, 6, 7, 8], loss_mask [0, 0, 1, 1], rollout_logprobs [0, 0, -0.1, -0.2]
    (here, before packing, entry i belongs to token i itself; `pack` shifts it to the predicting position).
    """

    sample_id: str
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    reward: float | None = None
    """What the reward function said. The joint SFT term asks whether it is exactly 1."""
    shaped_reward: float | None = None
    """The reward less penalties (over-long, KL), where there are any: what advantages are made of."""
    reward_reason: str = ""
    advantage: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    """Which engine drew the response, from which weights: their tokens add up to the response's."""
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt.token_ids)
            self.loss_mask = [0] * len(self.token_ids)
            self.rollout_logprobs = [0.0] * len(self.token_ids)

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt."""
        return self.token_ids[len(self.prompt.token_ids) :]

    @property
    def training_reward(self) -> float | None:
        """The shaped reward where there is one."""
        return self.reward if self.shaped_reward is None else self.shaped_reward

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the loss counts."""
        return sum(self.loss_mask)

    @property
    def weight_version_min(self) -> int | None:
        """Oldest weights that drew a token; None before there is one."""
        return min((piece.weight_version for piece in self.pieces), default=None)

    @property
    def weight_version_max(self) -> int | None:
        """Newest weights that drew a token; None before there is one."""
        return max((piece.weight_version for piece in self.pieces), default=None)

    def append_response(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        weight_version: int,
        stop_reason: StopReason,
        engine: str = "",
    ) -> None:
        """Add a piece of engine output. All rows grow together, so they cannot drift apart."""
        if len(token_ids) != len(logprobs):
            raise ValueError(
                f"sample {self.sample_id}: {len(token_ids)} response tokens but {len(logprobs)} log-probs;"
                " an engine must return one log-prob for each token it sampled"
            )
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([1] * len(token_ids))
        self.rollout_logprobs.extend(logprobs)
        self.pieces.append(Piece(len(token_ids), weight_version, engine))
        self.stop_reason = stop_reason


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The G samples of one prompt, brought together by prompt id, never by position."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All groups made for one RL step. `dropped` counts samples by the reason they were left out."""

    groups: tuple[SampleGroup, ...]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def samples(self) -> list[Sample]:
        """Every sample, group after group."""
        return [sample for group in self.groups for sample in group.samples]


def _itself(totals: Tensor) -> Tensor:
    return totals


@dataclass(slots=True)
class MicroBatch:
    """One forward pass: S sequences packed into T positions (T may end in masked padding sequences).

    Every tensor is local to a data-parallel rank and equal on its model-parallel ranks. `token_scale` and `nll_scale`
    already hold every division: a loss is a plain sum over positions. Under context parallelism a rank holds T/cp of
    the positions, `own_rows` of the packed micro-batch; `cu_seqlens` and what is per sequence stay those of the whole.
    """

    token_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64, the next token; 0 where there is none
    positions: Tensor  # [T] int64, position inside the sequence
    cu_seqlens: Tensor  # [S+1] int32, starts of the sequences and T; what kernels index with
    # [S] int32, tokens of each sequence; under context parallelism a sample is padded at its end, so that it may be
    # shorter than its place in cu_seqlens. A padding sequence counts as whole. Without context parallelism the same
    # as the differences of cu_seqlens.
    true_lengths: Tensor
    sequence_ids: Tensor  # [T] int64, index of the sequence inside this micro-batch
    max_seqlen: int  # longest sequence with its padding, on the host so that no kernel launch waits for the device
    token_scale: Tensor  # [T] float32, mask x aggregation weight / global count
    nll_scale: Tensor  # [T] float32, the same for the joint SFT term, alpha included
    advantages: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    sample_index: Tensor  # [S] int64, index of the sample in the update; -1 for padding
    rewards: Tensor  # [S] float32, 0 for padding
    # Filled by `annotate` where the last pipeline stage is: float32 [T].
    old_logprobs: Tensor = field(init=False)
    old_entropy: Tensor = field(init=False)
    reference_logprobs: Tensor = field(init=False)
    policy_weights: Tensor = field(init=False)  # engine correction, 1 without one
    values: Tensor = field(init=False)
    returns: Tensor = field(init=False)
    # Set by the head before the first forward: positions with a loss [R] int64, those that may have a gradient first,
    # and how many these are (a number of the host, so that nothing waits for the device).
    loss_rows: Tensor | None = field(init=False, default=None)
    num_gradient_rows: int = field(init=False, default=0)
    # Set by parallel/context.py where sequences are shared by several ranks.
    own_rows: Tensor | None = field(init=False, default=None)  # [T/cp] int64
    sum_over_context: Callable[[Tensor], Tensor] = field(init=False, default=_itself)
    """Sum of per-sequence totals over the ranks that share the sequences, with a gradient."""

    def __post_init__(self) -> None:
        zeros = self.token_scale.new_zeros(self.token_scale.shape)
        self.old_logprobs = self.old_entropy = self.reference_logprobs = self.values = self.returns = zeros
        self.policy_weights = zeros + 1


@dataclass(slots=True)
class TrainBatch:
    """What ONE optimizer update sees on this data-parallel rank. The counts are global, fixed in `pack`."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    num_samples: int
    num_sft_tokens: int = 0
    num_dummy_micro_batches: int = 0
    """Micro-batches of padding alone, over all ranks: there were fewer samples than micro-batches."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What the head gives back, on the last pipeline stage only; zeros where no loss is taken."""

    logprobs: Tensor  # [T] float32, log pi(labels[t] | ...), temperature applied
    entropy: Tensor | None = None  # [T] float32, with a gradient only where the loss has an entropy bonus


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A summed loss (scalar, with gradient) and metrics about it (detached)."""

    loss: Tensor
    metrics: dict[str, Metric]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Outcome of one optimizer update, the same on every rank."""

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool = False

    def joined(self, other: StepReport) -> StepReport:
        """This report with the metrics of another learner's added."""
        return StepReport({**other.metrics, **self.metrics}, self.grad_norm, self.lr, self.skipped)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Token ids in. `seed` makes the samples of this request reproducible whatever shares its batch."""

    request_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Token ids and log-probs out (log-probs after temperature). The stop token, if any, is the last token."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    pieces: tuple[Piece, ...]
    """Whose tokens these are, in order; their counts add up to the tokens'."""


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """What a reward function sees of a sample: the prompt with its answer, and the decoded response."""

    prompt: Prompt
    response: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and why. `failure` names an infrastructure failure: then `reward` is None and the sample is dropped."""

    reward: float | None
    reason: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens, and what the trainer says of them with the weights that are pushed.

    `logprobs` are at temperature 1, of token_ids[1:], each given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A weight push that every engine confirmed."""

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    failed: Mapping[str, str] = field(default_factory=dict)
    """Engines that were taken out because they did not confirm, by name, and why."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server as every process of a run names it: the name stands in errors, metrics and reports."""

    name: str
    url: str
    kind: Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server can do, asked once when it is connected: releases differ, and nothing is assumed."""

    release: str
    """Its own release number, as it says."""
    transports: frozenset[Transport]
    pause_modes: frozenset[PauseMode]
    brackets_updates: bool
    """Tensor and broadcast updates must stand between begin_update and end_update."""
    stamps_tokens: bool
    """Says for each token which weights drew it; otherwise the bridge does, and no request may span an update."""
    has_checksum: bool
    sleeps: bool
    num_ranks: int = 1
    """Ranks of the server that take part in a broadcast."""


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """A process group of the trainer (rank 0) and the ranks of all engines, for broadcasts of weights.

    `rank_offset` is the first rank of the server that this address is given to.
    """

    name: str
    host: str
    port: int
    world_size: int
    rank_offset: int
    backend: Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be broadcast: Hugging Face name, shape, dtype as torch names it ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
