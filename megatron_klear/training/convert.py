"""`megatron-klear convert import|export|verify`: Hugging Face folders <-> Megatron checkpoints, in any layout.

Under torchrun each rank fills or gives only its own shards; tensors are streamed one by one either way.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_klear.checkpoint.hf import HfWriter, export_folder, open_folder
from megatron_klear.checkpoint.megatron_files import ModelPart
from megatron_klear.checkpoint.store import CheckpointStore, RunRecord
from megatron_klear.config.model import Qwen3Shape, read_shape
from megatron_klear.config.recipe import ParallelConfig
from megatron_klear.config.rules import check_sections
from megatron_klear.data.packing import PackSpec, flatten, pack, unflatten
from megatron_klear.errors import ConfigError
from megatron_klear.models.build import DTYPES, ModelStage, build_stage
from megatron_klear.models.hf_bridge import export_weights, import_shards
from megatron_klear.models.qwen3.hf_map import qwen3_table
from megatron_klear.parallel.broadcast import from_last_stage
from megatron_klear.parallel.context import split_batch, whole_rows
from megatron_klear.parallel.device import megatron_scope
from megatron_klear.parallel.topology import ParallelContext, parallel_context
from megatron_klear.training.forward import run_schedule
from megatron_klear.training.head import Head, HeadSettings
from megatron_klear.types import Prompt, Sample

# float32 logits of two implementations differ by rounding; a wrong mapping differs by whole units.
MAX_LOGIT_DIFF = {"float32": 1e-4, "bfloat16": 2e-1}


@dataclass(frozen=True, slots=True)
class Verification:
    """How far a Megatron model and transformers' are apart on the same tokens."""

    num_positions: int
    max_abs_diff: float
    same_argmax: float  # share of positions with the same most likely token


