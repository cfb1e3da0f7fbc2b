"""Parameters of each rank, counted from the names and shapes of a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_klear.config.model import Qwen3Shape, padded_vocab_size
from megatron_klear.launch.layout import Layout

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)\.weight")


@dataclass(slots=True)
class LayerParameters:
    """Parameters of one layer, by how ranks share them. `mlp` is the part of `split` in a dense MLP."""

    split: int = 0
    """Linear layers, cut over the tensor-parallel ranks, whatever their number of KV heads."""
    whole: int = 0
    """Norms and routers, on every rank."""
    experts: int = 0
    """Each expert is whole on one of the expert-parallel ranks."""
    mlp: int = 0
    router: int = 0


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """Parameters of a whole model; the embedding and the head without padding."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    head: int
    """0 if tied to the embedding."""
    final_norm: int
    total: int

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts instead of one MLP."""
        return sum(layer.experts > 0 for layer in self.layers)


def count_parameters(shape: Qwen3Shape) -> ModelParameters:
    """All parameters of the model, one pass over its tensors."""
    layers = [LayerParameters() for _ in range(shape.num_hidden_layers)]
    shapes = shape.tensor_shapes()
    sizes = {name: math.prod(size) for name, size in shapes.items()}
    for name, size in sizes.items():
        found = _LAYER.fullmatch(name)
        if found:
            _add(layers[int(found[1])], found[2], size, is_norm=len(shapes[name]) == 1)
    return ModelParameters(
        layers=tuple(layers),
        embedding=sizes["model.embed_tokens.weight"],
        head=sizes.get("lm_head.weight", 0),
        final_norm=sizes["model.norm.weight"],
        total=sum(sizes.values()),
    )


def _add(layer: LayerParameters, name: str, size: int, *, is_norm: bool) -> None:
    if is_norm:
        layer.whole += size
    elif name == "mlp.gate":
        layer.whole += size
        layer.router += size
    elif name.startswith("mlp.experts."):
        layer.experts += size
    else:
        layer.split += size
        layer.mlp += size if name.startswith("mlp.") else 0


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank of a pipeline stage."""

    layers: int
    """Without experts."""
    experts: int
    embedding: int
    """Embedding rows on the first stage."""
    head: int
    """Output layer on the last stage: of its own, or the copy of a tied embedding that lives on another stage."""
    final_norm: int

    @property
    def dense(self) -> int:
        """All but experts: replicated over data- and context-parallel ranks."""
        return self.layers + self.embedding + self.head + self.final_norm

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts


def rank_parameters(shape: Qwen3Shape, model: ModelParameters, layout: Layout, stage: int) -> RankParameters:
    """Parameters of each rank of this stage (all tensor-, context- and data-parallel ranks hold as many)."""
    layers = [model.layers[i] for i in layout.stages[stage]]
    rows = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor * shape.hidden_size
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    shares_embedding = shape.tie_word_embeddings and is_first
    return RankParameters(
        layers=sum(one.split // layout.tensor + one.whole for one in layers),
        experts=sum(one.experts for one in layers) // layout.expert,
        embedding=rows if is_first else 0,
        head=rows if is_last and not shares_embedding else 0,
        final_norm=model.final_norm if is_last else 0,
    )
