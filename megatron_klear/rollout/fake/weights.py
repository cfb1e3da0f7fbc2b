"""Weights as a server holds them: bytes by name. Reading them from a folder and from a bucket, without torch.

Nothing here imports torch: unpickling a bucket does so by itself, as its tensors name it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from megatron_klear.errors import WeightSyncError

# Names of safetensors for what torch calls otherwise.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64", "I32": "int32"}
BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"
TORCH_MODULES = ("torch", "torch._utils", "torch.storage", "torch._tensor", "torch.serialization")
PLAIN = {
    *(("builtins", name) for name in ("bytearray", "bytes", "dict", "int", "list", "set", "str", "tuple")),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's dtype as torch names it ("float32"), its shape, and its values as they lie in memory."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class BucketEntry:
    """What a bucket says of one of its tensors; `start_idx` and `end_idx` count bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    start_idx: int
    end_idx: int
    numel: int


class SafeUnpickler(pickle.Unpickler):
    """Takes what SGLang's own takes of tensors sent by value: plain containers, tensors, and its bucket's class.

    A handle of shared memory (torch.multiprocessing, from an unrelated process) is refused, and that is deadly there.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The class, if it may come."""
        if (module_name, global_name) == (BUCKET_MODULE, "FlattenedTensorMetadata"):
            return BucketEntry
        if module_name in TORCH_MODULES or (module_name, global_name) in PLAIN | {("types", "SimpleNamespace")}:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def read_folder(folder: str) -> dict[str, RawTensor]:
    """All tensors of a Hugging Face folder. Raises `WeightSyncError` if there are none, or a file cannot be read."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"Failed to load the model: cannot find any model weights in {folder}")
    tensors = {}
    for file in files:
        try:
            parts = safetensors.deserialize(file.read_bytes())
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightSyncError(f"Failed to load the model: {file}: {error}") from error
        for name, part in parts:
            dtype = DTYPES.get(str(part["dtype"]), str(part["dtype"]))
            tensors[name] = RawTensor(dtype, tuple(part["shape"]), bytes(part["data"]))
    return tensors


def read_serialized(serialized: str, load_format: str | None) -> dict[str, RawTensor]:
    """Tensors of one entry of `serialized_named_tensors`.

    Raises `pickle.UnpicklingError` where it is not what it should be; a real server does not survive that.
    """
    try:
        content = SafeUnpickler(io.BytesIO(base64.b64decode(serialized, validate=True))).load()
        if load_format == "flattened_bucket":
            return _bucket_tensors(content)
        return {name: raw_tensor(tensor) for name, tensor in content}
    except (binascii.Error, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


def _bucket_tensors(bucket: Mapping[str, Any]) -> dict[str, RawTensor]:
    data = bucket["flattened_tensor"].numpy().tobytes()
    return {
        entry.name: RawTensor(
            str(entry.dtype).removeprefix("torch."), tuple(entry.shape), data[entry.start_idx : entry.end_idx]
        )
        for entry in bucket["metadata"]
    }


def raw_tensor(tensor: Any) -> RawTensor:
    """A torch tensor's bytes. numpy has no bfloat16, so they are read as the integers that they also are."""
    flat = tensor.detach().contiguous().flatten().view(tensor.new_empty(0).byte().dtype)
    return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes())


def checksums(weights: Mapping[str, RawTensor]) -> dict[str, str]:
    """16 hexadecimal digits a tensor, by name. A real server's names are its own: q, k and v are one there."""
    return {name: hashlib.blake2b(raw.data, digest_size=8).hexdigest() for name, raw in sorted(weights.items())}


def overall(parts: Mapping[str, str]) -> str:
    """One checksum of all."""
    return hashlib.sha256("".join(f"{name}{parts[name]}" for name in sorted(parts)).encode()).hexdigest()
