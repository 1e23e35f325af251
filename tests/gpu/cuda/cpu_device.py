"""The kernels' text on a CPU: compiled by g++ over `shim.h`, launched on NumPy arrays as by CuPy."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "gpu" / "kernels"
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
OUTCOMES = (
    "",
    "a deadlock at a barrier",
    "a write past the shared memory",
    "a block that is not whole warps",
)


_CODES = {"u8": "p", "i4": "i", "u4": "u", "f4": "f"}


class KernelFault(Exception):
    """What on a card would hang, corrupt memory, or fail to launch."""


def compiled(source: Path) -> ctypes.CDLL:
    """The shared object of one .cu file, made once for each state of the text."""
    text = _translation(source)
    parts = [
        text.encode(),
        *(path.read_bytes() for path in sorted(KERNELS.glob("*.cuh"))),
        " ".join(FLAGS).encode(),
    ]
    parts.append((HERE / "shim.h").read_bytes())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    target = HERE.parents[2] / ".cache" / "cpu_kernels" / f"{source.stem}-{digest}.so"
    if not target.exists():
        _compile(text, target)
    return ctypes.CDLL(str(target))


def _translation(source: Path) -> str:
    """The .cu text with the shim before it and an entry point for each kernel behind it."""
    expanded = subprocess.run(
        [COMPILER or "g++", "-std=c++17", "-E", "-P", "-x", "c++", "-D__launch_bounds__(...)=", str(source)],
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    names = re.findall(r'extern "C" __global__ void\s+(\w+)\s*\(', expanded)
    entries = "".join(f"KERNEL({name})\n" for name in names)
    body = re.sub(r'#include "machine.cuh"', "", source.read_text())
    return f'#include "shim.h"\n{body}\n{entries}'


def _compile(text: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Headers are taken from a copy without machine.cuh's text: the shim has its twins.
        for header in KERNELS.glob("*.cuh"):
            empty = header.name == "machine.cuh"
            (Path(folder) / header.name).write_text("#pragma once\n" if empty else header.read_text())
        source, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        command = [COMPILER or "g++", *FLAGS, f"-I{folder}", f"-I{HERE}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelFault(done.stderr)
        made.replace(target) if made.stat().st_dev == target.parent.stat().st_dev else shutil.move(
            made, target
        )


class CpuFunction:
    """One kernel. Called as CuPy's: grid, block, arguments, shared bytes."""

    def __init__(self, library: ctypes.CDLL, name: str, seed: int) -> None:
        self.entry = getattr(library, f"run_{name}")
        signature = getattr(library, f"signature_{name}")
        signature.restype = ctypes.c_char_p
        self.signature = signature().decode()
        self.name = name
        self.seed = seed
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise KernelFault(f"{self.name}: {shared_mem} bytes of shared memory were not asked for")
        if 0 in grid or max(grid[1:], default=0) > 65535:
            raise KernelFault(f"{self.name}: a grid of {grid}")
        self.seed += 1  # another order of the threads each time: results that must not move are compared
        boxes = [_boxed(argument) for argument in arguments]
        given = "".join(_CODES.get(box.dtype.str[1:], "?") for box in boxes)
        if given != self.signature:
            raise KernelFault(f"{self.name}: arguments {given}, its signature is {self.signature}")
        pointers = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        shapes = [(ctypes.c_uint * 3)(*(*shape, 1, 1)[:3]) for shape in (grid, block)]
        outcome = self.entry(pointers, *shapes, ctypes.c_uint(shared_mem), ctypes.c_uint(self.seed))
        if outcome:
            raise KernelFault(f"{self.name}: {OUTCOMES[outcome]}")


def _boxed(argument: Any) -> np.ndarray[Any, Any]:
    """An array's address, a scalar's value. Plain Python numbers have no width: refused."""
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise KernelFault("an array with gaps as an argument")
        return np.array([argument.ctypes.data], np.uint64)
    if isinstance(argument, np.generic):
        return np.array([argument])
    raise KernelFault(f"an argument of type {type(argument).__name__}")


class CpuModule:
    """One .cu file, as `cupy.RawModule` is one cubin."""

    def __init__(self, stem: str, seed: int = 1) -> None:
        self.library = compiled(KERNELS / f"{stem}.cu")
        self.seed = seed

    def get_function(self, name: str) -> CpuFunction:
        return CpuFunction(self.library, name, self.seed)
