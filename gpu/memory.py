"""How much memory this machine could still give."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np


def available_bytes() -> int:
    """What can be had without swapping; the control group's limit counts.

    Falls back to half the physical memory.
    """
    limits = [limit for limit in (_meminfo(), _cgroup()) if limit is not None]
    if limits:
        return max(0, min(limits))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _meminfo() -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):
        return None


def copy_bandwidth(size: int = 256 << 20, rounds: int = 5) -> float:
    """Bytes per second that one thread reads and writes, copying more than any cache holds; the best of a few."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * size / (time.perf_counter() - began))
    return best
