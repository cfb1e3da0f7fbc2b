"""The brain that is a true model: the embedded engine behind SGLang's HTTP. Loads torch.

Requests are drawn together, `round_tokens` at a time; each round is one call of the embedded engine, so its tokens are
of one version of the weights, and what comes meanwhile (a pause, an abort, new weights, a new request) takes effect at
its end. A request of several rounds has its sequence prefilled anew in each, and draws from a new seed in each: at a
temperature above 0 its tokens equal the embedded engine's own only up to the first round's end.

It keeps no prefix cache, has no accelerator's memory to release, and computes in the dtype of the weights as they came.
Of the weights a partial set may come at a time; the others stay.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.errors import WeightSyncError
from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.rollout.embedded import EmbeddedEngine
from megatron_klear.rollout.fake.command import parse, serve
from megatron_klear.rollout.fake.jobs import Drawn, Job
from megatron_klear.rollout.fake.weights import RawTensor, read_folder
from megatron_klear.types import GenerationRequest


class EmbeddedBrain:
    """Weights are checked when they come, and built into a model when they are first used."""

    def __init__(self, shape: Qwen3Shape, *, round_tokens: int) -> None:
        self.shape, self.round_tokens = shape, round_tokens
        self.vocab_size, self.context_length = shape.vocab_size, shape.max_position_embeddings
        self._engine = EmbeddedEngine(shape)
        self._tensors: dict[str, Tensor] = {}
        self._scorer: Qwen3Decoder | None = None

    def load(self, weights: Mapping[str, RawTensor]) -> None:
        """Raises `WeightSyncError` for a weight that the model does not have, or of another shape."""
        expected = self.shape.tensor_shapes()
        for name, raw in weights.items():
            if expected.get(name) != raw.shape:
                raise WeightSyncError(f"{name} has shape {raw.shape}, expected {expected.get(name)}")
        self._tensors = {name: _tensor(raw) for name, raw in weights.items()}
        self._scorer = None

    def _build(self) -> Qwen3Decoder:
        if self._scorer is None:
            self._engine.load_weights(self._tensors.items(), 0)
            self._scorer = Qwen3Decoder(self.shape, self._tensors.items())
        return self._scorer

    def draw(self, jobs: Sequence[Job], version: int | None) -> list[list[Drawn]]:
        """A round for each job."""
        self._build()
        completions = self._engine.generate([self._request(job) for job in jobs])
        return [
            [Drawn(token, logprob) for token, logprob in zip(done.token_ids, done.logprobs, strict=True)]
            for done in completions
        ]

    def _request(self, job: Job) -> GenerationRequest:
        count = len(job.drawn)
        return GenerationRequest(
            job.rid,
            (*job.prompt, *(one.token for one in job.drawn)),
            min(self.round_tokens, job.max_new_tokens - count),
            temperature=job.temperature,
            stop_token_ids=job.stop_token_ids,
            seed=zlib.crc32(f"{job.seed}/{count}".encode()) if count else job.seed,
        )

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], version: int | None) -> list[float]:
        """One token after the other, by the cache."""
        decoder = self._build()
        decoder.reset(len(prompt))
        ids, none = torch.tensor([prompt]), torch.zeros(0, dtype=torch.int64)
        logits = decoder.prefill(ids[:, :1], torch.tensor([1]), none)
        scores = []
        for i, token in enumerate(prompt[1:], start=1):
            scores.append(float(logits[0].log_softmax(-1)[token]))
            logits = decoder.step(ids[0, i : i + 1])
        return scores


def _tensor(raw: RawTensor) -> Tensor:
    data = torch.frombuffer(bytearray(raw.data), dtype=torch.uint8)
    return data.view(torch.__dict__[raw.dtype]).view(raw.shape)


def main() -> None:
    """Serve the model of --model."""
    args = parse()
    brain = EmbeddedBrain(read_shape(args.model), round_tokens=args.round_tokens)
    serve(args, brain, args.model, read_folder(args.model))


if __name__ == "__main__":
    main()
