"""Servers in a recipe: what must hold between their settings, and what would have no effect."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from megatron_klear.config.load import load_recipe
from megatron_klear.config.recipe import RlRecipe
from megatron_klear.config.resume import load_saved_recipe, recipe_changes
from megatron_klear.errors import ConfigError
from unit.config.config_files import RecipeFiles, change

URL = "http://127.0.0.1:30000"
SGLANG = {"rollout.engine": "sglang", "servers.urls": [URL]}
STARTED = {"rollout.engine": "sglang", "servers.num_servers": 2}
VLLM = {"rollout.engine": "vllm", "servers.urls": [URL]}


def faults(files: RecipeFiles, changes: dict[str, Any]) -> dict[str, str]:
    """Reasons by key."""
    path = files.folder / "servers.yaml"
    path.write_text(yaml.safe_dump(change(files.rl(), changes)))
    try:
        load_recipe(path, kind="rl")
    except ConfigError as error:
        return {fault.key: str(fault) for fault in error.faults}
    return {}


@pytest.mark.parametrize(
    "changes",
    [
        SGLANG,
        STARTED,
        VLLM,
        {**SGLANG, "rollout.max_async_steps": 2, "servers.transport": "broadcast", "servers.pause_mode": "retract"},
        {**SGLANG, "rollout.over_sampling_batch_size": 6, "rollout.partial_rollout": True},
        {**STARTED, "servers.launch_env": ["A=b=c"], "servers.launch_args": ["--device", "cpu"]},
        {**VLLM, "servers.pause_mode": "wait", "servers.router_url": "http://router:1"},
    ],
)
def test_recipes_with_servers_that_can_run(files: RecipeFiles, changes: dict[str, Any]) -> None:
    assert faults(files, changes) == {}


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"rollout.engine": "sglang"}, "servers", "needed with rollout.engine sglang: where the servers are"),
        ({"servers.urls": [URL]}, "servers", "would have no effect with rollout.engine embedded"),
        ({"rollout.engine": "sglang", "servers.transport": "disk"}, "servers.urls", "name running servers in"),
        ({**SGLANG, "servers.num_servers": 1}, "servers.urls", "one of both"),
        ({**SGLANG, "servers.urls": ["127.0.0.1:1"]}, "servers.urls", r"must start with http:// .*http://127.0.0.1:1"),
        ({**SGLANG, "servers.router_url": "router:1"}, "servers.router_url", "must start with http://"),
        ({**SGLANG, "servers.urls": [URL, URL]}, "servers.urls", "names a server twice"),
        ({**STARTED, "servers.launch_env": ["A"]}, "servers.launch_env", "must be NAME=value"),
        ({**VLLM, "servers.transport": "tensor"}, "servers.transport", "vLLM takes weights from disk"),
        ({**VLLM, "servers.pause_mode": "in_place"}, "servers.pause_mode", "vLLM does not pause so"),
        (
            {
                **SGLANG,
                "rollout.max_async_steps": 1,
                "train.old_logprobs": "current",
                "batch.global_batch_size": 16,
            },
            "train.old_logprobs",
            "takes ratios to be 1",
        ),
        (
            {
                **SGLANG,
                "rollout.over_sampling_batch_size": 6,
                "rollout.partial_rollout": True,
                "train.old_logprobs": "current",
                "batch.global_batch_size": 16,
            },
            "train.old_logprobs",
            "with rollout.partial_rollout samples come from older weights",
        ),
        (
            {**SGLANG, "servers.colocate": True, "rollout.max_async_steps": 1},
            "servers.colocate",
            "cannot sample ahead of it: rollout.max_async_steps is 1",
        ),
        (
            {**SGLANG, "rollout.over_sampling_batch_size": 6, "rollout.max_async_steps": 1},
            "rollout.over_sampling_batch_size",
            "no effect with rollout.max_async_steps",
        ),
        (
            {**SGLANG, "rollout.over_sampling_batch_size": 3},
            "rollout.over_sampling_batch_size",
            "is less than rollout.rollout_batch_size 4",
        ),
        ({**SGLANG, "selection.shuffle_rewards": True}, "selection.shuffle_rewards", "never a whole step"),
        ({"rollout.max_async_steps": 1}, "rollout.max_async_steps", "no effect with rollout.engine embedded"),
        ({"rollout.partial_rollout": True}, "rollout.partial_rollout", "no effect with rollout.engine embedded"),
        ({**SGLANG, "rollout.partial_rollout": True}, "rollout.partial_rollout", "nothing is cut short"),
        ({**SGLANG, "rollout.max_running_requests": 8}, "rollout.max_running_requests", "only with embedded"),
        ({**SGLANG, "servers.launch_port": 8}, "servers.launch_port", "without servers.num_servers"),
        ({**SGLANG, "servers.bucket_bytes": 8}, "servers.bucket_bytes", "with servers.transport disk"),
        (
            {**SGLANG, "servers.transport": "tensor", "servers.broadcast_port": 8},
            "servers.broadcast_port",
            "with servers.transport tensor",
        ),
        (
            {**SGLANG, "servers.transport": "tensor", "servers.keep_weights": 8},
            "servers.keep_weights",
            "with servers.transport tensor",
        ),
    ],
)
def test_what_cannot_run_is_said(files: RecipeFiles, changes: dict[str, Any], key: str, reason: str) -> None:
    found = faults(files, changes)
    assert list(found) == [key]
    assert re.search(reason, found[key]), found[key]


def test_lists_can_be_given_on_a_command_line(files: RecipeFiles) -> None:
    path = files.folder / "words.yaml"
    path.write_text(yaml.safe_dump(files.rl()))
    words = ["rollout.engine=sglang", "servers.urls=http://a:1,http://b:2"]
    recipe = load_recipe(path, words, kind="rl")
    assert isinstance(recipe, RlRecipe) and recipe.servers is not None
    assert recipe.servers.urls == ("http://a:1", "http://b:2")
    words = ["rollout.engine=sglang", "servers.num_servers=1", "servers.launch_args=--device cpu --x 'a b'"]
    recipe = load_recipe(path, [*words, "servers.launch_env=A=1 B=2"], kind="rl")
    assert isinstance(recipe, RlRecipe) and recipe.servers is not None
    assert recipe.servers.launch_args == ("--device", "cpu", "--x", "a b")
    assert recipe.servers.launch_env == ("A=1", "B=2")


def test_a_run_may_go_on_with_another_engine(files: RecipeFiles) -> None:
    before = load_saved_recipe(yaml.safe_dump(files.rl()))
    after = load_saved_recipe(yaml.safe_dump(change(files.rl(), SGLANG)))
    assert isinstance(after, RlRecipe) and after.servers is not None and after.servers.urls == (URL,)
    assert recipe_changes(before, after) == recipe_changes(after, before) == []
