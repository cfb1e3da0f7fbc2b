"""What SFT and RL runs share: folders, tokenizer, policy, engine, recorder; opened and closed in one place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from megatron_klear.checkpoint.hf import HfExport, HfWriter, export_folder, open_folder
from megatron_klear.checkpoint.retention import Retention
from megatron_klear.checkpoint.store import CheckpointStore, Saved
from megatron_klear.config.load import dump_recipe
from megatron_klear.config.model import Qwen3Shape, model_shape
from megatron_klear.config.recipe import CheckpointConfig, Recipe, RewardConfig, RlRecipe, SftRecipe
from megatron_klear.data.balance import TokenCost
from megatron_klear.data.packing import PackSpec, flatten, unflatten
from megatron_klear.data.template import ChatTokenizer, load_tokenizer
from megatron_klear.errors import WeightsWanted
from megatron_klear.models.build import DTYPES, ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.backend import attention_kernel
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.models.random_init import random_source
from megatron_klear.parallel.broadcast import broadcast_number, main_first, scatter_to_replicas
from megatron_klear.parallel.context import split_batch
from megatron_klear.parallel.rng import seed_rank
from megatron_klear.parallel.topology import ParallelContext, parallel_context
from megatron_klear.protocols import RewardFn, WeightSync
from megatron_klear.report.console import push_line, step_line
from megatron_klear.report.record import RunRecorder
from megatron_klear.rewards.registry import build_reward
from megatron_klear.training.engines import Engines, open_engines, open_sync, uses_servers
from megatron_klear.training.evaluate import Evaluator, load_evaluator
from megatron_klear.training.folders import (
    check_saved,
    check_tokenizer,
    claim_folders,
    save_folder,
    write_recipe,
)
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.health import NonFiniteGuard
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import Policy, build_policy
from megatron_klear.training.probe import TrainerProbe
from megatron_klear.training.saving import RunCheckpoints
from megatron_klear.training.stopping import StopSignals
from megatron_klear.types import Probe, TrainBatch
from megatron_klear_kernels.implementations import small_kernels
from megatron_klear_kernels.linear_policy_loss.paths import choose_path

ACCURACY = "eval/accuracy"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MainSide:
    """What only rank 0 has: text, rewards, the engine and everything a person looks at."""

    tokenizer: ChatTokenizer
    engines: Engines
    reward_fn: RewardFn | None
    evaluator: Evaluator | None
    recorder: RunRecorder


@dataclass(frozen=True, slots=True)
class Run:
    """An open run on one rank."""

    recipe: SftRecipe | RlRecipe
    context: ParallelContext
    shape: Qwen3Shape
    policy: Policy
    sync: WeightSync
    probe: TrainerProbe | None
    """What servers must agree on after a push; None without servers."""
    checkpoints: RunCheckpoints
    guard: NonFiniteGuard
    stop: StopSignals
    main: MainSide | None

    def push_weights(self) -> float:
        """Bring the engines up to date, on every rank; seconds."""
        probe = None
        if self.probe is not None:
            probe = Probe(self.probe.token_ids, tuple(self.probe.logprobs()))
        with main_first():
            report = self.sync.push(self.policy.export_weights(), self.policy.version, probe)
        if self.main is not None and self.probe is not None:
            tqdm.write(push_line(report))
        return report.seconds

    def on_main(self, work: Callable[[MainSide], T]) -> T | None:
        """Rank 0's `work`; None on other ranks. Whenever its servers want weights, all ranks push them, and it is asked
        again: what it had done until then must not be lost.
        """
        while True:
            found, wanted = None, ""
            with main_first():
                if self.main is not None:
                    try:
                        found = work(self.main)
                    except WeightsWanted as error:
                        wanted = str(error)
            if not broadcast_number(bool(wanted), self.context):
                return found
            if wanted:
                tqdm.write(f"weights are pushed once more: {wanted}")
            self.push_weights()

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy of the current weights, on every rank; empty where the recipe has no evaluation."""
        if self.recipe.eval.prompt_data is None:
            return {}
        # After a step they are there already.
        is_behind = self.main is not None and self.main.engines.engine.weight_version != self.policy.version
        if broadcast_number(is_behind, self.context):
            self.push_weights()
        accuracy = self.on_main(lambda main: _evaluate(main, step))
        return {ACCURACY: broadcast_number(accuracy or 0.0, self.context)}

    def export(self) -> HfExport | None:
        """Write the Hugging Face folder that the recipe asks for; a collective. The export on rank 0."""
        if self.recipe.export.hf_dir is None:
            return None
        writer = None
        if self.main is not None:
            writer = HfWriter(
                self.recipe.export.hf_dir,
                self.shape,
                template=self.recipe.model.hf_checkpoint,
                max_shard_bytes=self.recipe.export.max_shard_bytes,
            )
        dtype = DTYPES[self.recipe.model.params_dtype]
        export = export_folder(self.policy.export_weights(), writer, dtype=dtype)
        if export is not None:
            tqdm.write(f"exported {export.num_tensors} tensors ({export.num_bytes / 1e6:.1f} MB) to {export.folder}")
        return export

    def distribute(self, updates: Sequence[Sequence[TrainBatch]] | None) -> list[TrainBatch]:
        """Rank 0's updates (one batch a replica each) as this rank's batches, on its device."""
        count = int(broadcast_number(len(updates or ()), self.context))
        batches = []
        for i in range(count):
            flat = None if updates is None else [flatten(batch) for batch in updates[i]]
            ints = scatter_to_replicas(None if flat is None else [f[0] for f in flat], torch.int64, self.context)
            floats = scatter_to_replicas(None if flat is None else [f[1] for f in flat], torch.float32, self.context)
            batch = split_batch(unflatten(ints, floats), self.context)
            self.policy.head.choose_rows(batch.micro_batches)
            batches.append(batch)
        return batches


