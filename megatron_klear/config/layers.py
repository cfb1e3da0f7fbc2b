"""Which pipeline stage holds which layers."""

from __future__ import annotations

from megatron_klear.config.recipe import ParallelConfig


def layers_by_stage(num_layers: int, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """Global layer numbers of each chunk of each stage: one chunk a stage without virtual pipeline.

    Chunks are dealt out in turns: the first chunk of every stage, then the second of every stage. Raises `ValueError`,
    with the arithmetic, if the layers cannot be split that way.
    """
    sizes, num_chunks = stage_sizes(num_layers, parallel), parallel.virtual_pipeline_model_parallel_size or 1
    for stage, size in enumerate(sizes):
        if size % num_chunks:
            raise ValueError(
                f"stage {stage} has {size} layers, which {num_chunks} chunks (virtual_pipeline_model_parallel_size)"
                " do not divide"
            )
    chunks: list[list[range]] = [[] for _ in sizes]
    begin = 0
    for _ in range(num_chunks):
        for stage, size in enumerate(sizes):
            chunks[stage].append(range(begin, begin + size // num_chunks))
            begin += size // num_chunks
    return tuple(map(tuple, chunks))


def stage_sizes(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Number of layers of each stage. Raises `ValueError`, with the arithmetic, if they cannot be split that way."""
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    given = [size for size in (first, last) if size is not None]
    num_others = parallel.pipeline_model_parallel_size - len(given)
    left = num_layers - sum(given)
    text = f"{num_layers} layers" + "".join(f" - {size}" for size in given) + f" = {left}" * bool(given)
    if num_others < 0:
        raise ValueError(f"one stage cannot be both first with {first} layers and last with {last}")
    if num_others == 0 and left:
        raise ValueError(f"{text} are left over, but first and last are all the stages there are")
    if num_others and (left < num_others or left % num_others):
        raise ValueError(f"{text} for {num_others} stage{'s' * (num_others > 1)} of equal size does not work out")
    others = [left // num_others] * num_others if num_others else []
    return [*([first] if first is not None else []), *others, *([last] if last is not None else [])]
