"""The GPUs that a run can be planned for, and how much of their data-sheet speed a run is taken to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_klear.config.names import did_you_mean
from megatron_klear.errors import ConfigError, Fault

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node of `per_node`. Rates are per second and GPU; those of links count one direction."""

    name: str
    bf16_flops: float
    """Dense tensor-core products of bfloat16."""
    float32_flops: float
    """Products of float32 outside the tensor cores: what torch does with float32 unless TF32 is allowed."""
    hbm_bytes: int
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    per_node: int = 8


# Data sheets of the SXM modules, without sparsity; hbm_bytes is the total that nvidia-smi shows. Data sheets add up
# both directions of NVLink: 900 GB/s there is 450 here. The network is one adapter a GPU, as in DGX nodes.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 Tensor Core GPU data sheet (SXM): 989 TFLOPS, 3.35 TB/s, NVLink 900 GB/s; ConnectX-7 of 400 Gb/s.
        Gpu("h100", 989e12, 67e12, 81559 * MIB, 3.35e12, 450e9, 50e9),
        # An H100 with NVLink cut to 400 GB/s (DeepSeek-V3, arXiv 2412.19437 section 3: 50 GB/s of network a GPU).
        Gpu("h800", 989e12, 67e12, 81559 * MIB, 3.35e12, 200e9, 50e9),
        # NVIDIA H200 Tensor Core GPU data sheet (SXM): the H100's chip with 141 GB at 4.8 TB/s.
        Gpu("h200", 989e12, 67e12, 143771 * MIB, 4.8e12, 450e9, 50e9),
        # NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s; ConnectX-6 of 200 Gb/s.
        Gpu("a100", 312e12, 19.5e12, 81920 * MIB, 2.039e12, 300e9, 25e9),
    )
}


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Shares of the data-sheet rates. Assumptions, not measurements of this project: see docs/planning.md."""

    matmul: float = 0.65
    """bf16 products with thousands of rows: public tests of cuBLAS on an H100 find 600 to 790 of 989 TFLOPS."""
    attention: float = 0.35
    """Fused causal attention, forward and backward: FlashAttention-2's kernels on an H100 (version 3 reaches 0.6)."""
    float32: float = 0.7
    """float32 products outside the tensor cores."""
    hbm: float = 0.8
    """Streaming kernels."""
    nvlink: float = 0.75
    """NCCL rings in a node: about 370 of 450 GB/s on an H100 for messages of many MB, less for those of a few."""
    network: float = 0.8
    """NCCL between nodes."""


EFFICIENCIES = Efficiencies()


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, in any case. Raises `ConfigError` naming the nearest."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        fault = Fault("--gpu", name, f"expected one of {', '.join(GPUS)}", did_you_mean(name.lower(), GPUS))
        raise ConfigError(str(fault), [fault])
    return gpu


def link_bytes_per_s(gpu: Gpu, *, group_size: int, stride: int) -> float:
    """Bytes a second that each rank of a ring moves, of a group of ranks `stride` apart (ranks fill nodes in order).

    A ring that leaves the node has a network adapter for each member it has there, so NCCL runs as many rings.
    """
    if group_size * stride <= gpu.per_node:
        return gpu.nvlink_bytes_per_s * EFFICIENCIES.nvlink
    members = max(1, gpu.per_node // stride)
    network = gpu.network_bytes_per_s * EFFICIENCIES.network * members
    return min(network, gpu.nvlink_bytes_per_s * EFFICIENCIES.nvlink) if members > 1 else network