def _evaluate(main: MainSide, step: int) -> float:
    """Accuracy of the engines' weights, written down."""
    assert main.evaluator is not None
    started = time.perf_counter()
    result = main.evaluator.run(main.engines.engine)
    seconds = time.perf_counter() - started
    main.recorder.log(step, {ACCURACY: result.value, "perf/eval_time": seconds})
    tqdm.write(
        f"eval after step {step}: {result.num_correct} of {result.num_problems} right"
        f" ({result.value:.1%}) in {seconds:.1f} s"
    )
    return result.value


@contextlib.contextmanager
def open_run(
    recipe: SftRecipe | RlRecipe,
    *,
    decay_iters: int,
    head: HeadSettings,
) -> Iterator[Run]:
    """Everything a loop needs, on every rank. Goes on from a checkpoint where the recipe says so."""
    shape = model_shape(recipe.model)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        context = stack.enter_context(parallel_context(recipe.parallel))
        seed_rank(recipe.run.seed, context.topology.rank)
        store = CheckpointStore(save_folder(recipe), context, _retention(recipe.checkpoint))
        saved = _find_start(recipe, store, stack)
        settings = LearnerSettings(
            recipe.parallel,
            recipe.optimizer,
            recipe.model.params_dtype,
            decay_iters=decay_iters,
            moe_aux_loss_coeff=recipe.model.moe_aux_loss_coeff,
        )
        policy = build_policy(
            shape, _filler(recipe, shape, context, resumes=saved is not None), context, settings, head
        )
        kind = "rl" if isinstance(recipe, RlRecipe) else "sft"
        checkpoints = RunCheckpoints(store, saved, kind=kind, in_background=recipe.checkpoint.async_save)
        checkpoints.add_learner(policy)
        main = None
        with main_first():
            if context.is_main:
                main = _open_main_side(recipe, shape, checkpoints, stack)
                dtype = DTYPES[recipe.model.params_dtype]
                tqdm.write(str(attention_kernel(dtype)))
                tqdm.write(str(small_kernels(context.device.kind == "cuda", dtype)))
                tqdm.write(str(choose_path(head.path, context.device.torch_device)))
        guard = NonFiniteGuard(recipe.health, Path(recipe.run.output_dir) / "nonfinite")
        checkpoints.add_state("guard", guard)
        if saved is not None and not store.restore_rng(saved) and context.is_main:
            tqdm.write(f"{saved.folder} is of another layout: random state of user code starts anew")
        sync = open_sync(recipe, main.engines if main else None, stack, on_cpu=context.device.kind == "cpu")
        run = Run(recipe, context, shape, policy, sync, None, checkpoints, guard, stop, main)
        if uses_servers(recipe):
            run = replace(run, probe=TrainerProbe(policy, pack_spec(run), run.distribute))
        yield run


def _retention(config: CheckpointConfig) -> Retention:
    return Retention(
        config.keep_last, config.keep_every, config.keep_best, config.keep_best_metric, config.keep_best_mode
    )


def _find_start(recipe: Recipe, store: CheckpointStore, stack: contextlib.ExitStack) -> Saved | None:
    """Claim the folders, and find the checkpoint to go on from; None for a fresh start."""
    resumes = False
    with main_first():
        if store.context.is_main:
            resumes = claim_folders(recipe, stack)
            # A run that was killed just before it deleted would otherwise, if it is done, never do so.
            store.clean_up()
    if not broadcast_number(resumes, store.context):
        return None
    saved = store.open(recipe.checkpoint.ckpt_step, verify=recipe.checkpoint.verify_checksums)
    with main_first():
        if store.context.is_main:
            check_saved(saved, recipe)
    return saved


