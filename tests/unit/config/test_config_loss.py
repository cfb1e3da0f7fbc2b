"""The `loss` section: one class a type, or a function of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_klear.config import loss as losses
from megatron_klear.config.load import dump_recipe, load_recipe
from megatron_klear.config.names import nearest, unknown_key_hint
from unit.config.config_files import RecipeFiles, change

TYPES = {
    "ppo": losses.PpoLossConfig,
    "grpo": losses.GrpoLossConfig,
    "clip_higher": losses.ClipHigherLossConfig,
    "gppo": losses.GppoLossConfig,
    "ce_gppo": losses.CeGppoLossConfig,
    "cispo": losses.CispoLossConfig,
    "gspo": losses.GspoLossConfig,
    "my_package.losses:trained": losses.UserLossConfig,
}
NAMES = "ppo, grpo, clip_higher, gppo, ce_gppo, cispo, gspo, package.module:function"


@pytest.mark.parametrize(("name", "config"), TYPES.items())
def test_the_type_chooses_the_class_and_a_dump_loads_back(
    name: str, config: type[losses.AggregationConfig], files: RecipeFiles
) -> None:
    for recipe in (
        load_recipe(files.write(change(files.rl(), {"loss": {"type": name}})), kind="rl"),
        load_recipe(files.write(files.rl()), [f"loss.type={name}"], kind="rl"),
    ):
        assert type(recipe.loss) is config
        assert recipe.loss.type == name
        text = dump_recipe(recipe)
        assert load_recipe(files.write(text), kind="rl") == recipe
        assert dump_recipe(load_recipe(files.write(text))) == text


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("gpo", "did you mean gppo?"),
        ("grop", "did you mean grpo?"),
        ("cgppo", "did you mean gppo?"),
        ("ce-gppo", "did you mean ce_gppo?"),
        ("cisp", "did you mean cispo?"),
        ("clip-higher", "did you mean clip_higher?"),
        ("my_package.module.function", "did you mean package.module:function?"),
        (7, ""),
        (None, ""),
    ],
)
def test_an_unknown_type_names_the_nearest(given: Any, hint: str, files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"loss.type": given}))
    assert (fault.key, fault.value, fault.suggestion) == ("loss.type", given, hint)
    assert fault.reason == f"expected one of {NAMES}"


@pytest.mark.parametrize(
    "given", ["user", "my-package:loss", ":loss", "my_package:", "my_package:a.b", "a:b:c", "1a:b", "a..b:c"]
)
def test_a_loss_of_your_own_is_package_module_function(given: str, files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"loss.type": given}))
    assert str(fault) == f"loss.type = {given!r}: a loss of your own is named as package.module:function"


@pytest.mark.parametrize(
    ("loss", "key", "hint"),
    [
        (
            {"type": "gppo", "eps_clip_hihg": 0.3},
            "loss.eps_clip_hihg",
            "did you mean loss.eps_clip_high (only with loss.type clip_higher or gppo or ce_gppo or cispo or gspo)?",
        ),
        (
            {"type": "ppo", "eps_clip_high": 0.3},
            "loss.eps_clip_high",
            "loss.eps_clip_high (only with loss.type clip_higher or gppo or ce_gppo or cispo or gspo)",
        ),
        (
            {"type": "gspo", "eps_clip_c": 3.0},
            "loss.eps_clip_c",
            "loss.eps_clip_c (only with loss.type ppo or grpo or clip_higher or gppo)",
        ),
        (
            {"type": "gppo", "gppo_beta_lo": 0.5},
            "loss.gppo_beta_lo",
            "did you mean loss.gppo_beta_low (only with loss.type ce_gppo)?",
        ),
        (
            {"type": "a.b:c", "entropy_coef": 0.1},
            "loss.entropy_coef",
            "loss.entropy_coef (not with loss.type package.module:function)",
        ),
        ({"type": "a.b:c", "erc": {}}, "loss.erc", "loss.erc (not with loss.type package.module:function)"),
        ({"type": "gspo", "erc": {"erc_lo": 0.1}}, "loss.erc.erc_lo", "did you mean loss.erc.erc_low?"),
        ({"type": "gspo", "erc_low": 0.1}, "loss.erc_low", "did you mean loss.erc.erc_low?"),
        ({"type": "gspo", "erc": {"zzz": 0.1}}, "loss.erc.zzz", "valid here: erc_low, erc_high"),
    ],
)
def test_a_wrong_key_says_where_it_belongs(loss: dict[str, Any], key: str, hint: str, files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"loss": loss}))
    assert (fault.key, fault.reason, fault.suggestion) == (key, "no such key", hint)


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        ({"type": "gppo", "eps_clip": 1}, "loss.eps_clip = 1: should be less than 1"),
        ({"type": "gppo", "eps_clip": "x"}, "loss.eps_clip = 'x': should be a valid number"),
        ({"type": "gppo", "eps_clip_c": 1.0}, "loss.eps_clip_c = 1.0: should be greater than 1"),
        ({"type": "gppo", "eps_clip": None}, "loss.eps_clip = None: should be a valid number"),
        ({"type": "a.b:c", "sft_loss_coef": -1}, "loss.sft_loss_coef = -1: should be greater than or equal to 0"),
        ({"type": "cispo", "erc": {"erc_low": 1.0}}, "loss.erc.erc_low = 1.0: should be less than 1"),
        ({"type": "cispo", "erc": {"erc_high": 0}}, "loss.erc.erc_high = 0: should be greater than 0"),
        ({"type": "cispo", "erc": True}, "loss.erc = True: expected a section: lines `key: value` below it"),
        (
            {"type": "gppo", "loss_agg_mode": "token_mean"},
            "loss.loss_agg_mode = 'token_mean': should be 'token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean' or"
            " 'seq-mean-token-sum-norm' (did you mean token-mean?)",
        ),
    ],
)
def test_a_wrong_value_is_named_without_the_variant(loss: dict[str, Any], fault: str, files: RecipeFiles) -> None:
    (found,) = files.faults(change(files.rl(), {"loss": loss}))
    assert str(found).startswith(fault)


@pytest.mark.parametrize("given", ["gppo", 5, ["gppo"], True])
def test_the_loss_must_be_a_section(given: Any, files: RecipeFiles) -> None:
    (fault,) = files.faults({**files.rl(), "loss": given})
    assert (fault.key, fault.value, fault.reason) == ("loss", given, "expected a section: lines `key: value` below it")


def test_overrides_reach_into_the_loss(files: RecipeFiles) -> None:
    words = ["loss.type=cispo", "loss.eps_clip=null", "--eps-clip-high", "3", "loss.erc.erc_low=0.1", "--erc-high=2"]
    loss = load_recipe(files.write(files.rl()), words, kind="rl").loss
    erc = losses.ErcConfig(erc_low=0.1, erc_high=2.0)
    assert loss == losses.CispoLossConfig(type="cispo", eps_clip=None, eps_clip_high=3.0, erc=erc)
    switched_off = load_recipe(files.write(change(files.rl(), {"loss.erc": {}})), ["loss.erc=null"], kind="rl").loss
    assert switched_off == losses.GppoLossConfig(type="gppo")


def test_a_setting_that_another_type_does_not_have_is_refused_after_an_override(files: RecipeFiles) -> None:
    (fault,) = files.faults(change(files.rl(), {"loss.eps_clip_high": 0.3}), "loss.type=ppo")
    assert (fault.key, fault.reason) == ("loss.eps_clip_high", "no such key")


def test_a_dump_leaves_out_what_has_no_effect_and_keeps_the_rest(files: RecipeFiles) -> None:
    resolved = yaml.safe_load(dump_recipe(load_recipe(files.write(files.rl()))))
    assert resolved["kl"] == {"kl_coef": 0.0}
    assert resolved["correction"] == {"type": "none"}
    assert resolved["critic"] is None
    assert resolved["loss"]["erc"] is None
    assert "loss_scale_factor" not in resolved["loss"]
    assert "overlong_penalty_factor" not in resolved["selection"]
    given = {
        "kl.kl_coef": 0.1,
        "correction.type": "icepop",
        "loss.loss_agg_mode": "seq-mean-token-sum-norm",
        "loss.loss_scale_factor": 64.0,
        "loss.erc": {},
        "selection.overlong_buffer_len": 4,
        "advantage.type": "gae",
        "critic": {},
    }
    recipe = load_recipe(files.write(change(files.rl(), given)), kind="rl")
    text = dump_recipe(recipe)
    resolved = yaml.safe_load(text)
    assert resolved["kl"]["kl_type"] == "k3"
    assert resolved["correction"] == {"type": "icepop", "low": 0.5, "high": 2.0}
    assert resolved["critic"]["lam"] == 1.0
    assert resolved["loss"]["erc"] == {"erc_low": 0.05, "erc_high": 0.05}
    assert resolved["loss"]["loss_scale_factor"] == 64.0
    assert resolved["advantage"] == {"type": "gae"}
    assert load_recipe(files.write(text), kind="rl") == recipe


def test_of_equally_similar_names_the_one_that_starts_alike_is_nearest() -> None:
    assert nearest("gpo", ["grpo", "gppo", "gspo"]) == "gppo"
    assert nearest("gro", ["grpo", "gppo", "gspo"]) == "grpo"
    assert nearest("grp", ["agrp", "grpo"]) == "grpo"
    assert nearest("xyz", ["grpo", "gppo"]) is None
    assert nearest("xyz", []) is None


def test_names_of_inner_sections_are_no_sections_of_the_top() -> None:
    assert "loss.erc" not in unknown_key_hint("zzzzzzzz", "rl")
    assert "valid here: " in unknown_key_hint("zzzzzzzz", "rl")
