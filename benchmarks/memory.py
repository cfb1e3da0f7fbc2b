"""The high water of this process's resident memory, which benchmarks of memory on a CPU share."""

from __future__ import annotations

from pathlib import Path


def reset_high_water() -> float:
    """Begin anew; what is resident now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water_mib()


def high_water_mib() -> float:
    """Most that was resident since the process, or the last reset, began."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
