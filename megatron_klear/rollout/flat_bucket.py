"""Weights inside a request, as SGLang's load_format "flattened_bucket" takes them: one run of bytes and a table.

Imports no torch (whoever sends tensors has it): the process that only generates need not load it.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# A tensor can only be viewed in the flat one at a multiple of its element's size; 16 bytes are the largest element.
ALIGNMENT = 16


def flatten(bucket: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """All tensors' bytes ([num_bytes] uint8, on their device), and where each of them lies.

    The table's entries are plain namespaces: SGLang reads their fields, and its own class cannot be imported here.
    """
    first = bucket[0][1]
    as_bytes = first.new_empty(0).byte().dtype
    table, end = [], 0
    for name, tensor in bucket:
        start = math.ceil(end / ALIGNMENT) * ALIGNMENT
        end = start + tensor.numel() * tensor.element_size()
        table.append(
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
    flat = first.new_zeros(end, dtype=as_bytes)
    for (_, tensor), entry in zip(bucket, table, strict=True):
        flat[entry.start_idx : entry.end_idx].copy_(tensor.detach().contiguous().flatten().view(as_bytes))
    return flat, table


def serialize(flat: Tensor, table: Sequence[SimpleNamespace]) -> str:
    """Base64 of a pickle that a server's restricted unpickler accepts.

    CPU: by value. torch's own sharing of CPU memory needs a secret that only child processes have; a server that is
    offered it dies. CUDA: torch's handle of the memory, so the server must be on this host, see the same devices under
    the same numbers, and `flat` must live until it has answered. (The CUDA branch has never been run.)
    """
    content = {"flattened_tensor": flat, "metadata": list(table)}
    pickled = bytes(ForkingPickler.dumps(content)) if flat.is_cuda else pickle.dumps(content)
    return base64.b64encode(pickled).decode("ascii")
