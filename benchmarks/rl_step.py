"""An RL step of this project beside TRL's GRPOTrainer: sampling, rewards, one optimizer update, weights to the engine.

    pip install --no-deps trl accelerate        (into this environment, or with -t into a folder on PYTHONPATH)
    python benchmarks/rl_step.py [--rounds 3] [--steps 10]

The 0.8M Qwen3 of the quickstart from the same random weights, 32 prompts x 8 samples x exactly 32 new tokens (both
stop at tokens that the model cannot sample, so neither pays for a forced length), float32, one AdamW update of all 256
samples a step at the same rate, temperature 1, no KL, no evaluation or checkpoints or metrics on TRL's side (ours
writes a few samples a step, as it always does). Contenders take turns, each in a process of its own; a step's time is
the median of those after the warm-up.

`current` takes each ratio's old log-probs from the update itself, as TRL does with one update a step; `recompute` makes
the forward pass for them that several updates a step need. TRL is asked for what is fastest here: one batch, no
gradient checkpointing, torch's fused AdamW, no logging.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from contenders import Outcome, StepTimer, Weights, add_arguments, print_table, take_turns, weights_moved

from megatron_klear.config.load import load_recipe
from megatron_klear.config.recipe import RlRecipe
from megatron_klear.protocols import RewardFn
from megatron_klear.rollout.sampler import SamplingPlan
from megatron_klear.training.rl import RlTrainer, head_settings
from megatron_klear.training.run import open_run
from megatron_klear.types import RewardRequest, Score

PROMPTS, GROUP, NEW_TOKENS = 32, 8, 32
LR = 1e-4
# What tells a stop token that never comes: the first id that is not the model's.
NEVER = 64


def share_of_even_digits(text: str) -> float:
    """A reward that costs nothing and has spread."""
    return sum(character in "02468" for character in text) / NEW_TOKENS


def own_reward(request: RewardRequest) -> float:
    """As megatron-klear asks for it."""
    return share_of_even_digits(request.response)


class UntilLength(RlTrainer):
    """Samples to the full length."""

    def _sampling(self, step: int, number: int) -> SamplingPlan:
        return dataclasses.replace(super()._sampling(step, number), stop_token_ids=(NEVER,))


@dataclass(frozen=True)
class NeverCutOff:
    """Ours counts an answer that was cut off as wrong; TRL judges it as it stands, so here both do."""

    judge: RewardFn

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        return self.judge([dataclasses.replace(request, truncated=False) for request in requests])

    def close(self) -> None:
        self.judge.close()


def recipe(folder: Path, old_logprobs: str, steps: int) -> RlRecipe:
    """Ours."""
    raw: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs" / old_logprobs), "tensorboard": False},
        "model": {"hf_checkpoint": str(folder / "model"), "params_dtype": "float32"},
        "data": {"prompt_data": str(folder / "rl.jsonl"), "max_prompt_len": 16},
        "rollout": {
            "num_rollout": steps,
            "rollout_batch_size": PROMPTS,
            "n_samples_per_prompt": GROUP,
            "rollout_max_response_len": NEW_TOKENS,
        },
        "train": {"old_logprobs": old_logprobs},
        "loss": {"type": "grpo", "eps_clip": 0.2},
        "batch": {"global_batch_size": PROMPTS * GROUP, "max_tokens_per_gpu": 8192},
        "optimizer": {"lr": LR, "weight_decay": 0.0, "clip_grad": 1.0},
        "reward": {"type": "rl_step:own_reward", "format": "none"},
        # TRL trains on groups without spread, too.
        "selection": {"drop_zero_std_groups": False},
        "checkpoint": {"overwrite": True},
    }
    path = folder / f"rl.{old_logprobs}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_recipe(path, kind="rl")


def ours(folder: Path, args: argparse.Namespace, old_logprobs: str) -> Outcome:
    """Steps of the trainer, from the first line of `rl_step` to its last."""
    config, timer = recipe(folder, old_logprobs, args.warmup + args.steps), StepTimer(args.warmup)
    rows: list[dict[str, float]] = []
    with open_run(config, decay_iters=1, head=head_settings(config)) as run:
        before = _exported(run.policy)
        assert run.main is not None and run.main.reward_fn is not None
        main = dataclasses.replace(run.main, reward_fn=NeverCutOff(run.main.reward_fn))
        trainer = UntilLength(dataclasses.replace(run, main=main), config)
        run.push_weights()
        for step in range(1, args.warmup + args.steps + 1):
            rows.append(trainer.rl_step(step))
            timer.step_ended()
        moved = weights_moved(before, _exported(run.policy))
    rows = rows[args.warmup :]
    counts = {
        "tokens": int(sum(row["rollout/num_tokens"] for row in rows)),
        "samples": int(sum(row["rollout/num_samples"] for row in rows)),
        "updates": int(sum(row["train/num_updates"] for row in rows)),
    }
    names = [name for name in rows[0] if name.startswith("perf/")]
    phases = {name.removeprefix("perf/"): statistics.median(row[name] for row in rows) for name in names}
    return Outcome(timer.seconds, counts, moved, phases)


def _exported(policy: Any) -> Weights:
    return {name: tensor.clone() for name, tensor in policy.export_weights()}


def trl(folder: Path, args: argparse.Namespace) -> Outcome:
    """GRPOTrainer's steps, from the end of one to the end of the next."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    timer = StepTimer(args.warmup)
    lengths: list[list[int]] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            timer.step_ended()

    def reward(completions: list[str], completion_ids: list[list[int]], **_kwargs: Any) -> list[float]:
        lengths.append([len(ids) for ids in completion_ids])
        return [share_of_even_digits(text) for text in completions]

    config = GRPOConfig(
        output_dir=str(folder / "runs" / "trl"),
        per_device_train_batch_size=PROMPTS * GROUP // args.trl_parts,
        gradient_accumulation_steps=args.trl_parts,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=args.warmup + args.steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        epsilon=0.2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "rl.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Ends()],
    )
    trainer.eos_token_ids = [NEVER]
    trainer.generation_config.eos_token_id = [NEVER]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.train()
    measured = lengths[-args.steps :]
    assert len(lengths) == args.warmup + args.steps, f"{len(lengths)} batches were sampled"
    counts = {
        "tokens": sum(map(sum, measured)),
        "samples": sum(map(len, measured)),
        "updates": trainer.state.global_step - args.warmup,
    }
    return Outcome(timer.seconds, counts, weights_moved(before, model.state_dict()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--trl-parts", type=int, default=1, help="micro-batches of TRL's update")
    args = parser.parse_args()
    contenders = {
        "current": lambda folder, args: ours(folder, args, "current"),
        "recompute": lambda folder, args: ours(folder, args, "recompute"),
        "trl": trl,
    }
    print_table(take_turns(__file__, contenders, args), peers=["trl"])


if __name__ == "__main__":
    main()
