"""RL of a tiny Qwen3-MoE with random weights: on one rank, and with its experts on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dist.pool import Pool
from e2e.runs import Bench, make_bench

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
CHANGES: dict[str, Any] = {
    "model.load": None,
    "model.random_init": True,
    "rollout.num_rollout": 2,
}


@pytest.fixture(scope="module")
def bench(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = make_bench(pool, tmp_path_factory.mktemp("moe"))
    config = made.folder / "data" / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | EXPERTS))
    return made


def test_experts_on_two_ranks_learn_what_they_learn_on_one(bench: Bench) -> None:
    bench.succeed("rl", bench.recipe("rl", "one", CHANGES))
    layout = {"parallel.expert_model_parallel_size": 2}
    bench.succeed("rl", bench.recipe("rl", "two", CHANGES | layout), world_size=2)
    one, two = bench.metrics("one"), bench.metrics("two")
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "rollout/reward", "rollout/num_tokens"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
        # Trainer and engine route alike.
        assert max(a["train/train_rollout_logprob_abs_diff"], b["train/train_rollout_logprob_abs_diff"]) < 1e-5
    left, right = bench.exported("one"), bench.exported("two")
    assert left.keys() == right.keys() and any(".experts.3.down_proj" in name for name in left)
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-4)


def test_a_balance_loss_is_trained_and_reported(bench: Bench) -> None:
    changes = {"model.moe_aux_loss_coeff": 0.05, "rollout.num_rollout": 1, "parallel.expert_model_parallel_size": 2}
    bench.succeed("rl", bench.recipe("rl", "balanced", CHANGES | changes), world_size=2)
    (line,), (plain, _) = bench.metrics("balanced"), bench.metrics("one")
    assert line["train/moe_aux_loss"] > 1.0 and "train/moe_aux_loss" not in plain
    assert line["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert line["train/grad_norm"] != pytest.approx(plain["train/grad_norm"], rel=1e-4)


def test_transformers_loads_what_was_exported(bench: Bench) -> None:
    folder: Path = bench.folder / "one" / "hf"
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, told = loaded
    assert not told["missing_keys"] and not told["unexpected_keys"]
    down = bench.exported("one")["model.layers.0.mlp.experts.2.down_proj.weight"]
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj[2], down)
