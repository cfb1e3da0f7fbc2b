"""Held-out accuracy of an exported folder by transformers' own greedy `generate`, beside what the trainer measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_klear.config.recipe import RewardConfig
from megatron_klear.rewards.registry import build_reward
from megatron_klear.types import Prompt, RewardRequest

ALLOWED_DIFFERENCE = 2


def main() -> int:
    """Exit code 1 if more than two answers differ from the expected number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hf_dir", type=Path)
    parser.add_argument("eval_data", type=Path)
    parser.add_argument("--expected", type=int, required=True, help="right answers that the trainer counted")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.eval_data.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(args.hf_dir, padding_side="left")
    # Any: transformers' annotations of `generate` do not fit its own classes.
    model: Any = AutoModelForCausalLM.from_pretrained(args.hf_dir)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=args.max_new_tokens)
    responses = tokenizer.batch_decode(output[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    reward = build_reward(RewardConfig(type="arithmetic"))
    requests = [
        RewardRequest(Prompt(str(i), (), answer=row["label"]), text)
        for i, (row, text) in enumerate(zip(rows, responses, strict=True))
    ]
    right = sum(score.reason == "correct" for score in reward(requests))
    print(f"transformers' generate: {right} of {len(rows)} right; the trainer's engine counted {args.expected}")
    return int(abs(right - args.expected) > ALLOWED_DIFFERENCE)


if __name__ == "__main__":
    raise SystemExit(main())
