"""Time and memory of the fused policy loss beside what people use, in one run, in turns.

    python benchmarks/fused_loss.py [--tokens 4096 --hidden 1024 --vocab 32768] [--dtype float32] [--rounds 3]

Every contender gets hidden states [T, H], an output weight [V, H] and makes a policy loss with its gradients for both:

    products      the three matrix products alone, logits whole: the limit
    naive         log_softmax of whole logits, entropy, the loss by autograd
    chunked       naive on chunks of 256 rows, each recomputed in the backward (torch.utils.checkpoint)
    torch         torch.nn.functional.linear_cross_entropy: a cross entropy, no policy loss and no entropy
    liger         Liger's LigerFusedLinearGRPOLoss (PPO clip, no entropy), not compiled on a CPU
    <path>        fused_linear_policy_loss with GPPO and the entropies, on each path that runs here

and a second table has the forward alone, log-probs and entropies without gradient, beside one product.

Extra memory is the peak above what inputs and results take, of a process of its own: of CUDA's allocator, or the high
water of resident memory. On a CPU that multiplies bfloat16, float32 runs let all contenders use it ("bf16 products").
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from memory import high_water_mib, reset_high_water
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_klear_kernels.linear_policy_loss.layer import LinearSettings
from megatron_klear_kernels.linear_policy_loss.logprobs import fused_linear_logprobs
from megatron_klear_kernels.linear_policy_loss.paths import PathName, choose_path
from megatron_klear_kernels.linear_policy_loss.policy_loss import fused_linear_policy_loss
from megatron_klear_kernels.linear_policy_loss.vocabulary import Vocabulary

SEQUENCES = 16  # Liger's loss has one advantage a sequence
CHUNK_ROWS = 256
PATHS: tuple[PathName, ...] = ("eager", "triton", "triton_scaled_exp")


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    scale: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight whose gradients are wanted, sharing the inputs' memory."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()


@dataclass(frozen=True)
class Problem:
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    device: str
    bf16_products: bool

    def case(self) -> Case:
        """Random inputs; log-probs as spread as a trained model's."""
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"generator": generator, "device": self.device}
        dtype: torch.dtype = vars(torch)[self.dtype]
        hidden = torch.randn(self.tokens, self.hidden, **options).to(dtype)
        weight = (torch.randn(self.vocab, self.hidden, **options) * (2 / self.hidden**0.5)).to(dtype)
        targets = torch.randint(0, self.vocab, (self.tokens,), **options)
        advantages = torch.randn(SEQUENCES, **options).repeat_interleave(self.tokens // SEQUENCES)
        old = torch.randn(self.tokens, **options) * 0.2 - 12
        scale = torch.full((self.tokens,), 1 / self.tokens, device=self.device)
        return Case(hidden, weight, targets, old, advantages, scale)

    def prepare(self) -> None:
        """Settings of torch that every contender shares."""
        if self.bf16_products:
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


def _float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.t()).float()


def _loss(logits: Tensor, case: Case, rows: slice) -> Tensor:
    distribution = logits.log_softmax(dim=-1)
    logprobs = distribution.gather(1, case.targets[rows, None])[:, 0]
    with torch.no_grad():
        (distribution.exp() * distribution).sum(dim=-1)
    ratio = (logprobs - case.old[rows]).exp()
    advantages = case.advantages[rows]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -(surrogate * case.scale[rows]).sum()


def products(case: Case) -> None:
    logits = torch.mm(case.hidden, case.weight.t())
    torch.mm(logits, case.weight)
    torch.mm(logits.t(), case.hidden)


def naive(case: Case) -> None:
    hidden, weight = case.leaves()
    _loss(_float32_logits(hidden, weight), case, slice(None)).backward()


def chunked(case: Case) -> None:
    hidden, weight = case.leaves()
    total = torch.zeros((), device=hidden.device)
    for begin in range(0, hidden.size(0), CHUNK_ROWS):
        rows = slice(begin, begin + CHUNK_ROWS)

        def part(chunk: Tensor, shared: Tensor, rows: slice = rows) -> Tensor:
            return _loss(_float32_logits(chunk, shared), case, rows)

        total = total + checkpoint(part, hidden[rows], weight, use_reentrant=False)
    total.backward()


def torch_linear_cross_entropy(case: Case) -> None:
    hidden, weight = case.leaves()
    F.linear_cross_entropy(hidden, weight, case.targets).backward()


