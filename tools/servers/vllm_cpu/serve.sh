#!/usr/bin/env bash
# Serves a Hugging Face folder on 127.0.0.1, in the foreground, in float32.
#   serve.sh FOLDER_OF_SETUP MODEL PORT [more flags of vllm serve]
set -euo pipefail
folder=$1 model=$2 port=$3
shift 3
# What training needs on any host. The development calls pause the server and give it weights: anybody who reaches the
# port can make them. --tokens-only (or --enable-scale-out): answers say which weights drew each token. --logprobs-mode:
# log-probs are those after temperature.
export VLLM_SERVER_DEV_MODE=1
needed=(--tokens-only --logprobs-mode processed_logprobs)

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB
export VLLM_CPU_OMP_THREADS_BIND=nobind                    # the cores are shared with other processes
export HF_HUB_OFFLINE=1                                    # the model is a folder; nothing is looked up
export VLLM_NO_USAGE_STATS=1
exec "$folder/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" "${needed[@]}" \
  --dtype float32 --max-model-len 512 --max-num-seqs 64 --enforce-eager "$@"
