"""The command `megatron-klear`: one table of commands, each loaded only when it is asked for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module

from megatron_klear import __version__
from megatron_klear.errors import KlearError

# The only lazy import of the project: --help and check must not wait for torch.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "sft": ("megatron_klear.training.sft:main", "supervised fine-tuning of a recipe"),
    "rl": ("megatron_klear.training.rl:main", "reinforcement learning of a recipe"),
    "check": ("megatron_klear.config.check:main", "list everything that is wrong with a recipe"),
    "plan": ("megatron_klear.launch.plan:main", "whether a recipe fits on GPUs, and how fast it would be there"),
    "convert": ("megatron_klear.training.convert:main", "Megatron checkpoint <-> Hugging Face folder"),
    "arithmetic": ("megatron_klear.data.arithmetic:main", "write the quickstart's problems"),
    "checkpoint": ("megatron_klear.checkpoint.command:main", "list, show, verify or prune the checkpoints of a run"),
    "report": ("megatron_klear.report.html:main", "write the HTML report of a run"),
}


def _help() -> str:
    lines = [f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-klear COMMAND ...",
            "       megatron-klear --help | --version",
            "",
            "commands (megatron-klear COMMAND --help says more):",
            *lines,
        ]
    )


def _load(target: str) -> Callable[[list[str]], int]:
    module, _, function = target.partition(":")
    # Imports make a million objects and no garbage: looking for some took a fifth of their time. What they made stays,
    # so that no later collection looks at it either.
    gc.disable()
    try:
        return vars(import_module(module))[function]
    finally:
        gc.freeze()
        gc.enable()


def _refuse(word: str) -> int:
    close = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
    print(f"megatron-klear: no such command: {word!r} ({hint})", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code; 2 for what the user can put right, 130 for Ctrl-C."""
    name, *words = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"megatron-klear {__version__}")
        return 0
    if not name:
        print(_help(), file=sys.stderr)
        return 2
    if name not in COMMANDS:
        return _refuse(name)
    try:
        return _load(COMMANDS[name][0])(words)
    except KlearError as error:
        print(f"megatron-klear {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"megatron-klear {name}: interrupted", file=sys.stderr)
        return 130