def verify(stage: ModelStage, hf_dir: str, context: ParallelContext, *, num_tokens: int = 64) -> Verification | None:
    """Compare logits with transformers' on random tokens; the result on rank 0. A collective."""
    generator = torch.Generator().manual_seed(0)
    lengths = (num_tokens, max(1, num_tokens // 3), 1)
    ids = [torch.randint(0, stage.shape.vocab_size, (n,), generator=generator) for n in lengths]
    logits = megatron_logits(stage, ids, context)
    if not context.is_main:
        return None
    device = context.device.torch_device
    with device:
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=stage.core.config.params_dtype)
    with torch.no_grad():
        wanted = torch.cat([model(row[None].to(device)).logits[0].float() for row in ids])
    same = (wanted.argmax(-1) == logits.argmax(-1)).float().mean()
    return Verification(wanted.size(0), float((wanted - logits).abs().max()), float(same))


def megatron_logits(stage: ModelStage, rows: Sequence[Tensor], context: ParallelContext) -> Tensor:
    """float32 logits [sum of lengths, V] of token rows, on every rank. A collective."""
    samples = [Sample(f"{i:05d}", Prompt(f"{i:05d}", tuple(row.tolist()))) for i, row in enumerate(rows)]
    for sample in samples:
        # Packing refuses samples that train nothing; what is trained does not matter here.
        sample.loss_mask = [1] * len(sample.token_ids)
    topology = stage.topology
    one = PackSpec(1, 1, multiple_of=topology.tensor_size, context_parallel_size=topology.context_size)
    # Room for all rows in one micro-batch, so that they stay in order.
    spec = replace(one, max_tokens=one.unit + sum(one.padded(len(row)) for row in rows))
    (batch,) = pack(samples, spec)
    ints, floats = (part.to(context.device.torch_device) for part in flatten(batch))
    (micro_batch,) = split_batch(unflatten(ints, floats), context).micro_batches
    head = Head(stage, context.groups, HeadSettings())
    with megatron_scope(context.device):
        outputs = run_schedule(
            stage,
            [chunk.module for chunk in stage.chunks],
            # The interleaved schedule wants as many micro-batches as there are stages.
            [micro_batch] * (topology.pipeline_size if len(stage.chunks) > 1 else 1),
            lambda _: lambda hidden, non_loss_data: head.logits(hidden),
            forward_only=True,
        )
    own = whole_rows(outputs[0], micro_batch, context) if outputs else None
    shape = (int(micro_batch.cu_seqlens[-1]), stage.shape.vocab_size)
    logits = from_last_stage(own, shape, context)
    starts = micro_batch.cu_seqlens[: len(rows)].tolist()
    return torch.cat([logits[start : start + len(row)] for start, row in zip(starts, rows, strict=True)])


def _import(stage: ModelStage, args: argparse.Namespace, context: ParallelContext) -> str:
    with open_folder(args.hf, stage.shape) as source:
        shards = import_shards(stage, qwen3_table(stage.shape), source)
        if context.is_main:
            Path(args.megatron).mkdir(parents=True, exist_ok=True)
        part = ModelPart(stage, source=lambda name: shards[name]())
        folder = CheckpointStore(args.megatron, context).save([part], RunRecord(0, "weights"))
    return f"imported {args.hf} to {folder}"


def _stored_weights(
    stage: ModelStage, args: argparse.Namespace, context: ParallelContext
) -> Iterator[tuple[str, Tensor]]:
    """Raises in the end if the checkpoint is damaged, so that nothing of it gets a name. A collective."""
    with CheckpointStore(args.megatron, context).weights(stage) as values:
        yield from export_weights(stage, qwen3_table(stage.shape), context, values)


def _export(stage: ModelStage, args: argparse.Namespace, context: ParallelContext) -> str:
    writer = None
    if context.is_main:
        writer = HfWriter(args.out, stage.shape, template=args.hf, max_shard_bytes=args.max_shard_bytes)
    done = export_folder(_stored_weights(stage, args, context), writer, dtype=DTYPES[args.params_dtype])
    if done is None:
        return ""
    return (
        f"exported {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, {done.num_shards} files to {done.folder}"
    )


def _verify(stage: ModelStage, args: argparse.Namespace, context: ParallelContext) -> str:
    CheckpointStore(args.megatron, context).load_weights(stage)
    result = verify(stage, args.hf, context)
    if result is None:
        return ""
    limit = MAX_LOGIT_DIFF[args.params_dtype]
    verdict = "OK" if result.max_abs_diff <= limit else "DIFFERENT"
    return (
        f"{verdict}: {result.num_positions} positions, largest logit difference {result.max_abs_diff:.2e}"
        f" (limit {limit}), same most likely token at {result.same_argmax:.1%}"
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch's other threads have nothing to do where memory is the limit, and would wait for work at full speed:
    processors that checksums and the system's writing need.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_ACTIONS = {"import": _import, "export": _export, "verify": _verify}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-klear convert", description=__doc__)
    parser.add_argument("action", choices=sorted(_ACTIONS))
    parser.add_argument("--hf", required=True, help="Hugging Face folder; for export the one to take config.json from")
    parser.add_argument("--megatron", required=True, help="folder of iter_* and latest_checkpointed_iteration.txt")
    parser.add_argument("--out", help="export: the Hugging Face folder to write")
    parser.add_argument("--params-dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--max-shard-bytes", type=int, default=5 * 1024**3)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 1 if `verify` found a difference."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.action == "export") != (args.out is not None):
        parser.error("export needs --out, the folder to write; import and verify take none")
    shape: Qwen3Shape = read_shape(args.hf)
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        # It changes no weight, and Megatron's experts need it to compare logits.
        sequence_parallel=shape.is_moe and args.tensor_model_parallel_size > 1,
    )
    # The rules of a recipe that concern the model and its layout; there is no recipe here.
    faults = check_sections({"parallel": parallel, "shape": shape}, kind="sft", world_size=None)
    if faults:
        raise ConfigError("; ".join(map(str, faults)), faults)
    with parallel_context(parallel) as context:
        # What only moves weights needs no memory for them, and no GPU.
        streams = args.action != "verify"
        on_cpu = streams or context.device.kind == "cpu"
        with megatron_scope(context.device), torch.device("meta") if streams else contextlib.nullcontext():
            stage = build_stage(shape, parallel, context.topology, dtype=DTYPES[args.params_dtype], on_cpu=on_cpu)
        with _one_thread() if streams else contextlib.nullcontext():
            message = _ACTIONS[args.action](stage, args, context)
        if context.is_main:
            print(message)
        return 1 if message.startswith("DIFFERENT") else 0