def _filler(
    recipe: Recipe, shape: Qwen3Shape, context: ParallelContext, *, resumes: bool
) -> Callable[[ModelStage], None]:
    """Where the starting weights come from."""
    table = qwen3_table(shape)
    model = recipe.model

    @torch.no_grad()
    def fill(stage: ModelStage) -> None:
        if resumes:
            # The checkpoint overwrites them; zeros until then, so that nothing uninitialised is ever stepped on.
            for parameter in stage.parameters():
                parameter.zero_()
        elif model.load is not None:
            CheckpointStore(model.load, context).load_weights(stage, any_rope=True)
        elif model.random_init:
            source = random_source(table, seed=recipe.run.seed, std=shape.initializer_range)
            import_weights(stage, table, source)
        else:
            with open_folder(model.hf_checkpoint, shape) as source:
                import_weights(stage, table, source)

    return fill


def _open_main_side(
    recipe: Recipe, shape: Qwen3Shape, checkpoints: RunCheckpoints, stack: contextlib.ExitStack
) -> MainSide:
    tokenizer = load_tokenizer(recipe.model.hf_checkpoint)
    checkpoints.recipe, checkpoints.tokenizer = dump_recipe(recipe), tokenizer.fingerprint
    if checkpoints.saved is not None and not recipe.checkpoint.allow_recipe_changes:
        check_tokenizer(checkpoints.saved, tokenizer.fingerprint)
    engines = open_engines(recipe, shape, stack)
    reward: RewardConfig | None = recipe.reward
    reward_fn, evaluator = None, None
    if reward is not None:
        reward_fn = build_reward(reward)
        stack.callback(reward_fn.close)
        evaluator = load_evaluator(recipe.eval, reward, reward_fn, tokenizer, max_context=shape.max_position_embeddings)
    recorder = stack.enter_context(
        RunRecorder(
            recipe.run.output_dir,
            name=recipe.run.name,
            tensorboard=recipe.run.tensorboard,
            wandb_project=recipe.run.wandb_project,
            resume_step=_resume_step(recipe, checkpoints.saved),
        )
    )
    write_recipe(Path(recipe.run.output_dir), checkpoints.recipe)
    return MainSide(tokenizer, engines, reward_fn, evaluator, recorder)


def _resume_step(recipe: Recipe, saved: Saved | None) -> int | None:
    """Up to which step the output that lies there stays; None where there must be none."""
    if saved is not None:
        return saved.manifest.step
    # All that an attempt wrote which was killed before its first checkpoint is done again.
    return -1 if recipe.checkpoint.resume == "auto" else None


def pack_spec(run: Run) -> PackSpec:
    """How this run's updates are split."""
    parallel, pipeline = run.recipe.parallel, run.recipe.parallel.pipeline_model_parallel_size
    gathers_experts = parallel.expert_model_parallel_size > 1 and parallel.moe_token_dispatcher_type == "allgather"
    return PackSpec(
        run.context.topology.data_size,
        run.recipe.batch.max_tokens_per_gpu,
        multiple_of=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
        context_parallel_size=parallel.context_parallel_size,
        # The interleaved schedule sends micro-batches through in groups of the pipeline's size.
        num_micro_batches_multiple=pipeline if (parallel.virtual_pipeline_model_parallel_size or 1) > 1 else 1,
        # The balance loss is a plain mean over micro-batches.
        common_length=pipeline > 1 or gathers_experts or run.recipe.model.moe_aux_loss_coeff > 0,
        cost=TokenCost.of(run.shape),
    )


def loop(run: Run, total: int, do_step: Callable[[int], dict[str, float]], *, keys: Sequence[str]) -> None:
    """Steps start_step..total with a progress bar, a line a step, evaluations and checkpoints; then the export.

    After a stop signal the run is saved at the step's end, and this returns.
    """
    config, checkpoints = run.recipe, run.checkpoints
    start = checkpoints.start_step
    if start == 1 and config.eval.eval_before_train:
        run.evaluate(0)
    bar = tqdm(
        range(start, total + 1),
        initial=start - 1,
        total=total,
        desc=config.run.name,
        # None hides the bar where there is no terminal; the lines are enough in a log file.
        disable=None if run.main is not None else True,
        dynamic_ncols=True,
    )
    for step in bar:
        checkpoints.poll()
        started = time.perf_counter()
        metrics = do_step(step)
        metrics["perf/step_time"] = time.perf_counter() - started
        metrics["perf/checkpoint_time"] = checkpoints.take_seconds()
        if run.main is not None:
            run.main.recorder.log(step, metrics)
            tqdm.write(step_line(step, total, metrics, keys=keys))
        if step == total or _is_due(step, config.eval.eval_interval):
            metrics |= run.evaluate(step)
        signal = run.stop.agreed(run.context)
        if signal or step == total or _is_due(step, config.checkpoint.save_interval):
            checkpoints.save(step, metrics)
        if signal and step < total:
            checkpoints.wait()
            if run.main is not None:
                tqdm.write(f"stopped by {signal} after step {step}; go on with checkpoint.resume=true")
            return
    checkpoints.wait()
    run.export()


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
