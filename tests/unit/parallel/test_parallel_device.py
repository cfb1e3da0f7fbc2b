"""Megatron's CUDA calls on a CPU: each stand-in works inside the scope, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher

from megatron_klear.parallel import device as device_module
from megatron_klear.parallel.device import Device, keep_freed_memory, megatron_scope, pick_device

CPU = Device("cpu")
ABSENT = object()
PATCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.Tensor, "cuda"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "get_rng_state"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (torch.cuda, "Stream"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "stream"),
    (token_dispatcher, "maybe_move_tensor_to_cpu"),
]


def held() -> list[Any]:
    """What each owner itself holds under the name; an inherited attribute is absent."""
    return [vars(owner).get(name, ABSENT) for owner, name in PATCHED]


# Taken at import: a test that ran before may already have left something behind.
ORIGINALS = held()


def check_current_device() -> None:
    assert torch.device(torch.cuda.current_device()) == torch.device("cpu")
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"


def check_synchronize() -> None:
    torch.cuda.synchronize()
    torch.cuda.synchronize(device=0)


def check_tensor_cuda() -> None:
    x = torch.ones(2)
    assert x.cuda() is x and x.cuda(0, non_blocking=True) is x
    layer = torch.nn.Linear(2, 2).cuda()
    assert layer.weight.device.type == "cpu"


def check_manual_seed() -> None:
    torch.cuda.manual_seed(5)
    seeded = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(seeded, torch.rand(3))


def check_rng_states() -> None:
    """Megatron saves a state, draws, and puts it back: the draws must come again."""
    state = megatron_random._get_cuda_rng_state()
    assert torch.equal(state, torch.cuda.get_rng_state())
    first = torch.rand(3)
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def check_streams() -> None:
    """As Megatron's all-to-all dispatcher uses them."""
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream() is torch.cuda.current_stream() and torch.cuda.current_stream() != side
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        moved = torch.ones(2) + 1
    side.record_event().synchronize()
    assert moved.tolist() == [2, 2]


def check_split_sizes() -> None:
    """all_to_all_single takes numbers, not tensors."""
    sizes = torch.tensor([3, 4])
    assert list(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True)) == [3, 4]
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, record_stream=True) is sizes
    nothing: Any = None
    assert token_dispatcher.maybe_move_tensor_to_cpu(nothing, as_numpy=True) is None


def check_device_arguments() -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.tensor([1.0], device=device).device.type == "cpu"
        assert torch.ones(2).to(device=device).device.type == "cpu"
    assert torch.ones(2, device="meta").device.type == "meta"


def check_pin_memory() -> None:
    assert not torch.zeros(2, pin_memory=True).is_pinned()


def check_type_names() -> None:
    x = torch.ones(2)
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == torch.float64


every_check = pytest.mark.parametrize(
    "check",
    [
        check_current_device,
        check_synchronize,
        check_tensor_cuda,
        check_manual_seed,
        check_rng_states,
        check_streams,
        check_split_sizes,
        check_device_arguments,
        check_pin_memory,
        check_type_names,
    ],
)


@every_check
def test_active_inside(check: Callable[[], None]) -> None:
    with megatron_scope(CPU):
        check()


def assert_undone() -> None:
    assert all(now is then for now, then in zip(held(), ORIGINALS, strict=True))
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_everything_is_replaced_inside_and_put_back_after() -> None:
    assert [(owner, name) for owner, name, _ in device_module._patches()] == PATCHED
    with megatron_scope(CPU):
        assert all(now is not then for now, then in zip(held(), ORIGINALS, strict=True))
    assert_undone()


def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError, match="from inside"), megatron_scope(CPU):
        raise KeyError("from inside")
    assert_undone()


@every_check
def test_scopes_can_be_nested(check: Callable[[], None]) -> None:
    with megatron_scope(CPU):
        with megatron_scope(CPU):
            check()
        check()
    assert_undone()


def test_a_scope_can_be_entered_again() -> None:
    for _ in range(3):
        with megatron_scope(CPU):
            check_current_device()
    assert_undone()


def test_on_cuda_nothing_is_touched() -> None:
    with megatron_scope(Device("cuda")):
        assert_undone()


def test_an_unknown_megatron_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "SUPPORTED_MEGATRON", ("0.98.", "0.99."))
    # The version is asked for once a process.
    device_module._check_version.cache_clear()
    message = (
        r"megatron-core \S+ is installed; running it on CPU was made for 0\.98\.x, 0\.99\.x\."
        r" Install one of these, or run on CUDA, where nothing is patched\."
    )
    with pytest.raises(RuntimeError, match=message), megatron_scope(CPU):
        raise AssertionError("the scope must not be entered")
    assert_undone()


def test_a_device_knows_its_torch_device_and_backend() -> None:
    assert (CPU.torch_device, CPU.backend) == (torch.device("cpu"), "gloo")
    second = Device("cuda", 1)
    assert (second.torch_device, second.backend) == (torch.device("cuda", 1), "nccl")


def test_the_cpu_is_picked_where_there_is_no_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert pick_device(3) == CPU


PAGE_FAULTS = """
import resource
import torch
from megatron_klear.parallel.device import keep_freed_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # 128 MiB: 32,768 pages of 4 KiB, if none are kept.
    tensors = [torch.ones(1 << 21) for _ in range(16)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(), page_faults(), page_faults())
"""


def test_memory_of_freed_tensors_is_not_asked_for_again() -> None:
    # In a process of its own: the memory of this one has holes that other tests left.
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, timeout=120, check=True)
    is_kept, first, second = done.stdout.split()
    if is_kept != "True":
        pytest.skip("the C library is not glibc")
    assert int(first) > 4096 and 8 * int(second) < int(first)


def test_a_c_library_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert not keep_freed_memory()
