"""Models beside the policy that some recipes need: a reference for a KL penalty, a critic for GAE."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_klear.checkpoint.folder import TRACKER
from megatron_klear.checkpoint.hf import open_folder
from megatron_klear.checkpoint.store import CheckpointStore
from megatron_klear.config.loss import KlConfig
from megatron_klear.config.recipe import RlRecipe
from megatron_klear.losses.gae import ValueLoss
from megatron_klear.models.build import VALUE_HEAD, ModelStage
from megatron_klear.models.hf_bridge import import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.training.annotate import Annotators
from megatron_klear.training.critic import Critic, build_critic, critic_shape
from megatron_klear.training.health import NonFiniteGuard
from megatron_klear.training.learner import LearnerSettings
from megatron_klear.training.policy import Policy
from megatron_klear.training.reference import Reference
from megatron_klear.training.run import Run
from megatron_klear.types import StepReport, TrainBatch


class Companions:
    """The reference and the critic of a run, or neither."""

    def __init__(self, recipe: RlRecipe, reference: Reference | None, critic: Critic | None) -> None:
        self.reference = reference
        self.critic = critic
        self.critic_warmup_steps = recipe.critic.warmup_steps if recipe.critic is not None else 0
        self._interval = recipe.kl.ref_update_interval
        self._value_loss = ValueLoss(recipe.critic.value_clip if recipe.critic is not None else None)
        dumps = Path(recipe.run.output_dir) / "nonfinite" / "critic"
        self.guard = NonFiniteGuard(recipe.health, dumps, loss="critic/loss")

    def annotators(self, policy: Policy, recipe: RlRecipe) -> Annotators:
        """Who looks at a step's micro-batches."""
        return Annotators(policy, recipe.correction, recipe.train.old_logprobs, self.reference, self.critic)

    def update_critic(self, step: int, batch: TrainBatch) -> StepReport | None:
        """One update of the critic, if there is one."""
        if self.critic is None:
            return None
        report = self.critic.update(batch, self._value_loss)
        self.guard.check(step, report, self.critic, batch)
        return report

    def after_step(self, step: int, stage: ModelStage) -> None:
        """Refresh the reference where the recipe says so."""
        if self.reference is not None and self._interval is not None and step % self._interval == 0:
            self.reference.refresh(stage)


def build_companions(run: Run, recipe: RlRecipe) -> Companions:
    """What the recipe needs, registered to be saved, and restored where the run goes on."""
    reference = _reference(run, recipe.kl) if recipe.kl.kl_coef > 0 else None
    critic = _critic(run, recipe) if recipe.advantage.type == "gae" else None
    companions = Companions(recipe, reference, critic)
    run.checkpoints.add_state("critic_guard", companions.guard)
    return companions


def _reference(run: Run, config: KlConfig) -> Reference:
    """The starting weights (or `ref_load`'s), snapshot on the CPU."""
    stage = run.policy.stage
    reference = Reference(stage)
    if config.ref_load is not None and run.checkpoints.saved is None:
        with reference.through(stage):
            _load_weights(run, stage, config.ref_load)
    run.checkpoints.add_weights(stage, "reference", lambda: reference.through(stage))
    return reference


def _load_weights(run: Run, stage: ModelStage, path: str) -> None:
    if (Path(path) / TRACKER).is_file():
        CheckpointStore(path, run.context).load_weights(stage, any_rope=True)
        return
    with open_folder(path, stage.shape) as source:
        import_weights(stage, qwen3_table(stage.shape), source)


def _critic(run: Run, recipe: RlRecipe) -> Critic:
    """A critic that starts from the policy's trunk; its optimizer settings are the policy's but for the rate."""
    assert recipe.critic is not None
    policy = run.policy.stage
    optimizer = recipe.optimizer.model_copy(
        update={"lr": recipe.critic.lr, "min_lr": 0.0, "lr_decay_style": "constant"}
    )
    settings = LearnerSettings(recipe.parallel, optimizer, recipe.model.params_dtype)

    @torch.no_grad()
    def fill(stage: ModelStage) -> None:
        weights = dict(policy.named_parameters())
        for name, parameter in stage.named_parameters():
            if name == VALUE_HEAD:
                continue
            if name == "output_layer.weight":
                # The last stage's copy of the tied embedding, which a critic never uses.
                parameter.zero_()
            else:
                parameter.copy_(weights[name])

    critic = build_critic(critic_shape(run.shape), fill, run.context, settings)
    run.checkpoints.add_learner(critic, "critic")
    return critic
