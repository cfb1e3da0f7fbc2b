"""A real vLLM server on this host, and what transformers says about its model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.fake_servers import free_port
from helpers.tiny_qwen3 import hf_model, random_tensors
from megatron_klear.config.model import read_shape
from megatron_klear.data.arithmetic import write_model_folder
from megatron_klear.errors import EngineStale, EngineUnavailable
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.rollout.vllm import VllmServer
from megatron_klear.types import Completion, GenerationRequest, ServerAddress
from servers.environments import environment, tools

TOOLS = tools("vllm")
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 300.0
Result = TypeVar("Result")
Said = TypeVar("Said")


@dataclass(frozen=True)
class Weights:
    """A folder that the server can load, with its weights."""

    folder: Path
    tensors: dict[str, Tensor]

    @torch.inference_mode()
    def logprobs(self, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        """transformers' log-probs of token_ids[1:]."""
        model = hf_model(read_shape(self.folder), self.tensors)
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def make_weights(folder: Path, seed: int) -> Weights:
    write_model_folder(folder)
    tensors = random_tensors(read_shape(folder), seed)
    # Some tokens likely, some not: a flat distribution hides a wrong temperature.
    tensors["lm_head.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Weights(folder, tensors)


@dataclass(frozen=True)
class RunningVllm:
    """A server that generates. The labels are those of the tests' run."""

    port: int
    labels: VersionLabels
    log: Path

    def talk(self, talk: Callable[[VllmServer], Awaitable[Result]]) -> Result:
        """Run a conversation in an event loop of its own; the server is left drawing."""

        async def with_a_client(talk: Callable[[VllmServer], Awaitable[Said]]) -> Said:
            server = self._client()
            try:
                return await asyncio.wait_for(talk(server), ANSWER_TIMEOUT_S)
            finally:
                await server.close()

        async def whole() -> Result:
            try:
                return await with_a_client(talk)
            finally:
                await with_a_client(lambda server: server.resume())

        return asyncio.run(whole())

    def _client(self) -> VllmServer:
        return VllmServer(
            ServerAddress("vllm-0", f"http://127.0.0.1:{self.port}", "vllm"),
            self.labels,
            timeout_s=ANSWER_TIMEOUT_S,
            max_connections=64,
            limits=ModelLimits(vocab_size=64, max_context=512),
        )

    async def wait_for_generation(self, process: subprocess.Popen[bytes]) -> str:
        """What the first generation says: that the weights it started with are not ours."""
        deadline, server = time.monotonic() + START_TIMEOUT_S, self._client()
        while True:
            try:
                await server.generate(request((5, 6, 7), 2))
            except EngineStale as error:
                await server.close()
                return str(error)
            except EngineUnavailable as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"vLLM does not serve ({error}); its log ends:\n{self.log.read_text()[-4000:]}")
            await asyncio.sleep(1)


@contextmanager
def running_vllm(model: Path, log: Path) -> Iterator[tuple[RunningVllm, str]]:
    """A server of `model`, and what its first generation said."""
    port = free_port()
    command = [str(TOOLS / "serve.sh"), str(environment("vllm")), str(model), str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        server = RunningVllm(port, VersionLabels(), log)
        yield server, asyncio.run(server.wait_for_generation(process))
    finally:
        # The engine and its workers are processes of the same group; asked politely, the server ends them itself.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def request(
    prompt: tuple[int, ...], num_new: int, *, temperature: float = 1.0, stop: tuple[int, ...] = (), seed: int = 1
) -> GenerationRequest:
    return GenerationRequest(f"seed {seed}", prompt, num_new, temperature, stop, seed)


def max_diff(weights: Weights, asked: GenerationRequest, answer: Completion) -> float:
    """Largest |the server's log-prob - transformers'| over the answer."""
    whole = (*asked.token_ids, *answer.token_ids)
    expected = weights.logprobs(whole, asked.temperature or 1.0)[len(asked.token_ids) - 1 :]
    return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))
