"""Weights as one run of bytes and a table: what comes out is what went in, and a restricted unpickler takes it."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from megatron_klear.rollout.flat_bucket import flatten, serialize

# What SGLang's unpickler lets through, as far as tensors by value need it.
ALLOWED = {
    ("types", "SimpleNamespace"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "uint8"),
    ("torch", "ByteStorage"),
}


class Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED, f"{module}.{name} would be refused"
        return super().find_class(module, name)


def bucket() -> list[tuple[str, Tensor]]:
    """Of sizes that leave the next tensor unaligned, one that is not contiguous, a scalar and an empty one."""
    return [
        ("odd", torch.randn(3).bfloat16()),
        ("matrix", torch.randn(4, 5)),
        ("turned", torch.randn(4, 5).T),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 3)),
        ("gradient", torch.randn(2, requires_grad=True)),
    ]


def test_what_comes_out_is_what_went_in() -> None:
    named = bucket()
    sent = Restricted(io.BytesIO(base64.b64decode(serialize(*flatten(named))))).load()
    flat = sent["flattened_tensor"]
    assert flat.dtype == torch.uint8 and not flat.requires_grad
    for (name, tensor), entry in zip(named, sent["metadata"], strict=True):
        assert entry.name == name and entry.numel == entry.end_idx - entry.start_idx
        view = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(view, tensor) and view.dtype == tensor.dtype


def test_it_holds_no_memory_of_the_tensors() -> None:
    tensor = torch.zeros(8)
    flat, _ = flatten([("a", tensor)])
    tensor.fill_(1)
    assert not flat.any()
