"""Reinforcement learning: one step is `rl_step`, read it top to bottom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron_klear.config.loss import UserLossConfig
from megatron_klear.config.recipe import RlRecipe
from megatron_klear.data.aggregation import Aggregation
from megatron_klear.data.packing import pack, split_updates
from megatron_klear.data.prompts import ItemStream
from megatron_klear.errors import DataError
from megatron_klear.losses.advantages import build_advantage
from megatron_klear.losses.registry import build_loss
from megatron_klear.losses.terms import engine_difference
from megatron_klear.metrics import merge, results
from megatron_klear.parallel.broadcast import main_first, reduce_metrics
from megatron_klear.rollout.replay import load_rollout, save_rollout
from megatron_klear.rollout.sampler import (
    SamplingPlan,
    SelectionContext,
    assign_advantages,
    merged,
    sample,
    score,
    select,
)
from megatron_klear.rollout.stream import GroupStream, StreamSettings
from megatron_klear.training.annotate import annotate, last_stage
from megatron_klear.training.command import recipe_of
from megatron_klear.training.companions import build_companions
from megatron_klear.training.credit import gae_advantages, penalised_advantages
from megatron_klear.training.evaluate import readable_prompts
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.health import ConstantRewardAlarm, check_engine_agrees, check_first_update
from megatron_klear.training.observe import record_samples
from megatron_klear.training.run import MainSide, Run, loop, open_run, pack_spec
from megatron_klear.types import Prompt, RolloutBatch, Sample, StepReport, TrainBatch

ENGINE_DIFFERENCE = "train/train_rollout_logprob_abs_diff"
LINE = (
    "rollout/reward",
    "rollout/accuracy",
    "rollout/response_len_mean",
    "train/loss",
    "train/grad_norm",
    "train/clip_fraction_low",
    "train/clip_fraction_high",
    ENGINE_DIFFERENCE,
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


class _NothingAhead:
    """In the place of a `GroupStream`'s state where no prompt is ever on its way: a run may change its engine."""

    def state(self) -> dict[str, Any]:
        """As a stream's that is empty."""
        return {"serial": 0, "again": []}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A stream's prompts are passed over."""
        if state["again"]:
            tqdm.write(f"{len(state['again'])} prompts that were on their way to servers are passed over")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rank 0's half of a step: the rollout, the samples of each update, and their batches (one a replica)."""

    rollout: RolloutBatch = RolloutBatch(())  # noqa: RUF009  frozen
    updates: Sequence[Sequence[Sample]] = ()
    batches: Sequence[Sequence[TrainBatch]] = ()


