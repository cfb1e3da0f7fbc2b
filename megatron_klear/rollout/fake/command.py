"""Settings of the fake server, and starting it around a brain."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from megatron_klear.rollout.fake.engine import Engine, EngineSettings
from megatron_klear.rollout.fake.faults import Faults, FaultSettings, die
from megatron_klear.rollout.fake.http import Server
from megatron_klear.rollout.fake.jobs import Brain
from megatron_klear.rollout.fake.routes import Identity, SglangRoutes
from megatron_klear.rollout.fake.weights import RawTensor


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m megatron_klear.rollout.fake", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--model", help="Hugging Face folder: a true model generates (loads torch); without it, the script does")
    add("--round-tokens", type=int, default=64, help="with --model: tokens drawn between two looks at what has come")
    add("--vocab-size", type=int, default=1024, help="of the script")
    add("--context-length", type=int, default=4096, help="of the script")
    add("--mean-length", type=float, default=32.0, help="mean tokens of a response of the script")
    add("--token-seconds", type=float, default=0.0, help="time that each token takes (each round, with --model)")
    add("--startup-seconds", type=float, default=0.0, help="time before the port opens")
    add("--max-running-requests", type=int, default=256)
    add("--weight-version", default="default", help="version label of the weights it starts with")
    add("--release", default="0.5.23", help="release number that it says it is")
    add("--no-brackets", action="store_true", help="as older releases: no begin_ and end_weight_update")
    add("--with-parent", action="store_true", help="end when standard input does: no server outlives its test")
    add("--faults", type=json.loads, default={}, help="JSON object; see faults.py")
    return parser.parse_args(arguments)


def serve(args: argparse.Namespace, brain: Brain, model_path: str, weights: Mapping[str, RawTensor]) -> None:
    """Answer for ever. `weights`: those it starts with."""
    if args.with_parent:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    time.sleep(args.startup_seconds)
    faults = Faults(FaultSettings())
    faults.change(args.faults)
    settings = EngineSettings(
        token_seconds=args.token_seconds,
        max_running_requests=args.max_running_requests,
        weight_version=args.weight_version,
        brackets_updates=not args.no_brackets,
    )
    engine = Engine(brain, faults, settings, weights)
    routes = SglangRoutes(engine, faults, Identity(model_path, args.release))
    threading.Thread(target=_schedule, args=(engine,), daemon=True).start()
    with Server(args.host, args.port, routes) as server:
        server.serve_forever()


def _schedule(engine: Engine) -> None:
    """As in SGLang, an exception of the scheduler is the end of the server; elsewhere it is that of the call."""
    try:
        engine.run()
    finally:
        traceback.print_exc()
        die("an exception of the scheduler")


def _end_with_stdin() -> None:
    sys.stdin.read()
    die("its parent ended")
