"""All parts of a recipe. Field docstrings are the reference: `docs/config.md` is generated from them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatron_klear.config.base import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    tuple_of_list,
)
from megatron_klear.config.loss import AdvantageConfig, CorrectionConfig, CriticConfig, KlConfig, LossConfig
from megatron_klear.config.model import ModelConfig
from megatron_klear.config.servers import ServersConfig


class RunConfig(Config):
    """Where a run writes and what it is called."""

    output_dir: str
    """Folder of this run: resolved recipe, metrics.jsonl, samples, plots, report, checkpoints."""
    name: str = "run"
    """Shown in plots, TensorBoard and wandb."""
    seed: NonNegativeInt = 1234
    """Seeds weights, data order and sampling."""
    tensorboard: bool = True
    """Write TensorBoard events under output_dir/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the extra `wandb`)."""


class ParallelConfig(Config):
    """How the model and the data are split over ranks. Data parallelism takes the ranks that are left over."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each weight matrix; must divide heads, KV heads, intermediate size."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers; must divide the layers that the two settings below leave to the other stages."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage, which also holds the embedding; an even share if not given."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage, which also holds the head; an even share if not given."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Chunks of layers on each pipeline rank (interleaved schedule: less waiting, more communication)."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence; sequences are padded to multiples of twice this many tokens."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks of a pipeline stage (tensor x context x data) that share the experts of a Qwen3-MoE, each whole on one."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"
    """How tokens travel to their experts; Qwen3-MoE only."""
    sequence_parallel: bool = False
    """Split norm activations along the sequence over tensor-parallel ranks; needs tensor_model_parallel_size > 1."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward: of whole layers, or of the parts in recompute_modules."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full: every recompute_num_layers layers as one unit, or the first recompute_num_layers layers, each by
    itself, of a stage (of a chunk with virtual pipeline)."""
    recompute_num_layers: PositiveInt = 1
    """With full: see recompute_method; with uniform it must divide the layers of every stage or chunk."""
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "mlp", "layernorm"], ...], Field(min_length=1), BeforeValidator(tuple_of_list)
    ] = ("core_attn",)
    """With selective: what is computed again. `layernorm` costs least time; `mlp` saves most memory; `core_attn` saves
    where attention runs without a fused kernel, which is on a CPU."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    distributed_timeout_minutes: PositiveInt = 30
    """How long a collective may wait before the run fails."""


class HeadConfig(Config):
    """The output layer with its loss (docs/kernels.md)."""

    path: Literal["auto", "eager", "triton", "triton_scaled_exp"] = "auto"
    """Which code runs: auto takes Triton kernels on CUDA, plain torch elsewhere; a path that cannot run is an error."""
    chunk_bytes: PositiveInt | None = None
    """Most bytes of logits held at a time; 48 MiB on a CPU, 2400 MiB on a GPU if not given."""


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat
    """Peak learning rate. 0 is allowed (a soak run whose weights must not move)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after the warm-up."""
    lr_decay_iters: PositiveInt | None = None
    """Updates until min_lr, warm-up included; needed with a decay in `rl`, whose updates are not known ahead."""
    lr_warmup_iters: NonNegativeInt = 0
    """Updates over which the rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay on matrices; norm weights have none."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 clips nothing."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's main weights and moments in host memory between updates."""


class BatchConfig(Config):
    """How samples become optimizer updates and forward passes."""

    global_batch_size: PositiveInt
    """Most samples in one optimizer update, over all data-parallel ranks."""
    max_tokens_per_gpu: PositiveInt = 32768
    """Most tokens in one micro-batch on one rank. The context-parallel ranks of a group share a micro-batch, so
    max_tokens_per_gpu x context_parallel_size must hold the longest sample, padded to 2 x context_parallel_size."""


class HealthConfig(Config):
    """Checks that stop a run before it wastes a night."""

    max_train_rollout_logprob_abs_diff: PositiveFloat = 0.1
    """Largest mean |trainer log-prob - engine log-prob| of a step. Not looked at where samples may be of older weights:
    with rollout.max_async_steps or rollout.partial_rollout the probe of every push takes its place."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Updates with a NaN or infinite loss or gradient that are skipped (and dumped) in a row before the run stops."""
    constant_reward_alarm_steps: PositiveInt = 10
    """Warn when the mean reward has not changed for so many steps."""


