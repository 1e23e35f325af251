"""What this processor can do, and what the kernels will use of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from attrs import frozen

Isa = Literal["avx512vnni", "avx2", "portable"]

ISA_VARIABLE = "ANTIPHON_ISA"
"""Set it to `portable` (or `avx2`) to use less than the processor has: for tests, and to hunt a fault."""

_NEEDS: dict[Isa, tuple[str, ...]] = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c", "avx2"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}


@frozen
class Cpu:
    """The processor as the kernels see it."""

    name: str
    isa: Isa
    features: tuple[str, ...]
    """Those of the kernels' interest that are there."""
    cores: int
    """That this process may use: affinity and control group count."""
    threads: int
    """That the kernels will run."""


@cache
def describe_cpu() -> Cpu:
    """Look once at the processor. Raises `ValueError` if `ANTIPHON_ISA` asks for what is not there."""
    present = host_features()
    cores = usable_cores()
    interesting = sorted({feature for needs in _NEEDS.values() for feature in needs})
    return Cpu(
        name=_model_name(),
        isa=choose_isa(present, os.environ.get(ISA_VARIABLE)),
        features=tuple(feature for feature in interesting if present.get(feature)),
        cores=cores,
        threads=default_threads(cores),
    )


def choose_isa(present: Mapping[str, bool], wanted: str | None = None) -> Isa:
    """The best set of instructions that is wholly there, or the one `wanted`, if it is."""
    able: list[Isa] = [isa for isa, needs in _NEEDS.items() if all(present.get(need) for need in needs)]
    if wanted is None:
        return able[0]
    for isa in able:
        if isa == wanted:
            return isa
    raise ValueError(f"{ISA_VARIABLE}={wanted}: this processor can do {', '.join(able)}")


def host_features() -> dict[str, bool]:
    """Feature → whether processor *and* operating system have it (LLVM asks both)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    from llvmlite import binding  # noqa: PLC0415 - slow to load, and only some callers come here

    return dict(binding.get_host_cpu_features())


def usable_cores() -> int:
    """Cores this process may run on, by affinity and by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def default_threads(cores: int) -> int:
    """All of a small machine, whose others sleep mostly; of a larger one, all but one."""
    return cores if cores <= 4 else cores - 1


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
