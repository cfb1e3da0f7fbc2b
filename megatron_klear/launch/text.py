"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_klear.launch.hardware import EFFICIENCIES
from megatron_klear.launch.memory import CONTEXT_BYTES, FRAGMENTATION, GIB, StageMemory
from megatron_klear.launch.predict import Prediction
from megatron_klear.launch.search import Search, Variant
from megatron_klear.launch.traffic import AXES
from megatron_klear.launch.workload import LENGTH_SIGMA

_SHOWN = 10


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left, the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  " + "  ".join(_aligned(row, widths)).rstrip() for row in cells]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if i == 0 else cell.rjust(width)


def gib(num_bytes: float) -> str:
    """Bytes in GiB."""
    return f"{num_bytes / GIB:.2f}"


def seconds(value: float) -> str:
    """Seconds with as many digits as matter."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"


def describe(prediction: Prediction) -> list[str]:
    """The whole plan."""
    parts = (_setting, _assumptions, _memory, _verdict, _time, _work, _traffic)
    return [line for part in parts for line in part(prediction)]


def _setting(p: Prediction) -> list[str]:
    job, gpu = p.job, p.job.gpu
    node = f"NVLink {gpu.nvlink_bytes_per_s / 1e9:.0f} GB/s, network {gpu.network_bytes_per_s / 1e9:.0f} GB/s each way"
    return [
        f"model    {job.shape.model_type}, {job.model.total:,} parameters in {job.dtype}",
        f"GPUs     {job.layout.num_gpus} x {gpu.name}: {gib(gpu.hbm_bytes)} GiB at {gpu.hbm_bytes_per_s / 1e12:.2f}"
        f" TB/s, {gpu.bf16_flops / 1e12:.0f} TFLOPS bf16, {node}",
        f"layout   {job.layout}, recompute {_recompute(p)}, {_optimizer(p)}",
    ]


def _recompute(p: Prediction) -> str:
    parallel = p.job.parallel
    if parallel.recompute_granularity == "selective":
        return f"selective ({', '.join(parallel.recompute_modules)})"
    if parallel.recompute_granularity == "full":
        return f"full ({parallel.recompute_method}, {parallel.recompute_num_layers})"
    return "none"


def _optimizer(p: Prediction) -> str:
    where = "on the host" if p.job.recipe.optimizer.optimizer_cpu_offload else "on the GPU"
    shards = p.job.layout.replicas if p.job.parallel.use_distributed_optimizer else 1
    return f"optimizer {where} in {shards} shard{'s' if shards > 1 else ''}"


def _assumptions(p: Prediction) -> list[str]:
    work, packed, ranks = p.job.work, p.job.packed, p.job.layout.context
    over = f" over {ranks} context ranks" if ranks > 1 else ""
    prompt = f"prompt {work.mean_prompt}, " if work.mean_prompt else ""
    what = "response" if work.num_responses else "sample"
    lines = [
        f"step     {work.num_samples} samples of {work.mean_sample:,} tokens ({prompt}mean {what}"
        f" {work.mean_response:,} of at most {work.longest_response:,}), updates: {work.num_updates}",
        f"         an update on a rank: {packed.count} x {packed.tokens:,} tokens{over}, {packed.useful:.1%} of them"
        " no padding",
        f"assumed  the mean {what} (--mean-response-len), lognormal lengths (sigma {LENGTH_SIGMA})",
    ]
    if p.rollout is not None:
        lines[-1] += f", {p.job.assumed.kept:.0%} of the responses trained on (--kept)"
        lines.append(f"         {_engines(p)}")
    return lines


def _engines(p: Prediction) -> str:
    assert p.rollout is not None
    r = p.rollout
    if p.job.assumed.engine == "embedded":
        idle = p.job.layout.num_gpus - 1
        return f"the embedded engine samples {r.running} responses at a time on one GPU; the other {idle} wait"
    gpus = f"{r.gpus_per_engine} GPU{'s' if r.gpus_per_engine > 1 else ''}"
    return (
        f"{r.num_engines} engine{'s' if r.num_engines > 1 else ''} of {gpus} on the same GPUs, each"
        f" with {r.responses_per_engine} responses, {r.running} at a time; they give their memory back for training"
    )


_COLUMNS = ("weights", "gradients", "optimizer", "critic", "activations", "head", "working", "engine", "reserve")


def _memory(p: Prediction) -> list[str]:
    shown = [name for name in _COLUMNS if any(_bytes(stage, name) for stage in p.memory)]
    header = ["stage", "layers", "parameters", "in flight", *shown, "total", "of"]
    rows = [
        [
            str(stage.stage),
            str(stage.num_layers),
            f"{stage.parameters:,}",
            f"{stage.in_flight:g}",
            *(gib(_bytes(stage, name)) for name in shown),
            gib(stage.total),
            gib(stage.capacity),
        ]
        for stage in p.memory
    ]
    return [
        "",
        f"Memory of a GPU, GiB (a micro-batch of {p.job.most_tokens:,} tokens on a rank, {p.job.most_micro_batches}"
        f" micro-batches an update at worst;",
        f"of head and working the larger counts; reserve: {CONTEXT_BYTES / GIB:.1f} GiB of context and NCCL, and"
        f" {FRAGMENTATION:.0%} of what comes and goes)",
        *table([header, *rows]),
    ]


def _bytes(stage: StageMemory, name: str) -> int:
    columns = {
        "weights": stage.weights,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "critic": stage.critic,
        "activations": stage.activations,
        "head": stage.head,
        "working": stage.working,
        "engine": stage.engine,
        "reserve": stage.reserve,
    }
    return columns[name]


def _verdict(p: Prediction) -> list[str]:
    on_host = max(stage.optimizer_on_host for stage in p.memory)
    lines = [f"  and {gib(on_host)} GiB of optimizer a GPU in host memory"] if on_host else []
    if p.fits:
        room = p.fullest.capacity - p.fullest.total
        return [*lines, f"FITS, {gib(room)} GiB to spare on stage {p.fullest.stage}"]
    for stage in p.memory:
        if not stage.fits:
            largest = sorted(_COLUMNS, key=lambda name: -_bytes(stage, name))[:2]
            parts = " and ".join(f"{name} {gib(_bytes(stage, name))}" for name in largest)
            over = stage.total - stage.capacity
            lines.append(
                f"DOES NOT FIT: stage {stage.stage} is {gib(over)} GiB over; its largest parts are {parts} GiB"
            )
            if stage.engine > stage.capacity / 2:
                lines.append("  (most of it is the embedded engine's cache; --engine server plans for engines apart)")
    return lines


def _time(p: Prediction) -> list[str]:
    t = p.time
    parts = {"rollout": t.rollout, "old log-probs": t.annotate, "training": t.train, "weight sync": t.sync}
    rows = [(name, seconds(value), f"{value / t.total:.1%}") for name, value in parts.items() if value]
    return [
        "",
        "Time of a step",
        *table([*rows, ("all", seconds(t.total), "")]),
        f"  {p.tokens_per_s:,.0f} trained tokens/s, {p.tokens_per_s / p.job.layout.num_gpus:,.0f} a GPU;"
        f" training alone at {p.train_mfu:.1%} of bf16 peak ({p.flops_per_token / 1e9:.1f} GFLOP a token);"
        f" pipeline bubble {p.bubble:.1%}",
    ]


def _work(p: Prediction) -> list[str]:
    shares = sorted(p.work_share.items(), key=lambda item: -item[1])
    return [f"  a micro-batch: {', '.join(f'{kind} {share:.0%}' for kind, share in shares if share >= 0.005)}"]


def _traffic(p: Prediction) -> list[str]:
    used = [axis for axis in p.traffic if axis.num_bytes]
    if not used:
        return ["", "No bytes between GPUs"]
    rows = [
        (axis.axis, str(axis.group_size), f"{axis.num_bytes / 1e9:.2f}", f"{axis.bytes_per_s / 1e9:.0f}")
        for axis in used
    ]
    times = ["time", *(seconds(axis.seconds) for axis in used)]
    notes = ["", *(AXES.get(axis.axis, "weights to rank 0 and to the engines") for axis in used)]
    cells = [(*row, time) for row, time in zip([("axis", "ranks", "GB", "GB/s"), *rows], times, strict=True)]
    lines = [f"{line}   {note}".rstrip() for line, note in zip(table(cells), notes, strict=True)]
    return ["", "Sent by a GPU in a step, not hidden behind arithmetic", *lines]


def describe_remedy(p: Prediction, remedy: Variant | None) -> list[str]:
    """What would make it fit."""
    if remedy is None:
        return ["No single change or pair of changes of the planner's list makes it fit; --search looks further"]
    other = remedy.prediction
    change = other.time.total / p.time.total - 1
    lists = any(isinstance(value, tuple) for value in remedy.changes.values())
    return [
        f"SMALLEST CHANGE THAT FITS: {_words(remedy.changes)}{' (a list is set in the recipe)' if lists else ''}",
        f"  {gib(other.fullest.total)} GiB on the fullest stage, a step of {seconds(other.time.total)} ({change:+.1%})",
    ]


def _words(changes: dict[str, Any]) -> str:
    return " ".join(f"{key}={_word(value)}" for key, value in changes.items()) or "the recipe as it is"


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_search(search: Search) -> list[str]:
    """The ten fastest layouts that fit, and why the first wins."""
    counts = f"{search.num_tried} settings tried, {search.num_allowed} allowed, {len(search.fitting)} fit"
    if not search.fitting:
        return ["", f"Search: {counts}"]
    rows = [
        (
            str(v.prediction.job.layout),
            _recompute(v.prediction),
            str(v.prediction.job.recipe.batch.max_tokens_per_gpu),
            gib(v.prediction.fullest.total),
            seconds(v.prediction.time.train + v.prediction.time.annotate),
            seconds(v.prediction.time.total),
            f"{v.prediction.tokens_per_s:,.0f}",
        )
        for v in search.fitting[:_SHOWN]
    ]
    header = ("layout", "recompute", "max tokens", "GiB", "train + old", "step", "tokens/s")
    return ["", f"Search: {counts}", *table([header, *rows]), *_why(search)]


def _why(search: Search) -> list[str]:
    first = search.fitting[0]
    lines = [f"First: {_words(first.changes)}"]
    others = [v for v in search.fitting[1:] if _ranks(v) != _ranks(first)]
    if others:
        lines.append(
            f"  against the next with other ranks ({others[0].prediction.job.layout}): {_gains(first, others[0])}"
        )
    return lines


def _ranks(variant: Variant) -> tuple[int, ...]:
    layout = variant.prediction.job.layout
    return layout.tensor, layout.pipeline, layout.context, layout.expert


def _gains(first: Variant, other: Variant) -> str:
    """Where the time goes, in seconds of a step, by how much they differ."""
    ours, theirs = _spent(first.prediction), _spent(other.prediction)
    kinds = sorted({*ours, *theirs}, key=lambda kind: -abs(theirs.get(kind, 0) - ours.get(kind, 0)))
    return ", ".join(f"{kind} {ours.get(kind, 0):.2f} s for {theirs.get(kind, 0):.2f}" for kind in kinds[:4])


def _spent(p: Prediction) -> dict[str, float]:
    job = p.job
    passes = job.work.num_updates * job.packed.count
    # What a rank waits for in the pipeline and in the data-parallel sums is what its micro-batches leave of training.
    busy = p.time.train + p.time.annotate
    working = passes * p.micro_batch_s
    data = next(axis.seconds for axis in p.traffic if axis.axis == "data")
    spent = {kind: share * working for kind, share in p.work_share.items()}
    return spent | {"gradients": data, "forward passes, bubble and optimizer": busy - working - data}


def assumptions_note() -> str:
    """The efficiencies, in a line."""
    e = EFFICIENCIES
    return (
        f"Rates of the data sheet times: products {e.matmul}, attention {e.attention}, float32 {e.float32},"
        f" HBM {e.hbm}, NVLink {e.nvlink}, network {e.network}. Estimates: docs/planning.md says how far to trust them."
    )
