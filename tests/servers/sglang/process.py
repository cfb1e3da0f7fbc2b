"""A real SGLang server: its environment, its process, and the weights that tests give it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.fake_servers import free_port
from helpers.tiny_qwen3 import hf_model, random_tensors
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.data.arithmetic import write_model_folder
from megatron_klear.errors import EngineUnavailable
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.sglang import SglangServer
from megatron_klear.types import Completion, GenerationRequest, ServerAddress
from servers.environments import environment, tools

TOOLS = tools("sglang")
START_TIMEOUT_S = 480.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Weights:
    """One set of weights of the model, in memory and as a Hugging Face folder."""

    shape: Qwen3Shape
    tensors: dict[str, Tensor]
    folder: Path

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """transformers' log-probs [L-1, V] of what follows each token but the last."""
        logits = hf_model(self.shape, self.tensors)(torch.tensor([token_ids])).logits[0, :-1]
        return (logits / temperature).log_softmax(dim=-1)

    def rescored(self, request: GenerationRequest, completion: Completion) -> Tensor:
        """transformers' log-probs of the completion's tokens at the request's temperature (greedy: at 1)."""
        rows = self.logprobs((*request.token_ids, *completion.token_ids), request.temperature or 1.0)
        picked = rows[len(request.token_ids) - 1 :].gather(1, torch.tensor(completion.token_ids)[:, None])
        return picked[:, 0]

    def scores(self, token_ids: Sequence[int]) -> Tensor:
        """transformers' log-probs of token_ids[1:] at temperature 1."""
        return self.logprobs(token_ids).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def make_weights(folder: Path, seed: int) -> Weights:
    """Random weights of the quickstart's model, with its tokenizer."""
    write_model_folder(folder)
    shape = read_shape(folder)
    tensors = random_tensors(shape, seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Weights(shape, tensors, folder)


@dataclass(frozen=True)
class Bench:
    """A running server, and two sets of weights to move between. Each test starts by pushing one of them."""

    process: subprocess.Popen[bytes]
    address: ServerAddress
    labels: VersionLabels
    first: Weights
    second: Weights

    def run(self, body: Callable[[SglangServer], Awaitable[Result]], labels: VersionLabels | None = None) -> Result:
        """Runs a test's body in a loop of its own, on a server that draws from `first`, called version 1."""

        async def main() -> Result:
            server = self.connect(labels or self.labels)
            try:
                await server.resume()
                await server.update_from_disk(str(self.first.folder), 1)
                await server.flush_cache()
                return await body(server)
            finally:
                await server.close()

        return asyncio.run(asyncio.wait_for(main(), 120))

    def connect(self, labels: VersionLabels) -> SglangServer:
        """A client of its own."""
        shape = self.first.shape
        limits = ModelLimits(shape.vocab_size, shape.max_position_embeddings)
        return SglangServer(self.address, labels, timeout_s=60, max_connections=64, limits=limits)


@contextmanager
def serve(weights: Weights, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], ServerAddress]]:
    """A server that has drawn its first token. Killed with all of its processes at the end, however that comes."""
    port = free_port()
    command = [str(TOOLS / "serve.sh"), str(environment("sglang")), str(weights.folder), str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = ServerAddress("sglang-0", f"http://127.0.0.1:{port}", "sglang")
        _wait_for_a_token(process, address, weights, log)
        yield process, address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def _wait_for_a_token(process: subprocess.Popen[bytes], address: ServerAddress, weights: Weights, log: Path) -> None:
    limits = ModelLimits(weights.shape.vocab_size, weights.shape.max_position_embeddings)

    async def ask() -> None:
        server = SglangServer(address, VersionLabels(), timeout_s=60, max_connections=1, limits=limits)
        try:
            await server.facts()
        finally:
            await server.close()

    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return asyncio.run(ask())
        except EngineUnavailable as error:
            ended = process.poll() is not None
            if ended or time.monotonic() > end:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the server {'ended' if ended else 'did not start'}: {error}\n{tail}") from error
        time.sleep(1)
