"""An SFT step of this project beside transformers' Trainer, on the same sequences: batch, forward, backward, AdamW.

    pip install --no-deps accelerate        (into this environment, or with -t into a folder on PYTHONPATH)
    python benchmarks/sft_step.py [--rounds 3] [--steps 10] [--samples 256]

The 0.8M Qwen3 of the quickstart from the same random weights, in float32, on demonstrations of ragged lengths: digits
and signs, lognormal (median 45 tokens, at most 256), the loss on the response. Each step is one AdamW update of the
same `--samples` sequences on all sides, at the same rate, without evaluation, checkpoints or logging. Tokens are
counted, and the weights must move alike. Contenders take turns, each in a process of its own; a step's time is the
median of those after the warm-up.

Trainer gets what is fastest for it: fused AdamW, no gradient checkpointing, no padding that can be avoided, and
micro-batches of the best size here. `padded`: sequences of like length together, padded to the longest of their
micro-batch. `flat`: sequences one after the other in one row with `position_ids` that start anew
(DataCollatorWithFlattening), from which the model makes the mask that keeps them apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from contenders import Outcome, StepTimer, Weights, add_arguments, print_table, take_turns, weights_moved
from torch.utils.data import SequentialSampler

from megatron_klear.config.load import load_recipe
from megatron_klear.config.recipe import SftRecipe
from megatron_klear.data.sft import load_sft
from megatron_klear.data.template import load_tokenizer
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.run import open_run
from megatron_klear.training.sft import SftTrainer

LR, LONGEST, MEDIAN, SIGMA = 1e-4, 256, 40, 0.8
# Sequences in a micro-batch of each way to give them to Trainer; --trainer-batch tries another.
BEST_BATCH = {"padded": 16, "flat": 4}


def write_sequences(folder: Path, count: int) -> Path:
    """Demonstrations of ragged lengths, the same in every process."""
    numbers, path = random.Random(0), folder / "ragged.jsonl"
    rows = []
    for _ in range(count):
        length = min(int(numbers.lognormvariate(0, SIGMA) * MEDIAN) + 4, LONGEST - 12)
        response = "".join(numbers.choice("0123456789+-*=") for _ in range(length))
        rows.append({"prompt": f"{numbers.randint(10, 99)}+{numbers.randint(10, 99)}=", "response": response})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, args: argparse.Namespace) -> SftRecipe:
    """Ours."""
    raw: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs" / "sft"), "tensorboard": False},
        "model": {"hf_checkpoint": str(folder / "model"), "params_dtype": "float32"},
        "data": {"path": str(write_sequences(folder, args.samples)), "max_length": LONGEST},
        "train_iters": args.warmup + args.steps,
        "batch": {"global_batch_size": args.samples, "max_tokens_per_gpu": 4096},
        "optimizer": {"lr": LR, "weight_decay": 0.0, "clip_grad": 1.0},
        "checkpoint": {"overwrite": True},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_recipe(path, kind="sft")


def counts_of(lengths: Sequence[int], loss_tokens: int, args: argparse.Namespace) -> dict[str, int]:
    """Work of the measured steps; `loss_tokens` are those of all of them."""
    return {"tokens": sum(lengths) * args.steps, "loss_tokens": loss_tokens, "updates": args.steps}


def ours(folder: Path, args: argparse.Namespace) -> Outcome:
    """Steps of `megatron-klear sft`, packing included."""
    config, timer = recipe(folder, args), StepTimer(args.warmup)
    rows: list[dict[str, float]] = []
    with open_run(config, decay_iters=1, head=HeadSettings()) as run:
        before = {name: tensor.clone() for name, tensor in run.policy.export_weights()}
        trainer = SftTrainer(run, config)
        assert trainer.data is not None
        for step in range(1, args.warmup + args.steps + 1):
            rows.append(trainer.sft_step(step))
            timer.step_ended()
        moved = weights_moved(before, dict(run.policy.export_weights()))
        lengths = [len(sample.token_ids) for sample in trainer.data.samples]
    loss_tokens = int(sum(row["train/num_tokens"] for row in rows[args.warmup :]))
    return Outcome(timer.seconds, counts_of(lengths, loss_tokens, args), moved)


def transformers_trainer(folder: Path, args: argparse.Namespace, way: str) -> Outcome:
    """Trainer's steps, from the end of one to the end of the next."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    timer = StepTimer(args.warmup)
    batch = args.trainer_batch or BEST_BATCH[way]
    samples = load_sft(recipe(folder, args).data, load_tokenizer(folder / "model")).samples
    # Sequences of like length share a micro-batch; all of them make an update, so their order changes nothing else.
    rows = [
        {
            "input_ids": sample.token_ids,
            "labels": [t if on else -100 for t, on in zip(sample.token_ids, sample.loss_mask, strict=True)],
        }
        for sample in sorted(samples, key=lambda sample: len(sample.token_ids))
    ]
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = (
        DataCollatorWithFlattening()
        if way == "flat"
        else DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder / "model"))
    )
    loss_tokens: list[int] = []

    def collate_and_count(features: list[dict[str, Any]]) -> dict[str, Any]:
        made = collate(features)
        loss_tokens.append(int((torch.as_tensor(made["labels"])[:, 1:] != -100).sum()))
        return made

    class Ends(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            timer.step_ended()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> SequentialSampler:
            return SequentialSampler(rows)

    parts = -(-args.samples // batch)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "runs" / way),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=parts,
            max_steps=args.warmup + args.steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,  # type: ignore[arg-type]  a list is what a dataset of torch must be
        data_collator=collate_and_count,
        callbacks=[Ends()],
    )
    before: Weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == args.warmup + args.steps
    measured = sum(loss_tokens[args.warmup * parts : (args.warmup + args.steps) * parts])
    lengths = [len(row["input_ids"]) for row in rows]
    return Outcome(timer.seconds, counts_of(lengths, measured, args), weights_moved(before, model.state_dict()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--samples", type=int, default=256, help="sequences of an update")
    parser.add_argument("--trainer-batch", type=int, help="sequences of one of Trainer's micro-batches")
    args = parser.parse_args()
    rounds = take_turns(
        __file__,
        {
            "ours": ours,
            "padded": lambda folder, args: transformers_trainer(folder, args, "padded"),
            "flat": lambda folder, args: transformers_trainer(folder, args, "flat"),
        },
        args,
    )
    print_table(rounds, peers=["padded", "flat"])
    moved = [outcome.weights_moved for found in rounds for outcome in found.values()]
    # The same gradients up to rounding, so the same steps.
    assert max(moved) < 1.02 * min(moved), f"contenders learnt different things: weights moved by {moved}"
    print(f"weights moved alike: by {statistics.mean(moved):.3e} on average, within {max(moved) / min(moved) - 1:.1%}")


if __name__ == "__main__":
    main()
