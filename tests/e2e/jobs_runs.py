"""Jobs that run whole commands on a rank."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass

from helpers.tiny_qwen3 import random_tensors
from megatron_klear import cli
from megatron_klear.config.load import load_recipe
from megatron_klear.errors import TrainingError
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.training.head import HeadSettings
from megatron_klear.training.rl import RlTrainer
from megatron_klear.training.run import open_run


@dataclass(frozen=True)
class Finished:
    """Exit code and what was printed on one rank."""

    code: int
    out: str
    err: str
    warned: list[str]


def command(rank: int, world_size: int, argv: list[str]) -> Finished:
    """`megatron-klear ARGV`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        code = cli.main(argv)
    return Finished(code, out.getvalue(), err.getvalue(), [str(warning.message) for warning in seen])


def stale_engine(rank: int, world_size: int, recipe_path: str) -> str:
    """An rl step whose engine holds other weights than the trainer; the error."""
    recipe = load_recipe(recipe_path, kind="rl", world_size=world_size)
    with open_run(recipe, decay_iters=1, head=HeadSettings()) as run:
        trainer = RlTrainer(run, recipe)
        run.push_weights()
        if run.main is not None:
            other = {name: 0.2 * tensor for name, tensor in random_tensors(run.shape, seed=5).items()}
            engine = run.main.engines.engine
            assert isinstance(engine, EmbeddedEngine)
            engine.load_weights(other.items(), run.policy.version)
        try:
            trainer.rl_step(1)
        except TrainingError as error:
            return str(error)
    return "no error"
