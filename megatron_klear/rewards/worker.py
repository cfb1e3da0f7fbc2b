"""The child process that runs math-verify: one JSON message in, one verdict out, until its pipe closes.

Started by `rewards/pool.py` with nothing but this package and math-verify on board; the parent owns the deadline.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
from functools import lru_cache
from multiprocessing.connection import Connection

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# Past double precision: tolerance is what lets 0.6666667 pass for 2/3. Small numbers differ long after the 15th digit.
FLOAT_ROUNDING = 15
NUMERIC_PRECISION = 50
# A runaway power must not take the trainer's memory with it. One answer needs about 100 MB.
MAX_MEMORY_BYTES = 4 * 1024**3

# Units are stripped by rewards/answers.py, by rules that keep "5 million" and 5t apart from 5.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last", equations=False
    ),
)


def parse_box(latex: str) -> list[object]:
    """Expressions in the content of a box. LaTeX only: no digging for some number inside what does not parse."""
    return parse(rf"\boxed{{{latex}}}", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]


def parse_prose(text: str) -> list[object]:
    """The last expression in running text, as the library finds it."""
    targets = [_LATEX, ExprExtractionConfig()]
    return parse(text, targets, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]


# The samples of a group share their label.
parse_gold = lru_cache(maxsize=256)(parse_box)


def judge(gold: str, prediction: str | None, boxed: bool) -> str:
    """`correct`, `wrong`, `not_parsed` or `bad_gold`; without a prediction, `correct` says that the gold parses."""
    golds = parse_gold(gold)
    if not golds:
        return "bad_gold"
    if prediction is None:
        return "correct"
    predictions = parse_box(prediction) if boxed else parse_prose(prediction)
    if not predictions:
        return "not_parsed"
    same = verify(
        golds,  # type: ignore[arg-type]
        predictions,  # type: ignore[arg-type]
        float_rounding=FLOAT_ROUNDING,
        numeric_precision=NUMERIC_PRECISION,
        allow_set_relation_comp=True,  # 0 <= x <= 1 is the interval [0, 1]
        timeout_seconds=None,
    )
    return "correct" if same else "wrong"


def serve(connection: Connection, max_cpu_s: float) -> None:
    """Answer until the parent closes the pipe."""
    judge("x+1", "1+x", True)  # builds the library's tables outside of any answer's deadline
    connection.send_bytes(b"ready")
    while True:
        message = json.loads(connection.recv_bytes())
        # The parent kills at the deadline. Should it be gone by then, this ends an answer that never would:
        # SIGPROF is left at its default action, so the kernel needs no help from a busy interpreter.
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        verdict = judge(message["gold"], message["prediction"], message["boxed"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(verdict.encode())


def main(descriptor: int, max_cpu_s: float) -> None:
    """Serve on an inherited pipe. Ctrl-C is the parent's business, and its end is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    logging.disable(logging.CRITICAL)
    try:
        serve(Connection(descriptor), max_cpu_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