def liger(case: Case) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    hidden, weight = case.leaves()

    def by_sequence(rows: Tensor) -> Tensor:
        return rows.view(SEQUENCES, -1, *rows.shape[1:])

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=hidden.is_cuda, epsilon_high=0.28)
    loss(
        by_sequence(hidden),
        weight,
        by_sequence(case.targets),
        torch.ones(SEQUENCES, case.targets.numel() // SEQUENCES, device=hidden.device),
        by_sequence(case.advantages)[:, 0],
        old_per_token_logps=by_sequence(case.old),
    )[0].backward()


def ours(path: PathName) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        hidden, weight = case.leaves()
        fused_linear_policy_loss(
            hidden, weight, case.targets, case.old, case.advantages, case.scale, path=path
        ).loss.backward()

    return run


def one_product(case: Case) -> None:
    torch.mm(case.hidden, case.weight.t())


def naive_forward(case: Case) -> None:
    with torch.no_grad():
        _loss(_float32_logits(case.hidden, case.weight), case, slice(None))


def our_forward(path: PathName) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        settings = LinearSettings(Vocabulary(0, case.weight.size(0)), path=path)
        with torch.no_grad():
            fused_linear_logprobs(case.hidden, case.weight, case.targets, settings)

    return run


def missing(problem: Problem) -> dict[str, str]:
    """Contenders that cannot run here, and why."""
    reasons = {}
    if "linear_cross_entropy" not in dir(F):
        reasons["torch"] = "this torch has no linear_cross_entropy"
    if find_spec("liger_kernel") is None:
        reasons["liger"] = "not installed (pip install --no-deps liger-kernel)"
    for path in PATHS:
        try:
            choose_path(path, torch.device(problem.device))
        except ValueError as error:
            reasons[path] = str(error)
    return reasons


def contenders(problem: Problem) -> dict[str, dict[str, Callable[[Case], None]]]:
    """Those that can run here, by table and name."""
    training = {"products": products, "naive": naive, "chunked": chunked, "torch": torch_linear_cross_entropy}
    training |= {"liger": liger} | {path: ours(path) for path in PATHS}
    forward = {"products": one_product, "naive": naive_forward} | {path: our_forward(path) for path in PATHS}
    absent = missing(problem)
    tables = {"loss and both gradients": training, "log-probs and entropies alone": forward}
    return {table: {name: run for name, run in runs.items() if name not in absent} for table, runs in tables.items()}


@dataclass
class Row:
    name: str
    seconds: list[float] = field(default_factory=list)
    extra_mib: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _measure_memory(problem: Problem, table: str, name: str, answer: multiprocessing.Queue[float]) -> None:
    """In a process of its own: the peak of the second run above the inputs and the two gradients."""
    problem.prepare()
    case = problem.case()
    run = contenders(problem)[table][name]
    if problem.device == "cuda":
        run(case)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(case)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        # Libraries take their memory at the first product; 64 rows are enough for that.
        run(_start_of(case, 64))
        before = reset_high_water()
        run(case)
        peak = high_water_mib() - before
    answer.put(peak)


def _start_of(case: Case, num: int) -> Case:
    """The first tokens and the first rows of the vocabulary."""
    rows = (case.old[:num], case.advantages[:num], case.scale[:num])
    return Case(case.hidden[:num], case.weight[:num], case.targets[:num] % num, *rows)


def measure(problem: Problem, table: str, runs: dict[str, Callable[[Case], None]], rounds: int) -> list[Row]:
    """All contenders of a table, a turn each a round; the first round is not counted."""
    case, rows = problem.case(), [Row(name) for name in runs]
    for number in range(rounds + 1):
        for row in rows:
            _wait(problem.device)
            started = time.perf_counter()
            runs[row.name](case)
            _wait(problem.device)
            if number > 0:
                row.seconds.append(time.perf_counter() - started)
    spawn = multiprocessing.get_context("spawn")
    for row in rows:
        answer = spawn.Queue()
        process = spawn.Process(target=_measure_memory, args=(problem, table, row.name, answer))
        process.start()
        row.extra_mib = answer.get(timeout=600)
        process.join()
    return rows


def show(title: str, problem: Problem, rows: list[Row], results_mib: float) -> str:
    """A table with ratios to the bare products and to naive."""
    limit, naive_row = rows[0], next(row for row in rows if row.name == "naive")
    lines = [
        f"{title}, {results_mib:.0f} MiB of results",
        "  name                  ms  x products  x naive  extra MiB  of naive's",
    ]
    for row in rows:
        extra = row.extra_mib - results_mib
        share = extra / (naive_row.extra_mib - results_mib)
        lines.append(
            f"  {row.name:<18}{1e3 * row.median:>8.1f}{row.median / limit.median:>12.2f}"
            f"{row.median / naive_row.median:>9.2f}{extra:>11.0f}{share:>11.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=8192 if on_gpu else 4096)
    parser.add_argument("--hidden", type=int, default=4096 if on_gpu else 1024)
    parser.add_argument("--vocab", type=int, default=151936 if on_gpu else 32768)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for a JSON file of the figures")
    arguments = parser.parse_args()
    fast = not on_gpu and arguments.dtype == "float32" and torch.cpu._is_avx512_bf16_supported()
    problem = Problem(
        arguments.tokens, arguments.hidden, arguments.vocab, arguments.dtype, "cuda" if on_gpu else "cpu", fast
    )
    problem.prepare()
    where = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    print(f"{problem}\n{where}, torch {torch.__version__}")
    for name, reason in missing(problem).items():
        print(f"without {name}: {reason}")
    report = {"problem": asdict(problem), "where": where, "torch": torch.__version__, "tables": {}}
    for table, runs in contenders(problem).items():
        rows = measure(problem, table, runs, arguments.rounds)
        item = 4 if arguments.dtype == "float32" else 2
        results = (problem.tokens + problem.vocab) * problem.hidden * item / 2**20 if "gradients" in table else 0.0
        print(show(table, problem, rows, results), flush=True)
        report["tables"][table] = [asdict(row) for row in rows]
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"fused_loss-{problem.device}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        (arguments.out / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
