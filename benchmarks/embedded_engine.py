"""Tokens per second of the embedded engine beside transformers' `generate`, in turns, in one process.

    python benchmarks/embedded_engine.py [--threads 2] [--turns 3] [--samples-per-prompt 8] [--slots 256]

256 requests (32 prompts of 32 tokens, 8 samples each) to Qwen3 models of random weights, at temperature 1 from the
whole vocabulary. Token ids and log-probs are wanted from both sides, as lists. Lengths are forced, so that both do the
same work: "ragged" is lognormal (sigma 0.8, mean a quarter of the longest, 256 tokens), "equal" is 64 tokens each.
Only tokens within a request's length count.

The engine takes each request's length as max_new_tokens; it does not schedule by it. `generate` gets all requests as
one batch and ends with its longest: a stopping criterion ends each row at its length. It keeps raw logits
(`output_logits`), from which log-probs of the chosen tokens are taken step by step, which is cheaper than
`compute_transition_scores` (that stacks and normalises all logits of all steps). Of eager and sdpa attention, dynamic
and static cache, the fastest for a model, a dtype and a kind of lengths is found in a turn that does not count.

A turn runs engine, `generate` in float32 and `generate` in bfloat16, one after the other. Speeds are medians of turns;
a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.types import GenerationRequest

Output = list[tuple[list[int], list[float]]]
SIZES: dict[str, dict[str, int]] = {
    "0.8M": {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4},
    "4M": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8},
}
VARIANTS: list[tuple[str, str | None]] = [*itertools.product(("sdpa", "eager"), (None, "static"))]


@dataclass(frozen=True)
class Work:
    """Prompts [N, P] and how many tokens each request is to get."""

    prompts: Tensor
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def requests(self) -> list[GenerationRequest]:
        rows = zip(self.prompts.tolist(), self.lengths, strict=True)
        return [GenerationRequest(f"r{i}", tuple(ids), length, seed=i) for i, (ids, length) in enumerate(rows)]


class EndRows(StoppingCriteria):
    """Ends row i when it has ends[i] tokens, prompt included."""

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.size(1) >= self.ends


def settings(size: dict[str, int]) -> dict[str, Any]:
    heads = size["num_attention_heads"]
    other = {"num_hidden_layers": 4, "num_key_value_heads": heads // 2, "head_dim": 32}
    return size | other | {"max_position_embeddings": 4096, "tie_word_embeddings": True}


def peer(size: dict[str, int], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**settings(size), bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return torch.nn.Module.to(Qwen3ForCausalLM(config), dtype).eval()


def engine(size: dict[str, int], model: Any, slots: int) -> EmbeddedEngine:
    made = EmbeddedEngine(Qwen3Shape(model_type="qwen3", **settings(size)), max_running_requests=slots)
    named = ((name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight")
    made.load_weights(named, 0)
    return made


def ragged(num: int, longest: int) -> list[int]:
    """Lognormal of mean longest / 4; one is the longest."""
    numbers, sigma = random.Random(0), 0.8
    mu = math.log(longest / 4) - sigma**2 / 2
    return [longest] + [max(1, min(longest, round(numbers.lognormvariate(mu, sigma)))) for _ in range(num - 1)]


def generate_here(made: EmbeddedEngine, work: Work) -> Output:
    return [(list(done.token_ids), list(done.logprobs)) for done in made.generate(work.requests())]


@torch.inference_mode()
def generate_there(model: Any, work: Work, cache: str | None) -> Output:
    width = work.prompts.size(1)
    made = model.generate(
        work.prompts,
        attention_mask=torch.ones_like(work.prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(work.lengths),
        stopping_criteria=StoppingCriteriaList([EndRows(torch.tensor(work.lengths) + width)]),
        cache_implementation=cache,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[:, width:]
    columns = [logits.float().log_softmax(-1).gather(1, tokens[:, i : i + 1]) for i, logits in enumerate(made.logits)]
    rows = zip(tokens.tolist(), torch.cat(columns, dim=1).tolist(), work.lengths, strict=True)
    return [(ids[:length], logprobs[:length]) for ids, logprobs, length in rows]


def seconds(run: Callable[[], Output], work: Work) -> float:
    start = time.perf_counter()
    output = run()
    taken = time.perf_counter() - start
    assert all(len(ids) == len(logprobs) for ids, logprobs in output)
    assert [len(ids) for ids, _ in output] == work.lengths
    return taken


def fastest(model: Any, work: Work) -> tuple[str, str | None]:
    """The variant of `generate` that took least time."""

    def run(variant: tuple[str, str | None]) -> float:
        model.set_attn_implementation(variant[0])
        return seconds(lambda: generate_there(model, work, variant[1]), work)

    best = min(VARIANTS, key=run)
    model.set_attn_implementation(best[0])
    return best


def turns(made: EmbeddedEngine, peers: Sequence[Any], work: Work, num: int) -> list[str]:
    """Columns of a row of the table: speeds, ratios, settings of `generate`."""
    variants = [fastest(model, work) for model in peers]
    seconds(lambda: generate_here(made, work), work)
    taken = [
        (
            seconds(lambda: generate_here(made, work), work),
            *(
                seconds(lambda m=model, c=cache: generate_there(m, work, c), work)
                for model, (_, cache) in zip(peers, variants, strict=True)
            ),
        )
        for _ in range(num)
    ]
    speeds = [f"{work.num_tokens / statistics.median(column):,.0f}" for column in zip(*taken, strict=True)]
    ratios = [f"{statistics.median(turn[i] / turn[0] for turn in taken):.2f}" for i in (1, 2)]
    spread = f"{min(t[1] / t[0] for t in taken):.2f}-{max(t[1] / t[0] for t in taken):.2f}"
    return [*speeds, *ratios, spread, ", ".join(f"{attention}/{cache or 'dynamic'}" for attention, cache in variants)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--lengths", nargs="+", choices=("ragged", "equal"), default=["ragged", "equal"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--equal", type=int, default=64)
    parser.add_argument("--slots", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = {"ragged": ragged(args.requests, args.longest), "equal": [args.equal] * args.requests}
    print(f"{args.requests} requests, {args.samples_per_prompt} a prompt, {args.threads} threads, {args.turns} turns")
    print("tokens/s; ratios: engine / generate")
    print(f"{'model':<6}{'lengths':<8}{'tokens':>7}{'engine':>9}{'f32':>8}{'bf16':>8}{'/f32':>7}{'/bf16':>7}  turns")
    for name in args.models:
        size = SIZES[name]
        peers = [peer(size, dtype) for dtype in (torch.float32, torch.bfloat16)]
        made = engine(size, peers[0], args.slots)
        generator = torch.Generator().manual_seed(0)
        num_prompts = -(-args.requests // args.samples_per_prompt)
        prompts = torch.randint(size["vocab_size"], (num_prompts, args.prompt_tokens), generator=generator)
        prompts = prompts.repeat_interleave(args.samples_per_prompt, 0)[: args.requests]
        for kind in args.lengths:
            work = Work(prompts, lengths[kind])
            ours, f32, bf16, over_f32, over_bf16, spread, variants = turns(made, peers, work, args.turns)
            print(
                f"{name:<6}{kind:<8}{work.num_tokens:>7}{ours:>9}{f32:>8}{bf16:>8}{over_f32:>7}{over_bf16:>7}"
                f"  {spread}; {variants}",
                flush=True,
            )


if __name__ == "__main__":
    main()
