"""Jobs that let mbridge, a converter written by others, fill and read the model of this repository."""

from __future__ import annotations

import importlib
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dist.world import Layout, World, world
from helpers.tiny_qwen3 import hf_config
from megatron_klear.config.model import Qwen3Shape
from megatron_klear.config.model import padded_vocab_size
from megatron_klear.models.build import DTYPES, ModelStage, build_stage
from megatron_klear.models.hf_bridge import export_weights, import_weights
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.device import megatron_scope

Bits = dict[str, tuple[tuple[int, ...], bytes]]
"""Shape and bytes of tensors: equal only bit for bit, signs of zeros included."""

LAYER = r"^decoder\.layers\.\d+\."
# mbridge knows the layers of Transformer Engine, where the norm before a linear layer is a part of that layer and the
# experts of a layer are one module; this repository builds Megatron's own, where neither is. (pattern, replacement)
ATTENTION_NORM = (rf"({LAYER})input_layernorm\.weight$", r"\1self_attention.linear_qkv.layer_norm_weight")
DENSE_MLP_NORM = (rf"({LAYER})pre_mlp_layernorm\.weight$", r"\1mlp.linear_fc1.layer_norm_weight")
EXPERTS = (r"\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$", r".experts.\2\1")


def te_name(name: str, *, is_moe: bool) -> str:
    """Megatron's name with Transformer Engine for one without. A router reads the norm before a MoE, so it is apart."""
    for pattern, replacement in (ATTENTION_NORM, EXPERTS) if is_moe else (ATTENTION_NORM, DENSE_MLP_NORM):
        name = re.sub(pattern, replacement, name)
    return name


class TeNamed(torch.nn.Module):
    """The parameters of a chunk under the names that mbridge knows; layers and experts keep this rank's numbers."""

    def __init__(self, core: torch.nn.Module, *, is_moe: bool) -> None:
        super().__init__()
        self.decoder = core.decoder
        # Megatron marks an expert's weights as split over tensor ranks even where each holds them whole. mbridge
        # believes the mark where there is no expert parallelism, and then fails; detach() drops it.
        self.renamed = {
            te_name(name, is_moe=is_moe): tensor.detach() if ".experts." in name else tensor
            for name, tensor in core.named_parameters()
        }

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return {name: tensor.detach() for name, tensor in self.renamed.items()}

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Any:
        return iter(self.renamed.items())


def open_bridge(package: str, shape: Qwen3Shape, dtype: torch.dtype, tensor_size: int) -> Any:
    """mbridge's converter for this rank; `package` is the folder of mbridge."""
    # Its __init__ imports models that need einops and Transformer Engine; bare packages in its place need neither.
    for name in ("mbridge", "mbridge.models"):
        bare = types.ModuleType(name)
        bare.__path__ = [str(Path(package).parent.joinpath(*name.split(".")))]
        sys.modules[name] = bare
    module, name = ("qwen3moe", "Qwen3MoEBridge") if shape.is_moe else ("qwen3", "Qwen3Bridge")
    bridge = vars(importlib.import_module(f"mbridge.models.{module}"))[name](hf_config(shape), dtype)
    # It takes these from the model it builds, which needs Transformer Engine and a GPU.
    bridge.make_vocab_size_divisible_by = padded_vocab_size(1, tensor_size)
    bridge.vocab_size = shape.vocab_size
    bridge.padded_vocab_size = padded_vocab_size(shape.vocab_size, tensor_size)
    return bridge


@dataclass(frozen=True)
class Compared:
    """What both converters made of the same: this rank's Megatron parameters, and the Hugging Face tensors (rank 0).

    Exports cross: each reads the model that the other one filled.
    """

    parameters: Bits
    their_parameters: Bits
    tensors: Bits
    their_tensors: Bits


def both(
    rank: int, world_size: int, package: str, layout: Layout, shape: Qwen3Shape, dtype: str, folder: str
) -> Compared:
    """Both converters import `folder` and export it. mbridge cannot export several stages without CUDA: {} then."""
    tensors, table = load_file(Path(folder) / "model.safetensors"), qwen3_table(shape)
    with world(layout) as here, megatron_scope(here.context.device), torch.no_grad():
        bridge = open_bridge(package, shape, DTYPES[dtype], layout.tp)
        ours, theirs = (_empty_stage(here, shape, dtype) for _ in range(2))
        import_weights(ours, table, lambda name: tensors[name])
        bridge.load_weights(_chunks(theirs), folder)
        exported = dict(export_weights(theirs, table, here.context))
        their_export = dict(bridge.export_weights(_chunks(ours))) if layout.pp == 1 else {}
        return Compared(
            bits(dict(ours.named_parameters())),
            bits(dict(theirs.named_parameters())),
            bits(exported),
            bits(their_export) if rank == 0 else {},
        )


def _empty_stage(here: World, shape: Qwen3Shape, dtype: str) -> ModelStage:
    """NaN everywhere: what a converter leaves out cannot agree by chance."""
    config = here.layout.config(sharded_optimizer=True)
    stage = build_stage(shape, config, here.context.topology, dtype=DTYPES[dtype], on_cpu=True)
    for parameter in stage.parameters():
        parameter.fill_(torch.nan)
    return stage


def _chunks(stage: ModelStage) -> list[torch.nn.Module]:
    return [TeNamed(chunk.core, is_moe=stage.shape.is_moe) for chunk in stage.chunks]


def bits(tensors: dict[str, Tensor]) -> Bits:
    return {
        name: (tuple(tensor.shape), tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }
