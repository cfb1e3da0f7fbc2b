"""From a recipe to its loss."""

from __future__ import annotations

import importlib

from megatron_klear.config.loss import (
    CeGppoLossConfig,
    CispoLossConfig,
    ClipHigherLossConfig,
    GppoLossConfig,
    GspoLossConfig,
    KlConfig,
    LossConfig,
    PpoLossConfig,
    UserLossConfig,
)
from megatron_klear.errors import ConfigError, Fault
from megatron_klear.losses.policy import (
    CeGppoLoss,
    CispoLoss,
    ClipHigherLoss,
    ClippedLoss,
    GppoLoss,
    GspoLoss,
    PpoLoss,
)
from megatron_klear.losses.terms import LossTerms, RlLoss
from megatron_klear.protocols import PolicyLoss


def build_loss(config: LossConfig, kl: KlConfig, *, on_policy: bool = False) -> PolicyLoss:
    """The loss a recipe names, with its terms; `on_policy` for ratios that are 1.

    Raises `ConfigError` for a path of your own that does not import.
    """
    if isinstance(config, UserLossConfig):
        return _load(config.type)
    in_loss = kl if kl.kl_coef > 0 and kl.kl_in == "loss" else None
    terms = LossTerms(config.erc, in_loss, config.entropy_coef)
    return RlLoss(_policy_loss(config), terms, on_policy=on_policy)


def _policy_loss(config: LossConfig) -> ClippedLoss:
    match config:
        case PpoLossConfig():  # GRPO's is a subclass
            return PpoLoss(config)
        case ClipHigherLossConfig():
            return ClipHigherLoss(config)
        case GppoLossConfig():
            return GppoLoss(config)
        case CeGppoLossConfig():
            return CeGppoLoss(config)
        case CispoLossConfig():
            return CispoLoss(config)
        case GspoLossConfig():
            return GspoLoss(config)
        case UserLossConfig():
            raise AssertionError("a user's loss is loaded, not built")


def _load(path: str) -> PolicyLoss:
    module, _, name = path.partition(":")
    try:
        return vars(importlib.import_module(module))[name]
    except (ImportError, KeyError) as error:
        fault = Fault("loss.type", path, f"cannot be imported ({error!r}); expected package.module:function")
        raise ConfigError(str(fault), [fault]) from error
