"""From a recipe to its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.micro_batches import loss_micro_batch
from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    ErcConfig,
    GppoLossConfig,
    GrpoLossConfig,
    GspoLossConfig,
    KlConfig,
    LossConfig,
    PpoLossConfig,
    UserLossConfig,
)
from megatron_klear.errors import ConfigError
from megatron_klear.losses.policy import CeGppoLoss, CispoLoss, ClipHigherLoss, GppoLoss, GspoLoss, PpoLoss
from megatron_klear.losses.registry import build_loss
from megatron_klear.losses.terms import LossTerms, RlLoss
from megatron_klear.types import TokenStats
from megatron_klear_kernels.linear_policy_loss.coefficients import ClipRule

NO_KL = KlConfig()
BUILT: dict[str, tuple[LossConfig, type, ClipRule]] = {
    "ppo": (PpoLossConfig(type="ppo", eps_clip=0.15, eps_clip_c=3.0), PpoLoss, ClipRule(0.15, 0.15, dual_clip=3.0)),
    "grpo": (GrpoLossConfig(type="grpo"), PpoLoss, ClipRule(0.2, 0.2)),
    "clip_higher": (
        ClipHigherLossConfig(type="clip_higher", eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=10.0),
        ClipHigherLoss,
        ClipRule(0.1, 0.3, dual_clip=10.0),
    ),
    "gppo": (GppoLossConfig(type="gppo"), GppoLoss, ClipRule(0.2, 0.28, keep_low=1.0, keep_high=1.0)),
    "gppo_dual": (
        GppoLossConfig(type="gppo", eps_clip=0.15, eps_clip_high=0.3, eps_clip_c=10.0),
        GppoLoss,
        ClipRule(0.15, 0.3, keep_low=1.0, keep_high=1.0, dual_clip=10.0),
    ),
    "ce_gppo": (
        CeGppoLossConfig(type="ce_gppo", gppo_beta_low=0.5, gppo_beta_high=0.9),
        CeGppoLoss,
        ClipRule(0.2, 0.2, value_low=0.5, value_high=0.9, keep_low=0.5, keep_high=0.9),
    ),
    "cispo": (CispoLossConfig(type="cispo", eps_clip=None), CispoLoss, ClipRule(None, 0.28, two_sided=True)),
    "gspo": (GspoLossConfig(type="gspo"), GspoLoss, ClipRule(3e-4, 4e-4)),
}


@pytest.mark.parametrize(("config", "kind", "rule"), BUILT.values(), ids=BUILT)
def test_a_recipe_builds_its_loss(config: LossConfig, kind: type, rule: ClipRule) -> None:
    loss = build_loss(config, NO_KL)
    assert isinstance(loss, RlLoss)
    assert type(loss.policy) is kind
    assert loss.policy.rule == rule
    assert loss.terms == LossTerms()


def test_every_loss_of_the_config_is_here() -> None:
    types = {config.type for config, _, _ in BUILT.values()}
    assert types == {"ppo", "grpo", "clip_higher", "gppo", "ce_gppo", "cispo", "gspo"}


@pytest.mark.parametrize(
    ("kl", "in_loss"),
    [
        (KlConfig(kl_coef=0.1, kl_type="k2"), True),
        (KlConfig(kl_coef=0.1, kl_in="reward"), False),
        (KlConfig(kl_coef=0.0), False),
    ],
)
def test_terms_reach_the_loss(kl: KlConfig, in_loss: bool) -> None:
    erc = ErcConfig(erc_low=0.1)
    loss = build_loss(GppoLossConfig(type="gppo", erc=erc, entropy_coef=0.01), kl)
    assert isinstance(loss, RlLoss)
    assert loss.terms == LossTerms(erc, kl if in_loss else None, 0.01)


def test_a_loss_of_your_own_is_called(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from megatron_klear.types import LossOutput\n"
        "def half(stats, micro_batch):\n"
        "    return LossOutput((micro_batch.token_scale * stats.logprobs).sum() / 2, {})\n"
    )
    (tmp_path / "klear_test_own_loss.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    loss = build_loss(UserLossConfig(type="klear_test_own_loss:half"), KlConfig(kl_coef=1.0))
    two = torch.full((3,), 2.0)
    batch = loss_micro_batch(token_scale=two, advantages=two, old_logprobs=two)
    assert loss(TokenStats(-two), batch).loss.item() == -6.0


@pytest.mark.parametrize("path", ("no_such_module_anywhere:loss", "math:no_such_function", "os.nothing:loss"))
def test_a_loss_of_your_own_that_does_not_import_is_explained(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.type.*{path}.*cannot be imported .*package\.module:function"):
        build_loss(UserLossConfig(type=path), NO_KL)
