"""How fast Hugging Face -> Megatron and back are beside a plain copy of the same bytes, and how much memory they take.

    python benchmarks/conversion.py [--model 0.6b | 8b-wide] [--turns 3] [--folder FOLDER] [--cold]

Writes a random checkpoint of Qwen3-0.6B's shape (tied, float32, 2.4 GB, three files) or of Qwen3-8B's widths with 6
layers (bfloat16, 4.7 GB), then in turns copies it, imports it and exports what was imported, each to files that are on
disk when the clock stops (fsync). The three run in processes that have imported the same modules and end before the
next begins, and each has just touched as much memory as it may need. Import and export do all that
`megatron-klear convert` does: verification, checksums, manifest, atomic names. The export is compared with the
original bit by bit.

`ratio` is bytes a second over those of the copy in the same turn; `process` is the wall time of the whole process with
the start of Python and its imports. Memory is the largest RssAnon (sampled each 2 ms) after the imports, less that
before: what the process itself holds, without the pages of files, which the system takes back when it needs them.
With --cold the source is dropped from the page cache before each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_klear.config.model import Qwen3Shape
from megatron_klear.report.console import format_table

AIM = 0.7
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "head_dim": 12}


@dataclass(frozen=True)
class Model:
    """What is converted, and in files of which size."""

    shape: Qwen3Shape
    dtype: str
    max_shard_bytes: int


def _shape(**sizes: object) -> Qwen3Shape:
    common: dict[str, object] = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960}
    return Qwen3Shape.model_validate(common | {"num_key_value_heads": 8, "head_dim": 128} | sizes)


MODELS = {
    "0.6b": Model(
        _shape(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
        "float32",
        10**9,
    ),
    "8b-wide": Model(
        _shape(hidden_size=4096, intermediate_size=12288, num_hidden_layers=6, num_attention_heads=32),
        "bfloat16",
        2 * 10**9,
    ),
    # For the test of this script.
    "tiny": Model(_shape(num_attention_heads=4, num_key_value_heads=2, **TINY), "float32", 20_000),  # type: ignore
}


def write_source(model: Model, folder: Path) -> None:
    """A Hugging Face folder with every tensor random."""
    import torch

    from megatron_klear.checkpoint.hf import HfWriter
    from megatron_klear.models.build import DTYPES

    template = folder.with_name("template")
    template.mkdir()
    config = model.shape.model_dump(exclude={"rope", "initializer_range"})
    (template / "config.json").write_text(json.dumps(config))
    dtype = DTYPES[model.dtype]
    generator = torch.Generator().manual_seed(0)
    tensors = (
        (name, torch.empty(shape, dtype=dtype).normal_(generator=generator))
        for name, shape in model.shape.tensor_shapes().items()
    )
    HfWriter(folder, model.shape, template=template, max_shard_bytes=model.max_shard_bytes).write(tensors, dtype=dtype)


def copy(source: Path, target: Path) -> None:
    """The limit: the same bytes, on disk when it returns."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as old, (target / path.name).open("wb") as new:
            done, size = 0, path.stat().st_size
            while done < size:
                # As small as the pieces of the conversion: with larger ones some systems take new memory for the page
                # cache, which may cost several times the copy.
                done += os.sendfile(new.fileno(), old.fileno(), done, 2**16)
            os.fsync(new.fileno())


