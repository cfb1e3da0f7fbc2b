"""Reinforcement learning: one step is `rl_step`, read it top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from tqdm import tqdm

from megatron_klear.config.recipe import RlRecipe
from megatron_klear.data.packing import pack, split_updates
from megatron_klear.data.prompts import ItemStream
from megatron_klear.losses.advantages import GroupAdvantage
from megatron_klear.losses.policy import build_policy_loss, token_mean
from megatron_klear.metrics import Metric, merge, results
from megatron_klear.parallel.broadcast import reduce_metrics
from megatron_klear.rollout.sampler import SamplingPlan, assign_advantages, sample, score, select
from megatron_klear.training.command import recipe_of
from megatron_klear.training.evaluate import readable_prompts
from megatron_klear.training.health import ConstantRewardAlarm, check_engine_agrees, check_first_update
from megatron_klear.training.observe import record_samples
from megatron_klear.training.policy import Policy
from megatron_klear.training.run import Run, loop, open_run, pack_spec, restore_stream
from megatron_klear.types import Prompt, RolloutBatch, StepReport, TrainBatch

LINE = (
    "rollout/reward",
    "rollout/accuracy",
    "rollout/response_len_mean",
    "train/loss",
    "train/grad_norm",
    "train/clip_fraction_low",
    "train/clip_fraction_high",
    "train/train_rollout_logprob_abs_diff",
    "perf/step_time",
)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts in a resumable random order; rank 0 only."""

    prompts: tuple[Prompt, ...]
    stream: ItemStream

    def next(self, count: int) -> list[Prompt]:
        """The next prompts; a new order each epoch."""
        return [self.prompts[i] for i in self.stream.next(count)]


class RlTrainer:
    """The parts of a recipe that a step uses, built once."""

    def __init__(self, run: Run, recipe: RlRecipe) -> None:
        self.run = run
        self.recipe = recipe
        self.source = _load_prompts(run, recipe)
        self.loss = build_policy_loss(recipe.loss)
        self.advantage = GroupAdvantage(recipe.advantage)
        self.alarm = ConstantRewardAlarm(recipe.health)
        self.checked = False

    def rl_step(self, step: int) -> dict[str, float]:
        """Sample, score, select, pack on rank 0; train on every rank; bring the engine up to date."""
        run, recipe, clock = self.run, self.recipe, _Clock()
        updates, rollout = None, RolloutBatch(())
        if run.main is not None and self.source is not None and run.main.reward_fn is not None:
            prompts = self.source.next(recipe.rollout.rollout_batch_size)
            rollout = sample(run.main.engine, prompts, self._plan(step))
            rollout = score(rollout, run.main.reward_fn, run.main.tokenizer.decode_response)
            rollout = select(rollout, recipe.selection, seed=recipe.run.seed + step)
            samples = assign_advantages(rollout, self.advantage)
            parts = split_updates(samples, recipe.batch.global_batch_size) if samples else []
            updates = [pack(part, pack_spec(run), sft_loss_coef=recipe.loss.sft_loss_coef) for part in parts]
        clock.lap("rollout_time")
        batches = run.distribute(updates)
        metrics = annotate(batches, run.policy)
        if batches:
            check_engine_agrees(metrics["train/train_rollout_logprob_abs_diff"], recipe.health)
        clock.lap("old_logprobs_time")
        reports = [self._update(step, batch, rollout, last=batch is batches[-1]) for batch in batches]
        clock.lap("train_time")
        run.push_weights()
        clock.lap("update_weights_time")
        return self._metrics(rollout, reports, metrics) | clock.laps

    def _update(self, step: int, batch: TrainBatch, rollout: RolloutBatch, *, last: bool) -> StepReport:
        run = self.run
        outcome = run.policy.update(batch, self.loss)
        run.guard.check(step, outcome.report, run.policy, batch)
        if not self.checked and not outcome.report.skipped:
            check_first_update(outcome.report.metrics)
            self.checked = True
        if last:
            record_samples(run, step, batch, outcome.logprobs, rollout, self.loss)
        return outcome.report

    def _plan(self, step: int) -> SamplingPlan:
        run, rollout = self.run, self.recipe.rollout
        assert run.main is not None
        return SamplingPlan(
            rollout.n_samples_per_prompt,
            rollout.rollout_max_response_len,
            rollout.rollout_temperature,
            run.main.tokenizer.stop_token_ids,
            seed=self.recipe.run.seed,
            step=step,
        )

    def _metrics(
        self, rollout: RolloutBatch, reports: list[StepReport], annotated: Mapping[str, float]
    ) -> dict[str, float]:
        """Everything this step is logged with; means over its updates for what an update reports."""
        numbers = results(rollout.metrics) | dict(annotated)
        numbers |= {f"rollout/dropped/{reason}": float(count) for reason, count in rollout.dropped.items()}
        if "rollout/reward" in numbers:
            self.alarm.see(numbers["rollout/reward"])
        for name in reports[0].metrics if reports else ():
            numbers[name] = sum(report.metrics[name] for report in reports) / len(reports)
        if reports:
            numbers["train/grad_norm"] = sum(report.grad_norm for report in reports) / len(reports)
            numbers["train/lr"] = reports[-1].lr
        return numbers | {"train/num_updates": float(len(reports))}


def annotate(batches: list[TrainBatch], policy: Policy) -> dict[str, float]:
    """Set `old_logprobs` from the starting policy, on the micro-batches that `update` will use; engine disagreement."""
    parts: list[dict[str, Metric]] = []
    for batch in batches:
        stats = policy.stats(batch)
        for micro_batch, one in zip(batch.micro_batches if stats else [], stats, strict=True):
            micro_batch.old_logprobs = one.logprobs
            difference = (one.logprobs - micro_batch.rollout_logprobs).abs()
            mask = micro_batch.token_scale != 0
            parts.append({"train/train_rollout_logprob_abs_diff": token_mean(difference, mask)})
    return reduce_metrics(merge(parts), policy.context) if batches else {}


class _Clock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"perf/{name}"] = now - self.last
        self.last = now


def _load_prompts(run: Run, recipe: RlRecipe) -> PromptSource | None:
    if run.main is None:
        return None
    kept = readable_prompts(recipe.data, recipe.reward, run.main.tokenizer)
    tqdm.write(f"{len(kept.prompts)} prompts, dropped {dict(kept.dropped) or 0}")
    stream = ItemStream(len(kept.prompts), recipe.run.seed)
    restore_stream(run, stream)
    return PromptSource(kept.prompts, stream)


def train(recipe: RlRecipe) -> None:
    """Run a recipe to its end, on every rank."""
    decay_iters = recipe.optimizer.lr_decay_iters or 1
    with open_run(recipe, decay_iters=decay_iters, temperature=recipe.rollout.rollout_temperature) as run:
        trainer = RlTrainer(run, recipe)
        run.push_weights()

        def cursor() -> Mapping[str, int] | None:
            return trainer.source.stream.state() if trainer.source is not None else None

        loop(run, recipe.rollout.num_rollout, trainer.rl_step, stream=cursor, keys=LINE)


def main(argv: list[str]) -> int:
    """`megatron-klear rl RECIPE [section.key=value ...]`."""
    recipe = recipe_of("rl", argv)
    assert isinstance(recipe, RlRecipe)
    train(recipe)
    return 0
