"""`megatron-klear plan`: whether a recipe fits on GPUs, and how fast it would be. Needs neither torch nor a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_klear.config.model import read_shape
from megatron_klear.config.recipe import Recipe, RlRecipe
from megatron_klear.errors import ConfigError, Fault
from megatron_klear.launch.hardware import GPUS, find_gpu
from megatron_klear.launch.job import job_of
from megatron_klear.launch.predict import Prediction, predict
from megatron_klear.launch.search import Search, Variant, search_layouts, smallest_change
from megatron_klear.launch.text import assumptions_note, describe, describe_remedy, describe_search
from megatron_klear.launch.variants import load_for_planning
from megatron_klear.launch.workload import Assumptions


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-klear plan",
        usage="%(prog)s RECIPE --gpus N --gpu NAME [--search] [--json] [section.key=value | --flag value ...]",
        description="Whether a recipe fits on GPUs and how fast it would be there: an estimate, made without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="YAML file; its model's config.json must be there, weights and data need not")
    parser.add_argument("--gpus", type=_positive, required=True, help="GPUs in all")
    parser.add_argument("--gpu", required=True, help=", ".join(GPUS))
    parser.add_argument("--search", action="store_true", help="rank the layouts that fit by speed")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--mean-response-len", type=_positive, help="tokens of a mean response (sft: sample)")
    parser.add_argument("--kept", type=_share, help="share of the responses that selection keeps; 1 if not given")
    parser.add_argument("--engine", choices=("embedded", "server"), help="who samples; the recipe's if not given")
    parser.add_argument(
        "--engine-gpus", type=_positive, help="GPUs of one engine, with --engine server; 1 if not given"
    )
    return parser


def _engine(recipe: Recipe, given: str | None) -> str:
    if given is not None:
        return given
    return "server" if isinstance(recipe, RlRecipe) and recipe.rollout.engine != "embedded" else "embedded"


def _assumed(arguments: argparse.Namespace, recipe: Recipe) -> Assumptions:
    """Raises `ConfigError` for an option that would have no effect, and for engines that do not divide the GPUs."""
    engine, size = _engine(recipe, arguments.engine), arguments.engine_gpus
    faults = []
    if not isinstance(recipe, RlRecipe):
        given = {"--engine": arguments.engine, "--engine-gpus": size, "--kept": arguments.kept}
        reason = "would have no effect: an sft recipe samples nothing"
        faults += [Fault(name, value, reason, "leave it out") for name, value in given.items() if value is not None]
    elif size is not None and engine == "embedded":
        faults.append(Fault("--engine-gpus", size, "would have no effect: the embedded engine runs on one GPU"))
    elif size is not None and arguments.gpus % size:
        whole, rest = divmod(arguments.gpus, size)
        faults.append(Fault("--engine-gpus", size, f"{arguments.gpus} GPUs = {whole} engines x {size} + {rest}"))
    if faults:
        raise ConfigError("\n".join(map(str, faults)), faults)
    return Assumptions(arguments.mean_response_len, arguments.kept or 1.0, engine, size or 1)


def _predict(arguments: argparse.Namespace, overrides: Sequence[str]) -> Prediction:
    gpu = find_gpu(arguments.gpu)
    recipe = load_for_planning(arguments.recipe, overrides, arguments.gpus)
    assumed = _assumed(arguments, recipe)
    return predict(job_of(recipe, read_shape(recipe.model.hf_checkpoint), gpu, arguments.gpus, assumed))


def main(argv: Sequence[str]) -> int:
    """Plan a recipe. Returns 0 if it fits, 1 if it does not, 2 for what the user can put right."""
    arguments, overrides = _parser().parse_known_args(argv)
    try:
        prediction = _predict(arguments, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    remedy = None if prediction.fits else smallest_change(prediction)
    found = search_layouts(prediction.job) if arguments.search else None
    if arguments.json:
        print(json.dumps(_numbers(prediction, remedy, found), indent=2))
    else:
        print("\n".join(_lines(prediction, remedy, found)))
    return 0 if prediction.fits else 1


def _lines(prediction: Prediction, remedy: Variant | None, found: Search | None) -> list[str]:
    lines = describe(prediction)
    if not prediction.fits:
        lines += ["", *describe_remedy(prediction, remedy)]
    if found is not None:
        lines += describe_search(found)
    return [*lines, "", assumptions_note()]


def _numbers(prediction: Prediction, remedy: Variant | None, found: Search | None) -> dict[str, Any]:
    numbers = prediction.numbers()
    if remedy is not None:
        numbers["remedy"] = {"changes": remedy.changes, **remedy.prediction.numbers()}
    if found is not None:
        best = [{"changes": v.changes, **v.prediction.numbers()} for v in found.fitting[:10]]
        numbers["search"] = {"num_tried": found.num_tried, "num_allowed": found.num_allowed, "best": best}
    return numbers