@contextlib.contextmanager
def _peak_memory() -> Iterator[Callable[[], int]]:
    """Gives the largest RssAnon so far, less that at the beginning; bytes."""
    stop, seen = threading.Event(), [_anonymous()]

    def watch() -> None:
        while not stop.wait(0.002):
            seen.append(max(seen.pop(), _anonymous()) if len(seen) > 1 else _anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(seen) - seen[0]
    finally:
        stop.set()
        thread.join()


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this system tells no RssAnon in /proc/self/status; run the benchmark on Linux")


def _take_memory(num_bytes: int) -> None:
    """Touch free memory, and free it. On a virtual machine its host may have to find it first, for seconds a GB."""
    taken = b"1" * num_bytes
    del taken


def child(action: str, model: str, folder: Path) -> None:
    """One of the three, timed after the imports that all of them make; prints what was measured."""
    from megatron_klear.training import convert

    words = ["--hf", str(folder / "hf"), "--megatron", str(folder / "megatron"), "--params-dtype", MODELS[model].dtype]
    if action == "export":
        words += ["--out", str(folder / "out"), "--max-shard-bytes", str(MODELS[model].max_shard_bytes)]
    _take_memory(2 * sum(path.stat().st_size for path in (folder / "hf").iterdir()))
    with _peak_memory() as peak, contextlib.redirect_stdout(io.StringIO()):
        usage, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        if action == "copy":
            copy(folder / "hf", folder / "copy")
        else:
            convert.main([action, *words])
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
        memory = peak()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "memory": memory}))


def _drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(action: str, model: str, folder: Path, *, cold: bool) -> dict[str, float]:
    """A process that does one of the three; what it wrote the last time is deleted first."""
    for written in {"copy": ["copy"], "import": ["copy", "megatron"], "export": ["out"]}[action]:
        shutil.rmtree(folder / written, ignore_errors=True)
    if cold:
        _drop(folder)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--child", action, model, str(folder)]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"process": time.perf_counter() - started, **json.loads(done.stdout.splitlines()[-1])}


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two Hugging Face folders hold the same, bit by bit."""
    import torch

    from megatron_klear.checkpoint.hf import open_folder
    from megatron_klear.config.model import read_shape

    shape = read_shape(one)
    with open_folder(one, shape) as a, open_folder(other, shape) as b:
        return all(torch.equal(a(name), b(name)) for name in shape.tensor_shapes())


def rows(turns: list[dict[str, dict[str, float]]], num_bytes: int, shard_bytes: int) -> list[dict[str, str]]:
    """Medians over the turns, ratios within each."""
    found = []
    for action in ("copy", "import", "export"):
        ratios = [turn["copy"]["seconds"] / turn[action]["seconds"] for turn in turns]
        seconds, cpu, memory, process = (
            statistics.median(turn[action][key] for turn in turns) for key in ("seconds", "cpu", "memory", "process")
        )
        found.append(
            {
                "": action,
                "seconds": f"{seconds:.2f}",
                "cpu": f"{cpu:.2f}",
                "GB/s": f"{num_bytes / seconds / 1e9:.2f}",
                "ratio": f"{statistics.median(ratios):.2f}",
                "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
                "memory, MB": f"{memory / 1e6:.0f}",
                "in shards": f"{memory / shard_bytes:.2f}",
                "process": f"{process:.1f}",
            }
        )
    return found


def main() -> int:
    """Exit code 1 if a way is slower than 0.7 of the copy, takes more than two shards of memory, or changes a bit."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="0.6b")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; a folder in it is written and deleted")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="conversion-") as made:
        folder = Path(made)
        write_source(MODELS[args.model], folder / "hf")
        files = list((folder / "hf").glob("*.safetensors"))
        num_bytes, largest = sum(f.stat().st_size for f in files), max(f.stat().st_size for f in files)
        turns = [
            {action: run(action, args.model, folder, cold=args.cold) for action in ("copy", "import", "export")}
            for _ in range(args.turns)
        ]
        equal = same_tensors(folder / "hf", folder / "out")
    print(f"{args.model}, {MODELS[args.model].dtype}: {num_bytes / 1e9:.2f} GB in {len(files)} files")
    table = rows(turns, num_bytes, largest)
    print(format_table(table))
    good = all(float(row["ratio"]) >= AIM and float(row["in shards"]) <= 2 for row in table)
    print(f"bit-equal after both ways: {equal}; at least {AIM} each way, at most two shards: {good}")
    return 0 if equal and good else 1


if __name__ == "__main__":
    raise SystemExit(main())
