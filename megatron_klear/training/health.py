"""Checks that stop a run, or warn, before it wastes a night."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import torch

from megatron_klear.config.recipe import HealthConfig
from megatron_klear.errors import TrainingError
from megatron_klear.training.learner import Learner
from megatron_klear.types import MicroBatch, StepReport, TrainBatch

# The first update of a step runs on the micro-batches and weights that gave the old log-probs. What remains is the
# order of sums in products that may run in another order on a GPU.
MAX_FIRST_RATIO_DEVIATION = 1e-3
OF_THE_RATIO = ("train/ratio_deviation_max", "train/ppo_kl")


def check_first_update(metrics: Mapping[str, float], *, on_policy: bool = True) -> None:
    """On the first update of a run nothing has moved yet: ratio 1, KL 0, log-probs below 0, entropy above 0.

    Not `on_policy`: ratios are against the engine's log-probs, which differ by rounding; nothing is asked of them.

    Raises:
        TrainingError: listing every number that is not what it must be.
    """
    wanted = {
        "train/ratio_deviation_max": (f"<= {MAX_FIRST_RATIO_DEVIATION}", lambda v: v <= MAX_FIRST_RATIO_DEVIATION),
        "train/ppo_kl": (f"|.| <= {MAX_FIRST_RATIO_DEVIATION}", lambda v: abs(v) <= MAX_FIRST_RATIO_DEVIATION),
        "train/logprob": ("< 0", lambda v: v < 0),
        "train/entropy": ("> 0", lambda v: v > 0),
    }
    wrong = [
        f"{name} = {metrics[name]:.6g}, expected {rule}"
        for name, (rule, ok) in wanted.items()
        # A loss of your own need not have ratios.
        if name in metrics and (on_policy or name not in OF_THE_RATIO) and not ok(metrics[name])
    ]
    if wrong:
        raise TrainingError(
            "health check of the first update failed: " + "; ".join(wrong) + ". The policy that is trained is not the"
            " one whose log-probs were taken, or the head is wrong; nothing was learnt from this run yet"
        )


def check_engine_agrees(abs_diff: float, config: HealthConfig) -> None:
    """The engine's log-probs of its own tokens must be the trainer's, every step."""
    limit = config.max_train_rollout_logprob_abs_diff
    # NaN must fail too, so the comparison asks for what is right.
    if not abs_diff <= limit:
        raise TrainingError(
            f"train_rollout_logprob_abs_diff is {abs_diff:.4g}, limit {limit}"
            " (health.max_train_rollout_logprob_abs_diff): the engine does not sample from the weights, tokens or"
            " temperature that the trainer sees"
        )


class NonFiniteGuard:
    """Counts updates skipped for NaN or infinity, keeps what is needed to find out why, and gives up after K.

    One a learner: a critic that is well must not hide a policy that is not. `loss` names the learner's loss.
    """

    def __init__(self, config: HealthConfig, folder: Path, *, loss: str = "train/loss") -> None:
        self.most = config.max_nonfinite_steps
        self.folder = folder
        self.loss = loss
        self.in_a_row = 0

    def check(self, step: int, report: StepReport, learner: Learner, batch: TrainBatch) -> None:
        """Call after every update, on every rank."""
        if not report.skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        where = self._dump(step, learner, batch)
        message = (
            f"step {step}: {self.loss.removeprefix('train/')} {report.metrics[self.loss]}, gradient norm"
            f" {report.grad_norm}; update skipped. First bad tensor: {_first_bad_tensor(learner)}."
            f" Batch saved to {where}"
        )
        if self.in_a_row > self.most:
            raise TrainingError(
                f"{message}. That were {self.in_a_row} in a row, more than health.max_nonfinite_steps = {self.most}"
            )
        warnings.warn(message, stacklevel=2)

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken."""
        self.in_a_row = state["in_a_row"]

    def _dump(self, step: int, learner: Learner, batch: TrainBatch) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step}_rank_{learner.context.topology.rank}.pt"
        torch.save([_tensors(micro_batch) for micro_batch in batch.micro_batches], path)
        return path


def _tensors(micro_batch: MicroBatch) -> dict[str, object]:
    """Everything in a micro-batch that is data."""
    found = {f.name: attrgetter(f.name)(micro_batch) for f in fields(MicroBatch)}
    return {name: value for name, value in found.items() if not callable(value)}


def _first_bad_tensor(learner: Learner) -> str:
    """Name of the first weight, else gradient, that is not finite, in the order of the model, on this rank."""
    parameters = list(learner.stage.named_parameters())
    # Weights first: one that is bad spoils the gradients of everything before it.
    for name, parameter in parameters:
        if not bool(parameter.isfinite().all()):
            return f"weight {name}"
    for name, parameter in parameters:
        gradient = parameter.main_grad  # type: ignore[attr-defined]  Megatron's DDP puts it there
        if not bool(gradient.isfinite().all()):
            return f"gradient of {name}"
    return "none on this rank (the loss itself, or another rank)"


class ConstantRewardAlarm:
    """Warns when the mean reward stands still: the usual sign of a reward that answers the same to everything."""

    def __init__(self, config: HealthConfig) -> None:
        self.patience = config.constant_reward_alarm_steps
        self.last = math.nan
        self.count = 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"last": self.last, "count": self.count}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on where `state` was taken."""
        self.last, self.count = state["last"], int(state["count"])

    def see(self, reward: float) -> bool:
        """Take a step's mean reward; True (and a warning) every `patience` steps without a change."""
        self.count = self.count + 1 if reward == self.last else 1
        self.last = reward
        if self.count % self.patience:
            return False
        warnings.warn(
            f"the mean reward has been {reward} for {self.count} steps in a row"
            " (health.constant_reward_alarm_steps); look at samples.jsonl: does the reward read the answers at all?",
            stacklevel=2,
        )
        return True
