"""A few tokens whose log-probs trainer and servers must agree on after every push of weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from megatron_klear.data.packing import PackSpec, pack
from megatron_klear.parallel.broadcast import from_last_stage
from megatron_klear.parallel.context import whole_rows
from megatron_klear.training.head import Head, HeadSettings
from megatron_klear.training.policy import Policy
from megatron_klear.types import Prompt, Sample, TrainBatch

NUM_TOKENS = 24


def probe_tokens(vocab_size: int, most: int = NUM_TOKENS) -> tuple[int, ...]:
    """Tokens of the probe, the same in every run: any will do, for wrong weights are wrong everywhere."""
    return tuple(random.Random(0).choices(range(vocab_size), k=min(most, NUM_TOKENS)))


class TrainerProbe:
    """What the policy says of the probe's tokens.

    `distribute` brings rank 0's updates (one batch a replica each) to every rank's device: `Run.distribute`.
    """

    def __init__(
        self,
        policy: Policy,
        spec: PackSpec,
        distribute: Callable[[Sequence[Sequence[TrainBatch]] | None], list[TrainBatch]],
    ) -> None:
        self.policy = policy
        self.distribute = distribute
        self.token_ids = probe_tokens(policy.stage.shape.vocab_size, most=spec.budget)
        # At temperature 1, whatever the run samples with: servers score prompts so.
        self.head = Head(policy.stage, policy.context.groups, HeadSettings())
        # One copy for each replica, so that rank 0's has one.
        self.updates = [pack([_sample(self.token_ids, i) for i in range(spec.data_parallel_size)], spec)]

    def logprobs(self) -> list[float]:
        """Log-probs of token_ids[1:] under the current weights, on every rank. A collective."""
        context = self.policy.context
        (batch,) = self.distribute(self.updates if context.is_main else None)
        first = batch.micro_batches[0]
        stats = self.policy.forward(batch, self.head)
        rows = whole_rows(stats[0].logprobs[:, None], first, context).t() if stats else None
        length = first.token_ids.numel() * context.topology.context_size
        (values,) = from_last_stage(rows, (1, length), context).tolist()
        own = next(place for place, sample in enumerate(first.sample_index.tolist()) if sample >= 0)
        begin = int(first.cu_seqlens[own])
        return values[begin : begin + len(self.token_ids) - 1]


def _sample(token_ids: tuple[int, ...], number: int) -> Sample:
    sample = Sample(f"probe {number}", Prompt("probe", token_ids[:1]))
    rest = token_ids[1:]
    sample.append_response(rest, [0.0] * len(rest), weight_version=0, stop_reason="length")
    return sample
