"""What SFT and RL runs share: folders, tokenizer, policy, engine, recorder; opened and closed in one place."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_klear.checkpoint.hf import HfExport, HfWriter, export_folder, open_folder
from megatron_klear.checkpoint.store import TRACKER, CheckpointStore, latest_step
from megatron_klear.config.load import dump_recipe
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.config.recipe import RewardConfig, RlRecipe, SftRecipe
from megatron_klear.data.packing import PackSpec, flatten, unflatten
from megatron_klear.data.prompts import ItemStream
from megatron_klear.data.template import ChatTokenizer, load_tokenizer
from megatron_klear.errors import CheckpointError, ConfigError
from megatron_klear.models.build import DTYPES, ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.models.random_init import random_source
from megatron_klear.parallel.broadcast import broadcast_number, scatter_to_replicas
from megatron_klear.parallel.topology import ParallelContext, parallel_context
from megatron_klear.protocols import RewardFn
from megatron_klear.report.console import step_line
from megatron_klear.report.record import RunRecorder
from megatron_klear.rewards.registry import build_reward
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.training.evaluate import Evaluator, load_evaluator
from megatron_klear.training.health import NonFiniteGuard
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import HeadSettings, Policy, build_policy
from megatron_klear.types import TrainBatch
from megatron_klear.weight_sync.inprocess import InProcessSync

RECIPE_FILE = "recipe.yaml"
# Checkpoints of the models beside the policy, in folders beside its own.
CRITIC_FOLDER, REFERENCE_FOLDER = "critic", "reference"
_OUTPUTS = (RECIPE_FILE, "metrics.jsonl", "samples.jsonl", "tensorboard", "nonfinite", "curves.png", "report.html")


@dataclass(frozen=True, slots=True)
class MainSide:
    """What only rank 0 has: text, rewards, the engine and everything a person looks at."""

    tokenizer: ChatTokenizer
    engine: EmbeddedEngine
    reward_fn: RewardFn | None
    evaluator: Evaluator | None
    recorder: RunRecorder


@dataclass(slots=True)
class Run:
    """An open run on one rank."""

    recipe: SftRecipe | RlRecipe
    context: ParallelContext
    shape: Qwen3Shape
    policy: Policy
    sync: InProcessSync
    store: CheckpointStore
    guard: NonFiniteGuard
    main: MainSide | None
    resumed: dict[str, Any] = field(default_factory=dict)
    """`common` state of the checkpoint that this run goes on from; empty for a fresh run."""
    before_save: list[Callable[[int], None]] = field(default_factory=list)
    """Called with the step before the policy is saved: what must be on disk when the tracker moves. Collectives."""

    @property
    def start_step(self) -> int:
        """First step to do, counted from 1."""
        return int(self.resumed.get("step", 0)) + 1

    def push_weights(self) -> float:
        """Bring the engine up to date, on every rank; seconds."""
        return self.sync.push(self.policy.export_weights(), self.policy.version).seconds

    def evaluate(self, step: int) -> float | None:
        """Held-out accuracy of the current weights, on every rank; None where the recipe has no evaluation."""
        if self.recipe.eval.prompt_data is None:
            return None
        self.push_weights()
        accuracy = 0.0
        if self.main is not None and self.main.evaluator is not None:
            started = time.perf_counter()
            result = self.main.evaluator.run(self.main.engine)
            accuracy = result.value
            seconds = time.perf_counter() - started
            self.main.recorder.log(step, {"eval/accuracy": accuracy, "perf/eval_time": seconds})
            tqdm.write(
                f"eval after step {step}: {result.num_correct} of {result.num_problems} right"
                f" ({accuracy:.1%}) in {seconds:.1f} s"
            )
        return broadcast_number(accuracy, self.context)

    def save(self, step: int, stream: Mapping[str, int] | None) -> None:
        """Write a checkpoint of this step. `stream` is the data cursor, known on rank 0."""
        started = time.perf_counter()
        for save_companion in self.before_save:
            save_companion(step)
        cursor = {} if stream is None else {f"stream/{key}": value for key, value in stream.items()}
        common = {"step": step, "version": self.policy.version, **self._same_everywhere(cursor)}
        folder = self.store.save(step, self.policy.stage, self.policy.optimizer, common)
        if self.main is not None:
            tqdm.write(f"saved {folder} in {time.perf_counter() - started:.1f} s")

    def _same_everywhere(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Rank 0's cursor on every rank: Megatron checks that common state is equal."""
        return {key: int(broadcast_number(numbers.get(key, 0), self.context)) for key in STREAM_KEYS}

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
            batches.append(unflatten(ints, floats))
        return batches


STREAM_KEYS = ("stream/num_items", "stream/seed", "stream/epoch", "stream/position")