class RlTrainer:
    """The parts of a recipe that a step uses, built once."""

    def __init__(self, run: Run, recipe: RlRecipe) -> None:
        self.run = run
        self.recipe = recipe
        with main_first():
            self.source = _load_prompts(run, recipe)
            self.stream = self._open_stream()
        self.old_logprobs = recipe.train.old_logprobs
        self.loss = build_loss(recipe.loss, recipe.kl, on_policy=self.old_logprobs == "current")
        self.advantage = build_advantage(recipe.advantage)
        self.companions = build_companions(run, recipe)
        self.aggregation = Aggregation(recipe.loss.loss_agg_mode, recipe.loss.loss_scale_factor)
        self.alarm = ConstantRewardAlarm(recipe.health)
        run.checkpoints.add_state("reward_alarm", self.alarm)
        self.shares_gpus = recipe.servers is not None and recipe.servers.colocate
        self.checked = False

    def rl_step(self, step: int) -> dict[str, float]:
        """Sample, score, select, pack on rank 0; train on every rank; bring the engine up to date."""
        run, clock = self.run, _Clock()
        plan = run.on_main(lambda main: self._plan(main, step)) or StepPlan()
        clock.lap("rollout_time")
        if self.shares_gpus:
            run.sync.release(run.policy.version)
        batches = run.distribute(plan.batches if run.main is not None else None)
        metrics = annotate(batches, self.companions.annotators(run.policy, self.recipe))
        if batches and self.old_logprobs == "recompute":
            self._check_engine(metrics)
        self._assign_credit(batches, plan)
        clock.lap("annotate_time")
        reports = [
            self._update(step, batch, plan, first=batch is batches[0], last=batch is batches[-1]) for batch in batches
        ]
        clock.lap("train_time")
        run.push_weights()
        self.companions.after_step(step, run.policy.stage)
        clock.lap("update_weights_time")
        return self._metrics(plan.rollout, reports, metrics) | _counts(batches) | self._of_servers() | clock.laps

    def _plan(self, main: MainSide, step: int) -> StepPlan:
        """Rank 0's half of a step: groups with rewards and advantages, and what every update will see."""
        debug = self.recipe.debug
        if debug.load_rollout_data is not None:
            rollout = load_rollout(debug.load_rollout_data, step)
        else:
            rollout = self._sample(main, step)
        if debug.save_rollout_data is not None:
            save_rollout(debug.save_rollout_data, step, rollout)
        if self.advantage is not None:
            assign_advantages(rollout, self.advantage)
        if debug.rollout_only or not rollout.samples:
            return StepPlan(rollout)
        most = self.recipe.batch.global_batch_size
        updates = split_updates(rollout.samples, most)
        if self.old_logprobs == "current" and len(updates) > 1:
            # Sampled here they cannot be more than the recipe's rules allow, but saved ones can.
            raise DataError(
                f"step {step} has {len(rollout.samples)} samples, in updates of batch.global_batch_size {most} several:"
                " from the second on ratios are not 1, as train.old_logprobs current takes them to be; give the recipe"
                " the rollout and batch sizes of the run that saved them, or set train.old_logprobs recompute"
            )
        spec, alpha = pack_spec(self.run), self.recipe.loss.sft_loss_coef
        batches = [pack(part, spec, sft_loss_coef=alpha, aggregation=self.aggregation) for part in updates]
        return StepPlan(rollout, updates, batches)

    def _sample(self, main: MainSide, step: int) -> RolloutBatch:
        """Groups that can teach something: sampled, scored, selected, and refilled as often as the recipe allows."""
        run, recipe = self.run, self.recipe
        if self.stream is not None:
            return self.stream.take(run.policy.version)
        assert main.reward_fn is not None and self.source is not None
        rollout = RolloutBatch(())
        limits = SelectionContext(
            run.policy.version, recipe.rollout.rollout_max_response_len, seed=recipe.run.seed + step
        )
        for number in range(1 + recipe.selection.max_resample_rounds):
            missing = recipe.rollout.rollout_batch_size - len(rollout.groups)
            if missing == 0:
                break
            drawn = sample(main.engines.engine, self.source.next(missing), self._sampling(step, number))
            scored = score(drawn, main.reward_fn, main.tokenizer.decode_response)
            rollout = merged(rollout, select(scored, recipe.selection, limits))
        return rollout

    def _open_stream(self) -> GroupStream | None:
        """Where groups come from if servers make them; rank 0 only."""
        if self.source is None or self.run.main is None:
            return None
        if self.run.main.engines.bridge is None:
            self.run.checkpoints.add_state("rollouts", _NothingAhead())
            return None
        rollout, selection = self.recipe.rollout, self.recipe.selection
        settings = StreamSettings(
            rollout.rollout_batch_size,
            rollout.over_sampling_batch_size or rollout.rollout_batch_size,
            rollout.max_async_steps,
            selection.max_resample_rounds * rollout.rollout_batch_size,
            rollout.partial_rollout,
            selection.max_staleness,
        )
        mailbox, source = self.run.main.engines.bridge.mailbox, self.source
        stream = GroupStream(mailbox, source.prompts, source.stream, settings, self._sampling(0, 0))
        self.run.checkpoints.add_state("rollouts", stream)
        return stream

    def _sampling(self, step: int, number: int) -> SamplingPlan:
        rollout = self.recipe.rollout
        assert self.run.main is not None
        return SamplingPlan(
            rollout.n_samples_per_prompt,
            rollout.rollout_max_response_len,
            rollout.rollout_temperature,
            self.run.main.tokenizer.stop_token_ids,
            seed=self.recipe.run.seed,
            step=step,
            round=number,
        )

    def _assign_credit(self, batches: list[TrainBatch], plan: StepPlan) -> None:
        """Advantages that need the critic or the reference; the others are in the batches already."""
        kl = self.recipe.kl if self.recipe.kl.kl_coef > 0 and self.recipe.kl.kl_in == "reward" else None
        if not batches:
            return
        if self.advantage is None:
            assert self.recipe.critic is not None
            gae_advantages(batches, self.recipe.critic, kl, self.run.context)
        elif kl is not None:
            penalised_advantages(
                batches,
                plan.rollout.groups,
                plan.updates,
                kl=kl,
                advantage_fn=self.advantage,
                context=self.run.context,
            )

    def _update(self, step: int, batch: TrainBatch, plan: StepPlan, *, first: bool, last: bool) -> StepReport:
        run = self.run
        critic = self.companions.update_critic(step, batch)
        if critic is not None and step <= self.companions.critic_warmup_steps:
            return critic
        outcome = run.policy.update(batch, self.loss)
        report = outcome.report
        run.guard.check(step, report, run.policy, batch)
        if self.old_logprobs != "recompute" and first:
            report = replace(report, metrics=report.metrics | self._engine_difference(batch, outcome.logprobs))
        if self.old_logprobs == "current":
            for micro_batch, logprobs in last_stage(batch, outcome.logprobs):
                micro_batch.old_logprobs = logprobs
        if not self.checked and not report.skipped:
            check_first_update(report.metrics, on_policy=self.old_logprobs != "rollout")
            self.checked = True
        if last:
            record_samples(run, step, batch, outcome.logprobs, plan.updates[-1] if plan.updates else (), self.loss)
        return report if critic is None else report.joined(critic)

    def _engine_difference(self, batch: TrainBatch, logprobs: list[Tensor]) -> dict[str, float]:
        """What `annotate` finds where it makes a pass. The update was made, but nothing is saved or sampled from it."""
        parts = [engine_difference(current, micro_batch) for micro_batch, current in last_stage(batch, logprobs)]
        found = reduce_metrics(merge(parts), self.run.context)
        self._check_engine(found)
        return found

    def _check_engine(self, metrics: Mapping[str, float]) -> None:
        """Where every token is of the weights that the step began with; older tokens must differ, and only the probe
        of each push says that the servers are right."""
        rollout = self.recipe.rollout
        if rollout.max_async_steps == 0 and not rollout.partial_rollout:
            check_engine_agrees(metrics[ENGINE_DIFFERENCE], self.recipe.health)

    def _metrics(
        self, rollout: RolloutBatch, reports: list[StepReport], annotated: Mapping[str, float]
    ) -> dict[str, float]:
        """Everything this step is logged with; means over its updates for what an update reports."""
        numbers = results(rollout.metrics) | dict(annotated)
        numbers |= {f"rollout/dropped/{reason}": float(count) for reason, count in rollout.dropped.items()}
        if "rollout/reward" in numbers:
            self.alarm.see(numbers["rollout/reward"])
        for name in reports[0].metrics if reports else ():
            values = [report.metrics[name] for report in reports if name in report.metrics]
            numbers[name] = sum(values) / len(values)
        return numbers

    def _of_servers(self) -> dict[str, float]:
        """How the servers fare, on rank 0."""
        main = self.run.main
        if main is None or main.engines.bridge is None:
            return {}
        status = main.engines.bridge.process.status()
        return {
            "rollout/num_engines_serving": float(sum(engine.state == "serving" for engine in status.engines)),
            "rollout/num_restarts": float(sum(engine.num_restarts for engine in status.engines)),
            "rollout/num_requests_retried": float(status.num_retried),
            "rollout/num_answers_discarded": float(status.num_discarded),
            "rollout/num_requests_continued": float(status.num_continued),
        }


