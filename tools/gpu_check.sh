#!/usr/bin/env bash
# Shows on a CUDA machine that the GPU tests pass and that a short RL run works, and runs the kernels' benchmarks, in at
# most ten minutes.
#
#   tools/gpu_check.sh
#
# The machine needs Python 3.12 (or 3.11) with torch, triton, transformers and pytest for CUDA; it needs no network.
# What it lacks travels as wheels in wheels/, fetched beforehand where there is a network:
#
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
#     megatron-core==0.19.2 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types typing-inspection \
#     datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash \
#     math-verify==0.9.0 latex2sympy2_extended==1.11.0 antlr4-python3-runtime==4.13.2
#
# (--python-version: that of the CUDA machine). The wheels go into a temporary folder, the machine's Python stays as it is.
#
# Settings: PYTHON (default python3), WHEELS (default wheels), OUT (where the table and the logs go; without it the
# table goes to benchmarks/results/). Exit status: 0 if every phase passed, 1 if one failed, 2 if it could not start.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}
results=${OUT:-benchmarks/results}
limit_s=600
smoke_limit_s=180
benchmark_limit_s=120

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
logs=${OUT:-$work}
export PYTHONPATH="$work/site:$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"

give_up() {
  printf 'gpu_check: %s\n' "$1" >&2
  exit 2
}

require_cuda() {
  "$python" -c 'import torch' || give_up "'$python' cannot import torch; set PYTHON to a Python that has torch for CUDA"
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    give_up "torch sees no CUDA device (torch $("$python" -c 'import torch; print(torch.__version__)')); on a machine without one run 'make test' instead"
}

rows=()
failed=0

# phase NAME LIMIT_S COMMAND...: runs it, keeps its output in a log, adds a row to the table.
phase() {
  local name=$1 limit=$2 begun=$SECONDS status=0 result=ok
  shift 2
  local left=$((limit_s - SECONDS))
  limit=$((limit < left ? limit : left))
  printf '\n== %s\n' "$name"
  # `timeout 0` would mean no limit.
  timeout --kill-after=10 "$((limit > 0 ? limit : 1))" "$@" 2>&1 | tee "$logs/gpu_check-${name// /_}.log" || status=$?
  case $status in
    0) ;;
    124 | 137) result="FAILED (over ${limit} s)" ;;
    *) result="FAILED (exit status $status)" ;;
  esac
  ((status == 0)) || failed=1
  rows+=("| $name | $result | $((SECONDS - begun)) |")
}

install_wheels() {
  local found=("$wheels"/*.whl)
  if [[ ! -e "${found[0]}" ]]; then
    echo "no wheels in $wheels/: using what '$python' has"
    return
  fi
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$work/site" "${found[@]}"
}

require_packages() {
  # Megatron warns on import about optional packages that are not here.
  "$python" -W ignore - <<'PYTHON'
import importlib
import sys

needed = ("megatron.core", "triton", "transformers", "datasets", "math_verify", "pydantic", "yaml", "safetensors",
          "matplotlib", "tensorboard", "tqdm", "psutil", "pytest", "hypothesis")
missing = []
for name in needed:
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    sys.exit("missing here: " + "; ".join(missing) + ". Carry them as wheels: see the top of tools/gpu_check.sh")
PYTHON
}

versions() {
  "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


print(f"| card | {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} |")
print(f"| CUDA of torch | {torch.version.cuda} |")
print(f"| Python | {platform.python_version()} |")
for name in ("torch", "triton", "megatron-core", "transformer-engine", "transformers", "numpy", "pydantic", "datasets"):
    print(f"| {name} | {installed(name)} |")
PYTHON
}

write_table() {
  printf '# GPU check\n\n| what | value |\n|---|---|\n'
  printf '| date | %s |\n' "$(date -u '+%Y-%m-%d %H:%M UTC')"
  printf '| commit | %s |\n' "$(git describe --always --dirty 2>/dev/null || echo 'not a git checkout')"
  printf '| driver | %s |\n' "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || echo unknown)"
  printf '%s\n' "$version_rows"
  printf '\n| phase | result | seconds |\n|---|---|---|\n'
  printf '%s\n' "${rows[@]}"
}

require_cuda
mkdir -p "$results" "$work/site"
install_wheels || give_up "pip could not install the wheels of $wheels/"
require_packages || give_up "the packages above are needed"
version_rows=$(versions)

# Exit status 5 of pytest (no test has the mark) counts as a failure: nothing would have been shown.
phase "gpu tests" "$limit_s" "$python" -m pytest -q -m gpu tests
phase "rl smoke run" "$smoke_limit_s" "$python" examples/quickstart/run.py --smoke
phase "fused loss" "$benchmark_limit_s" "$python" benchmarks/fused_loss.py --out "$results"
phase "small kernels" "$benchmark_limit_s" "$python" benchmarks/small_kernels.py

table=$results/gpu_check-$(date -u '+%Y%m%d-%H%M%S').md
write_table >"$table"
for name in fused_loss small_kernels; do
  printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(cat "$logs/gpu_check-$name.log")" >>"$table"
done
printf '\n'
cat "$table"
exit "$failed"