@contextlib.contextmanager
def open_run(
    recipe: SftRecipe | RlRecipe,
    *,
    decay_iters: int,
    head: HeadSettings = HeadSettings(),  # noqa: B008  frozen
) -> Iterator[Run]:
    """Everything a loop needs, on every rank. Resumes where the recipe says so."""
    shape = read_shape(recipe.model.hf_checkpoint)
    save_dir = Path(recipe.checkpoint.save or Path(recipe.run.output_dir) / "checkpoints")
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(parallel_context(recipe.parallel))
        if context.is_main:
            _guard_folders(recipe, save_dir)
        # Nobody reads the folder before rank 0 has put it in order.
        broadcast_number(0, context)
        store = CheckpointStore(save_dir, context)
        settings = LearnerSettings(
            recipe.parallel, recipe.optimizer, recipe.model.params_dtype, decay_iters=decay_iters
        )
        policy = build_policy(shape, _filler(recipe, shape, context), context, settings, head)
        resumed: dict[str, Any] = {}
        if recipe.checkpoint.resume:
            resumed = store.load(policy.stage, policy.optimizer)
            policy.version = int(resumed["version"])
        main = None
        if context.is_main:
            main = _open_main_side(recipe, shape, resumed.get("step"), stack)
        guard = NonFiniteGuard(recipe.health, Path(recipe.run.output_dir) / "nonfinite")
        sync = InProcessSync(main.engine if main else None)
        yield Run(recipe, context, shape, policy, sync, store, guard, main, resumed)


def _guard_folders(recipe: SftRecipe | RlRecipe, save_dir: Path) -> None:
    """Refuse to mix two runs in one folder; clear it where the recipe asks for that."""
    output = Path(recipe.run.output_dir)
    stores = [save_dir, save_dir / CRITIC_FOLDER, save_dir / REFERENCE_FOLDER]
    found = [output / name for name in _OUTPUTS if (output / name).exists()]
    found += [path for store in stores for path in sorted(store.glob("iter_*"))]
    if recipe.checkpoint.resume:
        if latest_step(save_dir) is None:
            raise CheckpointError(
                f"checkpoint.resume is true but {save_dir} holds no checkpoint; start without it,"
                " or correct checkpoint.save"
            )
    elif found and not recipe.checkpoint.overwrite:
        raise ConfigError(
            f"{found[0]} belongs to an earlier run; expected an empty output_dir and save folder. Go on from it with"
            " checkpoint.resume=true, delete it with checkpoint.overwrite=true, or choose another run.output_dir"
        )
    elif found:
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for store in stores:
            (store / TRACKER).unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)


def _filler(recipe: SftRecipe | RlRecipe, shape: Qwen3Shape, context: ParallelContext) -> Callable[[ModelStage], None]:
    """Where the starting weights come from."""
    table = qwen3_table(shape)
    model = recipe.model

    @torch.no_grad()
    def fill(stage: ModelStage) -> None:
        if recipe.checkpoint.resume:
            # The checkpoint overwrites them; zeros until then, so that nothing uninitialised is ever stepped on.
            for parameter in stage.core.parameters():
                parameter.zero_()
        elif model.load is not None:
            CheckpointStore(model.load, context).load(stage)
        elif model.random_init:
            source = random_source(table, seed=recipe.run.seed, std=shape.initializer_range)
            import_weights(stage, table, source)
        else:
            with open_folder(model.hf_checkpoint, shape) as source:
                import_weights(stage, table, source)

    return fill


def _open_main_side(
    recipe: SftRecipe | RlRecipe, shape: Qwen3Shape, resume_step: int | None, stack: contextlib.ExitStack
) -> MainSide:
    tokenizer = load_tokenizer(recipe.model.hf_checkpoint)
    slots = recipe.rollout.max_running_requests if isinstance(recipe, RlRecipe) else 256
    engine = EmbeddedEngine(shape, max_running_requests=slots)
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
            resume_step=resume_step,
        )
    )
    (Path(recipe.run.output_dir) / RECIPE_FILE).write_text(dump_recipe(recipe))
    return MainSide(tokenizer, engine, reward_fn, evaluator, recorder)


def pack_spec(run: Run) -> PackSpec:
    """How this run's updates are split."""
    parallel = run.recipe.parallel
    multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return PackSpec(run.context.topology.data_size, run.recipe.batch.max_tokens_per_gpu, multiple)


def restore_stream(run: Run, stream: ItemStream) -> None:
    """Put a data order where the checkpoint left it; a fresh run starts at the beginning."""
    if run.resumed:
        stream.restore({key.removeprefix("stream/"): int(run.resumed[key]) for key in STREAM_KEYS})


def loop(
    run: Run,
    total: int,
    do_step: Callable[[int], dict[str, float]],
    *,
    stream: Callable[[], Mapping[str, int] | None],
    keys: Sequence[str],
) -> None:
    """Steps start_step..total with a progress bar, a line a step, evaluations and checkpoints."""
    config = run.recipe
    if run.start_step == 1 and config.eval.eval_before_train:
        run.evaluate(0)
    bar = tqdm(
        range(run.start_step, total + 1),
        initial=run.start_step - 1,
        total=total,
        desc=config.run.name,
        # None hides the bar where there is no terminal; the lines are enough in a log file.
        disable=None if run.main is not None else True,
        dynamic_ncols=True,
    )
    for step in bar:
        started = time.perf_counter()
        metrics = do_step(step)
        metrics["perf/step_time"] = time.perf_counter() - started
        if run.main is not None:
            run.main.recorder.log(step, metrics)
            tqdm.write(step_line(step, total, metrics, keys=keys))
        interval = config.eval.eval_interval
        if step == total or (interval and step % interval == 0):
            run.evaluate(step)
        if step == total or (config.checkpoint.save_interval and step % config.checkpoint.save_interval == 0):
            run.save(step, stream())
    run.export()
