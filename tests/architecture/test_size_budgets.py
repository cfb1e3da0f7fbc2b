"""Functions, files and habits stay within the budgets."""

from __future__ import annotations

import pytest

from architecture.size_budgets import Budget, budgets, percentile
from architecture.source_tree import files_of_tests, parse, project_files

# "budget name: place" -> why it is right there. A place is `module:Class.method`, or a module for file lines.
EXCEPTIONS: dict[str, str] = {
    "broad except: megatron_klear.rewards.user:UserReward._score": "calls the user's function; counted as a failure",
}


def test_the_source_stays_within_its_budgets() -> None:
    table = budgets(project_files(), files_of_tests(), EXCEPTIONS)
    lines = [str(budget) for budget in table] + [f"excused: {key} ({why})" for key, why in EXCEPTIONS.items()]
    print("\n" + "\n".join(lines))
    exceeded = [f"{budget}: {', '.join(budget.offenders)}" for budget in table if not budget.is_kept]
    assert not exceeded, "\n" + "\n".join(exceeded)


def test_no_exception_outlives_its_need() -> None:
    needed = {f"{budget.name}: {place}" for budget in budgets(project_files(), []) for place in budget.offenders}
    assert not set(EXCEPTIONS) - needed


def named(table: list[Budget], name: str) -> Budget:
    return next(budget for budget in table if budget.name == name)


def body(num_lines: int) -> str:
    return "def f() -> None:\n" + "    x = 1\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("function lines, median", body(13), 13),
        ("function lines, p95", body(61), 61),
        ("function lines, max", body(121), 121),
        ("arguments, max", "def f(a, b, c, d, /, *e, f, g, **h): ...", 8),
        ("arguments, max", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...", 8),
        ("functions with type hints, %", "def f(a: int): ...\ndef g() -> None: ...", 50),
        ("functions with type hints, %", "def f(a) -> int: ...", 0),
        ("functions with type hints, %", "def f(*a) -> int: ...", 0),
        ("file lines, max", body(2) + "\n" * 500, 502),
        ("getattr/hasattr per 1,000 lines", body(2) + "getattr(f, 'a')\nhasattr(f, 'a')", 500),
        ("zip without strict=True", body(2) + "zip(a, b)", 1),
        ("zip without strict=True", body(2) + "zip(a, b, strict=False)", 1),
        ("global", body(2) + "def g() -> None:\n    global f", 1),
        ("broad except", body(2) + "try:\n    f()\nexcept Exception:\n    pass", 1),
        ("broad except", body(2) + "try:\n    f()\nexcept:\n    pass", 1),
        ("broad except", body(2) + "try:\n    f()\nexcept (ValueError, BaseException):\n    pass", 1),
    ],
)
def test_an_exceeded_budget_is_found(name: str, source: str, value: float) -> None:
    budget = named(budgets([parse("megatron_klear.losses.bad", source)], []), name)
    assert budget.value == pytest.approx(value)
    assert not budget.is_kept
    assert "EXCEEDED" in str(budget)


def test_mutual_imports_are_counted() -> None:
    types = parse("megatron_klear.types", "from megatron_klear import errors\n" + body(2))
    errors = parse("megatron_klear.errors", "from megatron_klear import types")
    assert named(budgets([types, errors], []), "mutual package imports").offenders == ("errors <-> types",)


def test_mocks_are_counted_per_test() -> None:
    source = "def test_a():\n    Mock()\ndef test_b(mocker):\n    mocker.patch('a')\ndef helper(): ..."
    table = budgets([parse("megatron_klear.types", body(2))], [parse("tests.a", source)])
    budget = named(table, "mocks per test")
    assert budget.value == 1.0
    assert not budget.is_kept


def test_what_is_exempt_is_left_out() -> None:
    source = (
        "@triton.jit\n" + body(200) + "def g(a: int, b: int, c: int, d: int, e: int, f: int, h: int, i: int) -> int:\n"
        "    try:\n        return list(zip(a, b, strict=True))\n    except BaseException:\n        raise"
    )
    table = budgets([parse("megatron_klear_kernels.x.triton", source)], [])
    assert [budget.name for budget in table if not budget.is_kept] == []


def test_a_stub_does_not_pull_the_median_down() -> None:
    stubs = 'class A:\n    def a(self) -> int:\n        """What."""\n        ...\n    def b(self) -> int: ...\n'
    assert named(budgets([parse("megatron_klear.protocols", stubs + body(9))], []), "function lines, median").value == 9


def test_an_excused_place_is_not_counted_and_no_other_is_excused() -> None:
    source = "def a(x, y):\n    zip(x, y)\ndef b(x, y):\n    zip(x, y)"
    files = [parse("megatron_klear.types", source)]
    budget = named(budgets(files, [], ["zip without strict=True: megatron_klear.types:a"]), "zip without strict=True")
    assert budget.offenders == ("megatron_klear.types:b",)


def test_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7], 0.95) == 7
