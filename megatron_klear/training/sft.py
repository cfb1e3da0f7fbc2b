"""Supervised fine-tuning: the RL step from `pack` on."""

from __future__ import annotations

from tqdm import tqdm

from megatron_klear.config.recipe import SftRecipe
from megatron_klear.data.packing import pack
from megatron_klear.data.prompts import ItemStream
from megatron_klear.data.sft import SftSet, load_sft
from megatron_klear.losses.terms import SftLoss
from megatron_klear.parallel.broadcast import main_first
from megatron_klear.training.command import recipe_of
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.run import Run, loop, open_run, pack_spec

LINE = ("train/loss", "train/grad_norm", "train/lr", "train/num_tokens", "perf/step_time")


class SftTrainer:
    """The parts of a recipe that a step uses, built once."""

    def __init__(self, run: Run, recipe: SftRecipe) -> None:
        self.run = run
        self.recipe = recipe
        with main_first():
            self.data, self.stream = _load_data(run, recipe)
        self.loss = SftLoss()

    def sft_step(self, step: int) -> dict[str, float]:
        """Pack on rank 0, train on every rank."""
        run, updates = self.run, None
        if self.data is not None and self.stream is not None:
            samples = [self.data.samples[i] for i in self.stream.next(self.recipe.batch.global_batch_size)]
            updates = [pack(samples, pack_spec(run))]
        (batch,) = run.distribute(updates)
        report = run.policy.update(batch, self.loss).report
        run.guard.check(step, report, run.policy, batch)
        return report.metrics | {
            "train/num_tokens": float(batch.num_loss_tokens),
            "train/num_dummy_micro_batches": float(batch.num_dummy_micro_batches),
        }


def train(recipe: SftRecipe) -> None:
    """Run a recipe to its end, on every rank."""
    decay_iters = recipe.optimizer.lr_decay_iters or recipe.train_iters
    head = HeadSettings(path=recipe.head.path, chunk_bytes=recipe.head.chunk_bytes)
    with open_run(recipe, decay_iters=decay_iters, head=head) as run:
        loop(run, recipe.train_iters, SftTrainer(run, recipe).sft_step, keys=LINE)


def _load_data(run: Run, recipe: SftRecipe) -> tuple[SftSet | None, ItemStream | None]:
    """Samples and their order, on rank 0."""
    if run.main is None:
        return None, None
    data = load_sft(recipe.data, run.main.tokenizer)
    tqdm.write(f"{len(data.samples)} samples, dropped {dict(data.dropped) or 0}, cut {data.num_truncated}")
    stream = ItemStream(len(data.samples), recipe.run.seed, fingerprint=data.fingerprint)
    run.checkpoints.add_state("samples", stream)
    return data, stream


def main(argv: list[str]) -> int:
    """`megatron-klear sft RECIPE [section.key=value ...]`."""
    recipe = recipe_of("sft", argv)
    assert isinstance(recipe, SftRecipe)
    train(recipe)
    return 0
