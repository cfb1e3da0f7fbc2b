"""How much better planned micro-batches are than simple rules: useful tokens and waiting, on reasoning-like lengths.

    python benchmarks/packing.py [--seeds 20] [--samples 512]

Lengths are lognormal (median 5,000, sigma 0.9) cut off at 32,768 tokens. Costs are the operations of Qwen3-8B, and all
micro-batches of an update have one length, as a pipeline needs. The rules:

- in order: next sample into the first micro-batch that has room, micro-batch i to rank i modulo their number;
- greedy: longest sample into the micro-batch with the fewest tokens, the same dealing (this project until issue 5);
- planned: data/balance.py.

`useful`: tokens / positions. `rank`: cost of the costliest rank / mean, what ranks without a pipeline wait for. `slot`:
the same when ranks meet at each micro-batch (experts). `pipe`: costliest micro-batch / mean, what a pipeline's bubble
grows with. Each is the worst of the seeds; `relative time` is the mean of rank / useful over that of the plan.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.data.balance import Bin, Limits, TokenCost, make_plan

QWEN3_8B = Qwen3Shape(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=40960,
)
COST = TokenCost.of(QWEN3_8B)
LONGEST = 32768
Rule = Callable[[Sequence[int], Limits], list[list[Bin]]]


@dataclass(frozen=True)
class Quality:
    useful: float
    rank: float
    slot: float
    pipe: float
    count: int

    @property
    def time(self) -> float:
        return self.rank / self.useful


def reasoning_lengths(seed: int, num: int) -> list[int]:
    numbers = random.Random(seed)
    return [max(16, min(LONGEST, int(numbers.lognormvariate(math.log(5000), 0.9)))) for _ in range(num)]


def in_order(lengths: Sequence[int], limits: Limits) -> list[list[Bin]]:
    bins: list[Bin] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        number = next((i for i, left in enumerate(room) if left >= length), None)
        if number is None:
            number = len(bins)
            bins.append([])
            room.append(limits.budget)
        bins[number].append(index)
        room[number] -= length
    bins += [[] for _ in range(-len(bins) % limits.num_ranks)]
    return [bins[rank :: limits.num_ranks] for rank in range(limits.num_ranks)]


def greedy(lengths: Sequence[int], limits: Limits) -> list[list[Bin]]:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for count in itertools.count(-(-sum(lengths) // (limits.num_ranks * limits.budget))):
        bins: list[Bin] = [[] for _ in range(count * limits.num_ranks)]
        lightest = [(0, number) for number in range(len(bins))]
        for index in order:
            load, number = lightest[0]
            bins[number].append(index)
            heapq.heapreplace(lightest, (load + lengths[index], number))
        if max(load for load, _ in lightest) <= limits.budget:
            return [bins[rank :: limits.num_ranks] for rank in range(limits.num_ranks)]
    raise AssertionError("the loop ends when each sample has a micro-batch of its own")


def planned(lengths: Sequence[int], limits: Limits) -> list[list[Bin]]:
    return make_plan(lengths, limits, COST).ranks


RULES: dict[str, Rule] = {"in order": in_order, "greedy": greedy, "planned": planned}


def quality(lengths: Sequence[int], ranks: list[list[Bin]]) -> Quality:
    costs = [[sum(COST(lengths[i]) for i in one) for one in rank] for rank in ranks]
    count, total = len(ranks[0]), sum(map(sum, costs))
    positions = max(sum(lengths[i] for i in one) for rank in ranks for one in rank)
    return Quality(
        useful=sum(lengths) / (positions * count * len(ranks)),
        rank=max(map(sum, costs)) * len(ranks) / total,
        slot=sum(map(max, zip(*costs, strict=True))) * len(ranks) / total,
        pipe=max(map(max, costs)) * count * len(ranks) / total,
        count=count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=512)
    args = parser.parse_args()
    updates = [reasoning_lengths(seed, args.samples) for seed in range(args.seeds)]
    print(f"{args.seeds} updates of {args.samples} samples, median 5,000, sigma 0.9, longest {LONGEST}; worst of all")
    print(f"{'ranks':>5} {'tokens':>6}  {'rule':<9} useful   rank   slot   pipe  micro-batches  relative time")
    for num_ranks, budget in itertools.product((8, 32), (32768, 65536)):
        limits = Limits(num_ranks, budget)
        found = {name: [quality(lengths, rule(lengths, limits)) for lengths in updates] for name, rule in RULES.items()}
        best = statistics.mean(one.time for one in found["planned"])
        for name, rows in found.items():
            useful = min(one.useful for one in rows)
            rank, slot, pipe = (max(column) for column in zip(*((r.rank, r.slot, r.pipe) for r in rows), strict=True))
            counts = sum(one.count for one in rows) / len(rows)
            time = statistics.mean(one.time for one in rows) / best
            print(
                f"{num_ranks:>5} {budget:>6}  {name:<9} {useful:.4f} {rank:6.3f} {slot:6.3f} {pipe:6.3f}"
                f"  {counts:13.2f}  {time:13.3f}"
            )


if __name__ == "__main__":
    main()
