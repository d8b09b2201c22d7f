"""Memory budget of a KV cache: from a setting, or else from the memory that is free after the weights."""

from __future__ import annotations

from pathlib import Path

import torch

DEFAULT_CACHE_BUDGET_BYTES = 2 * 2**30
"""Budget of an engine that is loaded without settings."""

MIN_BYTES = 64 * 2**20
"""Least budget, even if less memory is free: a step that does not fit raises CacheFullError."""
MAX_CPU_BYTES = 2**30
CPU_SHARE = 0.25
"""Share of free memory on CPUs: other workers may run there, and their caches may not be full yet."""


def cache_budget(device: torch.device, num_bytes: int | None, share: float) -> int:
    """Return the bytes for keys and values on a device: `num_bytes`, or if it is None by the free memory.

    Of a GPU's memory that is `share`. Call it after the weights are loaded.
    """
    if num_bytes is not None:
        return num_bytes
    free = free_memory(device)
    if device.type == "cuda":
        return max(MIN_BYTES, int(free * share))
    return max(MIN_BYTES, min(int(free * CPU_SHARE), MAX_CPU_BYTES))


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved but not allocated is free for the cache, too.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the available bytes of memory: of the machine, or of the container if that is less."""
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
    available = [int(fields["MemAvailable"].split()[0]) * 1024]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available.append(int((cgroup / limit).read_text()) - int((cgroup / used).read_text()))
        except (OSError, ValueError):
            continue  # another version, or no limit ("max")
    return max(0, min(available))
