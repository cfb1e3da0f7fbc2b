"""The command."""

from __future__ import annotations

import os
import sys

from megatron_klear.rollout.fake.command import parse, serve
from megatron_klear.rollout.fake.script import Script
from megatron_klear.rollout.fake.scripted import ScriptedBrain


def main() -> None:
    """Serve by the script; with --model, become the program that loads torch."""
    args = parse()
    if args.model is not None:
        os.execv(sys.executable, [sys.executable, "-m", "megatron_klear.rollout.fake.embedded", *sys.argv[1:]])
    serve(args, ScriptedBrain(Script(args.vocab_size, args.mean_length), args.context_length), "scripted", {})


if __name__ == "__main__":
    main()
