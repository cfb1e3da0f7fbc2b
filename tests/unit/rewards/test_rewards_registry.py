"""From configuration to reward functions; rewards of the user; labels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_klear.config.recipe import RewardConfig
from megatron_klear.errors import ConfigError, RewardError
from megatron_klear.rewards.registry import build_reward, can_parse_gold, can_parse_golds
from megatron_klear.types import Prompt, RewardRequest, Score

ROOT = Path(__file__).resolve().parents[3]

USER_MODULE = """
def length_reward(request):
    return len(request.response) / 2

def integer_reward(request):
    return 1

def broken(request):
    raise KeyError("no such unit test")

def returns_text(request):
    return "0.5"

def returns_nan(request):
    return float("nan")

def returns_bool(request):
    return True

constant = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_reward.py").write_text(USER_MODULE)
    (tmp_path / "my_broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_own_reward"


def config(kind: str, **settings: object) -> RewardConfig:
    return RewardConfig.model_validate({"type": kind, "format": "none", **settings})


def request(response: str = "abcd", answer: str = "4", truncated: bool = False) -> RewardRequest:
    return RewardRequest(Prompt("prompt-7", (), answer=answer), response, truncated)


def test_arithmetic_takes_its_rewards_and_format_from_the_recipe() -> None:
    with build_reward(config("arithmetic", format="think", correct=2.0, incorrect=0.0)) as reward:
        scores = reward([request("<think>x</think>4"), request("<think>x</think>5"), request("4")])
    assert scores == [Score(2.0, "correct"), Score(0.0, "wrong"), Score(0.0, "no_think_open")]


def test_math_takes_its_rewards_and_format_from_the_recipe() -> None:
    with build_reward(config("math", format="think", correct=2.0, incorrect=0.0)) as reward:
        responses = [r"<think>x</think>\boxed{4}", r"<think>x</think>\boxed{5}", r"\boxed{4}", r"<think>\boxed{4}"]
        scores = reward([request(response) for response in responses])
    reasons = ["correct", "wrong", "no_think_open", "no_think_close"]
    assert [(score.reward, score.reason) for score in scores] == list(zip([2.0, 0, 0, 0], reasons, strict=True))


@pytest.mark.parametrize(("kind", "hint"), [("maths", "did you mean math?"), ("aritmetic", "did you mean arithmetic?")])
def test_an_unknown_type_names_the_nearest(kind: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="expected arithmetic, math, or package") as caught:
        build_reward(config(kind))
    assert hint in str(caught.value)
    assert caught.value.faults[0].key == "reward.type"
    assert caught.value.faults[0].value == kind


def test_an_unknown_type_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        build_reward(config("zzz"))
    assert "did you mean" not in str(caught.value)


def test_a_user_function_scores_a_batch(user_module: str) -> None:
    reward = build_reward(config(f"{user_module}:length_reward"))
    assert reward([request("abcd"), request("ab")]) == [Score(2.0, "user"), Score(1.0, "correct")]
    assert build_reward(config(f"{user_module}:integer_reward"))([request()]) == [Score(1.0, "correct")]


def test_a_user_function_stands_behind_the_format_too(user_module: str) -> None:
    reward = build_reward(config(f"{user_module}:length_reward", format="think"))
    scores = reward([request("abcd"), request("<think></think>abc", truncated=True), request("<think></think>abc")])
    assert scores == [Score(-1.0, "no_think_open"), Score(-1.0, "truncated"), Score(9.0, "user")]


def test_an_exception_of_a_user_function_is_a_failure_not_a_reward(user_module: str) -> None:
    (score,) = build_reward(config(f"{user_module}:broken"))([request()])
    assert score == Score(None, "user_error", "user_error: KeyError: 'no such unit test' (prompt prompt-7)")


@pytest.mark.parametrize(
    ("name", "value"),
    [("returns_text", "'0.5' (str)"), ("returns_nan", "nan (float)"), ("returns_bool", "True (bool)")],
)
def test_a_user_function_must_return_a_finite_float(user_module: str, name: str, value: str) -> None:
    with pytest.raises(RewardError, match="expected a finite float") as caught:
        build_reward(config(f"{user_module}:{name}"))([request()])
    assert f"{user_module}:{name} returned {value} for prompt prompt-7" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.rewards:f", "'no_such_package.rewards' does not import: ModuleNotFoundError"),
        ("my_broken_reward:f", "'my_broken_reward' does not import: ZeroDivisionError: division by zero"),
        ("my_own_reward:lenght_reward", "did you mean my_own_reward:length_reward?"),
        ("my_own_reward:constant", "'constant' is not callable in module 'my_own_reward'"),
        ("my_own_reward:", "'' does not exist in module 'my_own_reward'"),
        (":f", "module '' does not import: ValueError"),
    ],
)
def test_a_path_that_leads_nowhere(user_module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_reward(config(path))
    assert message in str(caught.value)
    assert path in str(caught.value)


def test_labels_of_each_type(user_module: str) -> None:
    assert can_parse_golds(["42", " 42", "042", "", "4.0"], config("arithmetic")) == [True, True, False, False, False]
    assert can_parse_golds(["", "anything"], config(f"{user_module}:broken")) == [True, True]
    golds = ["42", r"\frac12", r"\text{Evelyn}", "52_8", r"\sqrt{2}", "", "$$", r"\frac{", "p - q"]
    assert can_parse_golds(golds, config("math")) == [True, True, True, True, True, False, False, False, True]
    assert can_parse_gold("42", config("math"))


def test_labels_of_an_unknown_type() -> None:
    with pytest.raises(ConfigError, match="did you mean math"):
        can_parse_gold("42", config("mathe"))


def test_rewards_load_neither_torch_nor_transformers() -> None:
    code = """
import sys
from megatron_klear.config.recipe import RewardConfig
from megatron_klear.rewards import answers, arithmetic, format, maths, pool, registry, user, worker
from megatron_klear.types import Prompt, RewardRequest
with registry.build_reward(RewardConfig(type="math")) as reward:
    request = RewardRequest(Prompt("p", (), answer="x+1"), "<think></think>\\\\boxed{1+x}")
    assert reward([request])[0].reason == "correct"
    (pid,) = reward._inner.worker_pids
    assert "torch" not in open(f"/proc/{pid}/maps").read()
print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