class CheckpointConfig(Config):
    """Megatron checkpoints of the run."""

    save: str | None = None
    """Folder of iter_* and latest_checkpointed_iteration.txt; output_dir/checkpoints if not given."""
    save_interval: PositiveInt | None = None
    """Save every so many steps, and always at the end; only at the end if not given."""
    async_save: bool = False
    """Write the files while training goes on, at most one save at a time; a save that finds the last one still writing
    waits for it. Costs host memory for one copy of the weights and the optimizer state."""
    keep_last: PositiveInt | None = None
    """How many of the newest checkpoints stay; older ones are deleted once a newer one is complete. All stay if not
    given."""
    keep_every: PositiveInt | None = None
    """Besides the newest, those of every n-th step stay; a multiple of save_interval."""
    keep_best: PositiveInt | None = None
    """Besides the newest, so many with the best keep_best_metric stay; of equals, the earlier."""
    keep_best_metric: str = "eval/accuracy"
    """Which metric of the checkpoint's own step says what is best, by its name in metrics.jsonl."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether high or low is good."""
    resume: bool | Literal["auto"] = False
    """true: go on from the newest checkpoint in `save` (weights, optimizer, schedule, data cursor, random state); an
    error if there is none. auto: the same, or a fresh start where there is none yet, so that one command line serves
    the first launch and every requeue; what an attempt killed before its first checkpoint wrote is done again."""
    ckpt_step: NonNegativeInt | None = None
    """Go on from the checkpoint of this step instead of the newest."""
    verify_checksums: bool = True
    """Compare every file of the checkpoint with its checksum before going on from it; each rank reads a share."""
    allow_recipe_changes: bool = False
    """Go on although settings that change what is learnt differ from those the checkpoint was saved with."""
    overwrite: bool = False
    """Allow a fresh run in a folder that holds another run's output; that output is deleted."""


class ExportConfig(Config):
    """Hugging Face folder to write when training is done."""

    hf_dir: str | None = None
    """Where to write it; nothing is exported if not given."""
    max_shard_bytes: PositiveInt = 5 * 1024**3
    """Largest safetensors shard."""


class EvalConfig(Config):
    """Greedy accuracy on held-out problems with the embedded engine."""

    prompt_data: str | None = None
    """Problems, as jsonl or parquet; no evaluation if not given."""
    eval_interval: PositiveInt | None = None
    """Evaluate every so many steps, besides before the first and after the last."""
    eval_before_train: bool = True
    """Evaluate the starting weights."""
    max_response_len: PositiveInt = 1024
    """Most tokens of an answer."""


class SftDataConfig(Config):
    """Supervised samples: rows with `messages`, or with a prompt and a response."""

    path: str
    """jsonl or parquet file."""
    messages_key: str = "messages"
    """Field with [{role, content}, ...]; the loss is on what the assistant says last."""
    input_key: str = "prompt"
    """Field with the prompt where a row has no messages: text, or messages."""
    response_key: str = "response"
    """Field with the response where a row has no messages."""
    max_length: PositiveInt = 32768
    """Most tokens of a sample, prompt included."""
    overlong: Literal["drop", "truncate", "error"] = "error"
    """What to do with a longer one: leave it out (counted), cut its end (counted), or stop."""


class PromptDataConfig(Config):
    """Problems for rollouts."""

    prompt_data: str
    """jsonl or parquet, rows as slime's (prompt, label, metadata) or verl's (prompt, reward_model, data_source)."""
    input_key: str = "prompt"
    """Field with the prompt: text, or messages."""
    label_key: str = "label"
    """Field with the answer; a verl row's reward_model.ground_truth is taken where it is absent."""
    max_prompt_len: PositiveInt = 4096
    """Most tokens of a rendered prompt."""
    overlong: Literal["drop", "error"] = "drop"
    """What to do with a longer one: leave it out (counted), or stop."""


