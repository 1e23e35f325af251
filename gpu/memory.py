"""How much memory this machine could still give."""

from __future__ import annotations

import os
from pathlib import Path


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
