#!/usr/bin/env bash
# Serves a Hugging Face folder on 127.0.0.1, in the foreground, in float32.
#   serve.sh FOLDER_OF_SETUP MODEL PORT [more flags of sglang.launch_server]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 model=$2 port=$3
shift 3
export PYTHONPATH=$here             # sitecustomize.py
export SGLANG_USE_CPU_ENGINE=1
export HF_HUB_OFFLINE=1             # the model is a folder; nothing is looked up
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# torch_native and pytorch: the backends that need no CUDA kernels. No warm-up: the first generation is the caller's
# own sign of life.
exec "$folder/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup \
  --max-total-tokens 8192 --max-running-requests 64 --context-length 512 "$@"