class RolloutConfig(Config):
    """How responses are sampled."""

    num_rollout: PositiveInt
    """RL steps: each samples rollout_batch_size x n_samples_per_prompt responses and trains on them."""
    rollout_batch_size: PositiveInt
    """Prompts a step."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses a prompt; 1 needs advantage.type reinforce_pp or gae: a group of one has no spread to learn from."""
    rollout_max_response_len: PositiveInt = 1024
    """Most tokens of a response; longer ones are cut off and marked as truncated."""
    rollout_temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs use the same."""
    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    """Where responses are sampled: in this process, by the embedded engine, or on the servers of `servers`."""
    max_running_requests: PositiveInt = 256
    """Rows the embedded engine decodes at a time; finished rows make room for waiting ones."""
    max_async_steps: NonNegativeInt = 0
    """How many steps ahead of training the servers may sample, which is how many steps old a sample may be: 0 waits for
    each step's rollout, 1 is one step off. Steps use groups in the order their prompts went out."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts that are sampled for a step on servers; at rollout_batch_size groups the rest is cut short.
    rollout_batch_size if not given."""
    partial_rollout: bool = False
    """Responses that were cut short go on in the next step from the tokens they have; otherwise they are dropped."""


class RewardConfig(Config):
    """Which reward, and how it is run."""

    type: str
    """`math` (math-verify in worker processes), `arithmetic` (exact integer), or your own `package.module:function`."""
    correct: float = 1.0
    """Reward of a right answer; with a function of your own, the value that counts as right in accuracies."""
    incorrect: float = -1.0
    """Reward of a wrong or cut-off answer."""
    format: Literal["none", "think"] = "think"
    """`think`: an answer not preceded by <think>...</think> is incorrect, whatever it says."""
    timeout_s: PositiveFloat = 5.0
    """`math` only: longest verification of an answer; a slower worker is killed, the answer counted as a failure."""
    num_workers: PositiveInt = 2
    """`math` only: verifier processes."""


class SelectionConfig(Config):
    """Which samples are left out of training, each with a counted reason."""

    drop_zero_std_groups: bool = True
    """Leave out groups without spread: their advantages are zero."""
    zero_std_metric: Literal["reward", "accuracy"] = "reward"
    """Spread of what: of the rewards, or of right and wrong (Klear's released code: partial rewards do not count)."""
    max_resample_rounds: NonNegativeInt = 0
    """Rounds in which groups that were left out are replaced by fresh prompts; 0 trains on what is left."""
    drop_truncated: bool = False
    """Leave out responses that were cut off, before groups are judged (over-long filter)."""
    overlong_buffer_len: NonNegativeInt = 0
    """Tokens before the longest response in which its reward sinks (DAPO's soft penalty); 0 for none."""
    overlong_penalty_factor: NonNegativeFloat = 1.0
    """How far it sinks: at the longest response by this much."""
    max_staleness: NonNegativeInt | None = None
    """Leave out samples whose oldest token was drawn from weights older than so many updates; null keeps all."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards at random over the whole step. Nothing should be learnt then."""


class TrainConfig(Config):
    """How an RL step trains on its rollouts."""

    old_logprobs: Literal["recompute", "rollout", "current"] = "recompute"
    """What ratios are against. recompute: a forward pass of the trainer before the first update. rollout: the engine's
    log-probs, without a pass. current: the update's own, so that every ratio is 1; exact where a step is one update."""


class DebugConfig(Config):
    """One half of the loop alone."""

    save_rollout_data: str | None = None
    """Folder for the selected rollouts of every step."""
    load_rollout_data: str | None = None
    """Train on the rollouts of this folder instead of sampling."""
    rollout_only: bool = False
    """Sample, score and save, but train nothing."""


class _Recipe(Config):
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    head: HeadConfig = HeadConfig()
    optimizer: OptimizerConfig
    batch: BatchConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    health: HealthConfig = HealthConfig()


class SftRecipe(_Recipe):
    """A supervised fine-tuning run."""

    data: SftDataConfig
    train_iters: PositiveInt
    """Optimizer updates; the data is repeated in a new order each epoch."""
    reward: RewardConfig | None = None
    """How evaluation decides that an answer is right; needed with eval.prompt_data."""


class RlRecipe(_Recipe):
    """A reinforcement-learning run."""

    data: PromptDataConfig
    rollout: RolloutConfig
    servers: ServersConfig | None = None
    """Needed with rollout.engine sglang or vllm, without effect otherwise."""
    train: TrainConfig = TrainConfig()
    loss: LossConfig
    advantage: AdvantageConfig = AdvantageConfig()
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig | None = None
    """Needed with advantage.type gae, without effect otherwise."""
    reward: RewardConfig
    selection: SelectionConfig = SelectionConfig()
    debug: DebugConfig = DebugConfig()


Recipe = SftRecipe | RlRecipe