def _counts(batches: Sequence[TrainBatch]) -> dict[str, float]:
    return {
        "train/num_updates": float(len(batches)),
        "train/num_dummy_micro_batches": float(sum(batch.num_dummy_micro_batches for batch in batches)),
    }


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
    stream = ItemStream(len(kept.prompts), recipe.run.seed, fingerprint=kept.fingerprint)
    run.checkpoints.add_state("prompts", stream)
    return PromptSource(kept.prompts, stream)


def head_settings(recipe: RlRecipe) -> HeadSettings:
    """What the output layer must give for this recipe's loss."""
    # A loss of your own may use the entropy; without a gradient it would do so in vain.
    bonus = isinstance(recipe.loss, UserLossConfig) or recipe.loss.entropy_coef > 0
    # Advantages are final when packed, unless a critic or a penalty in the reward makes them later.
    final = recipe.advantage.type != "gae" and recipe.kl.kl_coef == 0
    return HeadSettings(
        recipe.rollout.rollout_temperature,
        entropy_gradient=bonus,
        advantage_decides=final and not bonus,
        path=recipe.head.path,
        chunk_bytes=recipe.head.chunk_bytes,
    )


def train(recipe: RlRecipe) -> None:
    """Run a recipe to its end, on every rank."""
    decay_iters = recipe.optimizer.lr_decay_iters or 1
    with open_run(recipe, decay_iters=decay_iters, head=head_settings(recipe)) as run:
        trainer = RlTrainer(run, recipe)
        run.push_weights()

        loop(run, recipe.rollout.num_rollout, trainer.rl_step, keys=LINE)


def main(argv: list[str]) -> int:
    """`megatron-klear rl RECIPE [section.key=value ...]`."""
    recipe = recipe_of("rl", argv)
    assert isinstance(recipe, RlRecipe)
    train(recipe)
    return 0
