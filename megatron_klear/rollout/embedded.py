"""The embedded engine: batched generation in this process, for laptops, tests and small models.

Requests wait in a queue; at most `max_running_requests` run at a time. A finished row makes room for the next waiting
request, so ragged lengths do not leave rows idle; when none waits, the batch shrinks.

Each request draws with numbers made from its own seed. So its tokens do not depend on what shares its batch, up to
float rounding of batched products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.errors import RolloutError
from megatron_klear.models.qwen3.decode import Qwen3Decoder
from megatron_klear.rollout.generation import Generation
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.types import Completion, GenerationRequest


class EmbeddedEngine:
    """A `RolloutEngine` in this process."""

    def __init__(self, shape: Qwen3Shape, *, max_running_requests: int = 256) -> None:
        self.shape = shape
        self.max_running_requests = max_running_requests
        self._limits = ModelLimits(shape.vocab_size, shape.max_position_embeddings)
        self._decoder: Qwen3Decoder | None = None
        self._version = -1

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; -1 before the first load."""
        return self._version

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. The old ones stay in use if the new set is not complete."""
        self._decoder = Qwen3Decoder(self.shape, named_tensors)
        self._version = version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in order. Temperature 0 is greedy (its log-probs are those of temperature 1)."""
        if self._decoder is None:
            raise RolloutError("the embedded engine has no weights yet; call load_weights before generate")
        for request in requests:
            self._limits.check(request)
        if not requests:
            return []
        return Generation(self._decoder, requests, self._version, self.max_running_requests).run()
