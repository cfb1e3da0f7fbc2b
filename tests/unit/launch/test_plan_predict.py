"""Memory, time and traffic against arithmetic done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.plans import RECIPE, SFT_RECIPE, shape_8b, write_recipe
from megatron_klear.errors import ConfigError
from megatron_klear.launch.hardware import find_gpu
from megatron_klear.launch.job import Job, job_of
from megatron_klear.launch.memory import GIB, in_flight
from megatron_klear.launch.predict import Prediction, predict
from megatron_klear.launch.search import search_layouts, smallest_change
from megatron_klear.launch.variants import Changes, changed, load_for_planning
from megatron_klear.launch.workload import Assumptions, packed, response_lengths

SERVER = Assumptions(mean_response=11500, kept=0.5, engine="server", engine_tensor=2)
PLAIN = {"parallel.tensor_model_parallel_size": None, "parallel.sequence_parallel": None}
NO_RECOMPUTE = {"parallel.recompute_granularity": None}


def job(
    folder: Path,
    num_gpus: int = 256,
    changes: Changes | None = None,
    *,
    assumed: Assumptions = SERVER,
    text: str = RECIPE,
    gpu: str = "h800",
) -> Job:
    recipe = load_for_planning(str(write_recipe(folder, text)), [], 4)
    return job_of(changed(recipe, changes or {}), shape_8b(), find_gpu(gpu), num_gpus, assumed)


def plan(folder: Path, num_gpus: int = 256, changes: Changes | None = None, **how: Any) -> Prediction:
    return predict(job(folder, num_gpus, changes, **how))


@pytest.mark.parametrize(("mean", "longest", "count"), [(11500, 32768, 1000), (300, 1024, 100), (20000, 32768, 128)])
def test_lengths_have_the_mean_and_the_limit(mean: int, longest: int, count: int) -> None:
    lengths = response_lengths(mean, longest, count)
    assert sum(lengths) / count == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= longest
    assert list(lengths) == sorted(lengths)


def test_micro_batches_hold_everything_within_the_budget() -> None:
    samples = list(response_lengths(11500, 32768, 128))
    for data_size in (1, 4, 64, 128):
        fitted = packed(samples, data_size, 36864, multiple=8)
        assert fitted.tokens <= 36864
        assert fitted.tokens % 8 == 0
        assert fitted.useful == pytest.approx(sum(samples) / (fitted.count * data_size * fitted.tokens))
    assert packed(samples, 4, 36864, counted_in=8).count % 8 == 0
    assert packed(samples, 1, 36864).useful > 0.94


def test_memory_of_one_stage_by_hand(tmp_path: Path) -> None:
    (stage,) = plan(tmp_path, 16, PLAIN).memory
    total = 8_190_735_360
    assert (stage.parameters, stage.weights, stage.gradients) == (total, 2 * total, 4 * total)
    assert stage.optimizer == pytest.approx(12 * total / 16, abs=16)
    # Full recompute: the input of each layer, cos and sin, and the final norm's rows.
    kept = 36864 * (36 * 4096 * 2 + 128 * 2 + 4096 * 2 + 4)
    assert stage.activations == kept
    # A chunk of logits; hidden states and their gradient, of the chunk and of all; zeros for the weight's gradient.
    chunk = 2400 * 1024**2
    rows = chunk // (4 * 151936)
    assert stage.head == chunk + 2 * (rows + 36864) * 4096 * 2 + 24 * 36864 + 151936 * 4096 * 2
    assert stage.engine == 0
    held = stage.weights + stage.gradients + stage.optimizer + stage.activations
    assert stage.total == held + max(stage.head, stage.working) + stage.reserve


def test_float32_runs_need_no_main_weights(tmp_path: Path) -> None:
    (stage,) = plan(tmp_path, 16, {**PLAIN, "model.params_dtype": "float32"}).memory
    assert stage.weights == 4 * stage.parameters
    assert stage.optimizer == pytest.approx(8 * stage.parameters / 16, abs=16)


def test_offload_moves_the_optimizer_to_the_host(tmp_path: Path) -> None:
    (here,), (away,) = plan(tmp_path).memory, plan(tmp_path, 256, {"optimizer.optimizer_cpu_offload": True}).memory
    assert (away.optimizer, away.optimizer_on_host) == (0, here.optimizer)
    assert away.total == here.total - here.optimizer


def test_the_embedded_engine_lies_on_the_first_stage(tmp_path: Path) -> None:
    two = {"parallel.pipeline_model_parallel_size": 2}
    first, last = plan(tmp_path, 256, two, assumed=Assumptions()).memory
    cache = 256 * 36864 * 2 * 36 * 8 * 128 * 2
    assert first.engine == 2 * 8_190_735_360 + 4 * 151936 * 4096 + cache
    assert last.engine == 0


def test_a_small_update_never_fills_the_budget(tmp_path: Path) -> None:
    one = job(tmp_path, 64, {"data.max_length": 100}, text=SFT_RECIPE, assumed=Assumptions())
    assert one.samples_per_replica == 1
    assert one.most_tokens == 100


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches", "held"),
    [
        (4, None, 8, [4, 3, 2, 1]),
        (4, None, 2, [2, 2, 2, 1]),
        # Warm-up 2 (p - s - 1) + (v - 1) p chunks, and one.
        (2, 3, 8, [(2 + 4 + 1) / 3, (0 + 4 + 1) / 3]),
        (2, 3, 1, [1, 1]),
    ],
)
def test_micro_batches_in_flight(
    tmp_path: Path, pipeline: int, chunks: int | None, micro_batches: int, held: list[float]
) -> None:
    sizes = {
        "parallel.pipeline_model_parallel_size": pipeline,
        "parallel.virtual_pipeline_model_parallel_size": chunks,
    }
    layout = job(tmp_path, 256, sizes).layout
    assert [in_flight(layout, stage, micro_batches) for stage in range(pipeline)] == pytest.approx(held)


def test_the_bubble_is_what_the_stages_wait(tmp_path: Path) -> None:
    sizes = {"parallel.pipeline_model_parallel_size": 4, "parallel.virtual_pipeline_model_parallel_size": 3}
    p = plan(tmp_path, 16, sizes)
    assert p.bubble == 3 / (p.job.packed.count * 3)
    assert p.job.packed.count % 4 == 0


def test_traffic_by_hand(tmp_path: Path) -> None:
    p = plan(tmp_path, 32, {"parallel.tensor_model_parallel_size": 2, "parallel.context_parallel_size": 2})
    moved = {axis.axis: axis.num_bytes for axis in p.traffic}
    updates, tokens = 8, p.job.packed.tokens / 2
    hidden, passes = tokens * 4096 * 2, updates * p.job.packed.count
    # Forwards: of old log-probs, of training, and again in the backward; each 72 all-reduces and the embedding's, of
    # 2 x 1/2 the activation. Backward: 72 and the head's, and 72 gathers.
    tensor = passes * hidden * (3 * 73 + 73 + 72 / 2)
    assert moved["tensor"] == pytest.approx(tensor)
    # Keys and values of the other half, 4 of 8 heads on a rank; their gradients go the same way.
    assert moved["context"] == pytest.approx(passes * 4 * 36 * tokens * 2 * 512 * 2)
    parameters = p.memory[0].parameters
    assert moved["data"] == pytest.approx(updates * parameters * 6 * 15 / 16)
    assert moved["sync"] == 2 * 8_190_735_360


def test_flops_of_a_token_by_hand(tmp_path: Path) -> None:
    p = plan(tmp_path)
    attended = 6 * 36 * 4096 * p.job.work.mean_attended
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288
    head = 151936 * 4096 * 11500 / 11756
    assert p.flops_per_token == pytest.approx(6 * (36 * layer + head) + attended)
    # No more than what the GPUs can do.
    assert 0 < p.train_mfu < 0.65


def test_recompute_costs_time_and_saves_memory(tmp_path: Path) -> None:
    full, none = plan(tmp_path), plan(tmp_path, 256, NO_RECOMPUTE)
    assert full.time.train > none.time.train
    assert full.memory[0].activations < none.memory[0].activations / 10


def test_more_gpus_make_it_faster_and_a_slower_link_slower(tmp_path: Path) -> None:
    few, many = plan(tmp_path, 64), plan(tmp_path, 256)
    assert many.time.train < few.time.train
    assert many.time.rollout < few.time.rollout
    assert plan(tmp_path, gpu="h100").time.train < many.time.train
    assert plan(tmp_path, gpu="a100").time.train > many.time.train


def test_the_longest_response_bounds_the_rollout(tmp_path: Path) -> None:
    p = plan(tmp_path)
    assert p.rollout is not None
    assert (p.rollout.num_engines, p.rollout.responses_per_engine) == (128, 16)
    # Even one row reads all weights for each of its tokens.
    weights = 2 * (8_190_735_360 - 151936 * 4096) / (3.35e12 * 0.8 * 2)
    assert p.time.rollout > 32768 * weights
    assert plan(tmp_path, assumed=Assumptions(11500)).time.rollout > 20 * p.time.rollout


def test_a_mean_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--mean-response-len = 40000: is longer than the longest, 32768"):
        plan(tmp_path, assumed=Assumptions(mean_response=40000))


def test_sft_has_no_rollout(tmp_path: Path) -> None:
    p = plan(tmp_path, 16, {"parallel.recompute_granularity": "full"}, text=SFT_RECIPE, assumed=Assumptions())
    assert p.rollout is None
    assert (p.time.rollout, p.time.annotate, p.time.sync) == (0, 0, 0)
    assert "sync" not in {axis.axis for axis in p.traffic}


def test_a_pass_that_is_not_made_takes_no_time(tmp_path: Path) -> None:
    def annotate(old_logprobs: str, text: str = RECIPE) -> float:
        return plan(tmp_path, changes={"train.old_logprobs": old_logprobs}, text=text).time.annotate

    one_pass = annotate("recompute")
    assert one_pass > 0
    assert annotate("rollout") == annotate("current") == 0
    # The reference's pass stays, with its weights' way to the device and back.
    with_reference = RECIPE + "kl: {{kl_coef: 0.1}}\n"
    both, alone = annotate("recompute", with_reference), annotate("rollout", with_reference)
    assert alone > one_pass
    assert both - alone == pytest.approx(one_pass)


def test_a_critic_doubles_what_is_trained(tmp_path: Path) -> None:
    with_critic = RECIPE + "critic: {{}}\nadvantage: {{type: gae}}\n"
    alone, both = plan(tmp_path), plan(tmp_path, text=with_critic)
    assert both.memory[0].critic == alone.memory[0].weights + alone.memory[0].gradients + alone.memory[0].optimizer
    assert both.time.train == pytest.approx(2 * alone.time.train)


def test_the_smallest_change_is_tried_and_fits(tmp_path: Path) -> None:
    misfit = {**NO_RECOMPUTE, "parallel.tensor_model_parallel_size": 2}
    p = plan(tmp_path, 256, misfit)
    assert not p.fits
    remedy = smallest_change(p)
    assert remedy is not None
    assert remedy.prediction.fits
    assert len(remedy.changes) <= 2
    again = plan(tmp_path, 256, {**misfit, **remedy.changes})
    assert again.memory == remedy.prediction.memory


def test_no_change_makes_the_model_and_an_engine_fit_on_one_gpu(tmp_path: Path) -> None:
    assert smallest_change(plan(tmp_path, 1, PLAIN, assumed=Assumptions())) is None


def test_the_search_ranks_what_fits(tmp_path: Path) -> None:
    found = search_layouts(job(tmp_path, 64))
    speeds = [variant.prediction.tokens_per_s for variant in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert 10 < len(found.fitting) <= found.num_allowed <= found.num_tried
    assert all(variant.prediction.fullest.total <= 81559 * 1024**2 for variant in found.fitting)
    best = found.fitting[0]
    assert best.prediction.tokens_per_s >= plan(tmp_path, 64).tokens_per_s
    assert plan(tmp_path, 64, best.changes).tokens_per_s == best.prediction.tokens_per_s


def test_bigger_memory_fits_more(tmp_path: Path) -> None:
    small, big = (len(search_layouts(job(tmp_path, 16, gpu=gpu)).fitting) for gpu in ("h100", "h200"))
    assert big > small
    assert find_gpu("h200").hbm_bytes / GIB == pytest.approx(140.4, abs=0.1)
