"""The command `megatron-klear`."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_klear import __version__, cli
from megatron_klear.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Make `demo` a command whose module is loaded from a file with this body."""
    (tmp_path / "klear_demo.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "klear_demo", raising=False)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "demo": ("klear_demo:main", "a demonstration")})


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert summary in out
    assert cli.main(["-h"]) == 0
    assert capsys.readouterr().out == out


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: megatron-klear COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-klear {__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("chek", "did you mean check?"),
        ("arithmetics", "did you mean arithmetic?"),
        ("--zzz", "commands: sft, rl, check"),
    ],
)
def test_an_unknown_command_names_the_nearest(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no such command: {word!r} ({hint}" in err


def test_a_command_gets_its_words_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, "def main(argv):\n    assert argv == ['a', '--b']\n    return 7\n")
    assert cli.main(["demo", "a", "--b"]) == 7


def test_words_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, "def main(argv):\n    return len(argv)\n")
    monkeypatch.setattr(sys, "argv", ["megatron-klear", "demo", "a", "b", "c"])
    assert cli.main() == 3


def test_what_the_user_can_put_right_is_a_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "from megatron_klear.errors import DataError\ndef main(argv):\n    raise DataError('row 3 has no label')\n"
    use(monkeypatch, tmp_path, body)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "megatron-klear demo: row 3 has no label\n"
    assert issubclass(DataError, ValueError)


def test_an_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, tmp_path, "def main(argv):\n    raise KeyboardInterrupt\n")
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "megatron-klear demo: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, "def main(argv):\n    raise ValueError('a bug')\n")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["demo"])


@pytest.mark.parametrize("words", [["--help"], ["check", "--help"], ["check", "absent.yaml"]])
def test_quick_commands_load_no_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom megatron_klear.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    print(f"megatron-klear {' '.join(words)}: {time.perf_counter() - start:.2f} s")
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_command() -> None:
    command = [sys.executable, "-m", "megatron_klear", "rll"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "did you mean rl?" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_collected_while_a_command_is_loaded_and_all_is_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(
        monkeypatch,
        tmp_path,
        "import gc\nloading = gc.isenabled()\ndef main(argv):\n    return 10 * loading + gc.isenabled()\n",
    )
    assert cli.main(["demo"]) == 1
    use(monkeypatch, tmp_path, "raise ValueError('a bug')\n")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["demo"])
    assert gc.isenabled()
