"""The arithmetic of the start-up benchmark; what it starts is tested by the commands' own tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "startup.py"


@pytest.fixture(scope="module")
def startup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("startup_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_time_belongs_to_the_phase_it_was_spent_in(startup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    walls, cpus = iter([11.0, 14.0, 14.5, 16.5]), iter([0.5, 3.0, 3.25, 4.0])
    monkeypatch.setattr(startup.time, "time", lambda: next(walls))
    monkeypatch.setattr(startup.time, "process_time", lambda: next(cpus))
    clock = startup.Clock(10.0)
    for phase in ("imports", "model", "imports", ""):
        clock.enter(phase)
    assert clock.phases == {"interpreter": (1.0, 0.5), "imports": (5.0, 3.25), "model": (0.5, 0.25)}


def test_the_table_holds_medians_and_the_whole_process(startup: ModuleType) -> None:
    turns = [({"imports": (w, w / 2)}, (w + 1, w)) for w in (3.0, 9.0, 4.0)]
    assert startup.table(turns) == [
        {"phase": "imports", "wall": "4.00", "cpu": "2.00"},
        {"phase": "all", "wall": "5.00", "cpu": "4.00"},
    ]


def test_what_a_process_tells_is_read_and_a_failure_is_shown(startup: ModuleType) -> None:
    told = f"print('noise'); print({startup.MARK!r} + '{{\"imports\": [2.0, 1.0]}}')"
    phases, (wall, cpu) = startup.measure([sys.executable, "-c", told])
    assert phases == {"imports": (2.0, 1.0)}
    assert wall > 0 and cpu > 0
    with pytest.raises(SystemExit, match="a reason"):
        startup.measure([sys.executable, "-c", "raise ValueError('a reason')"])
