"""Compiling kernels: once per machine, kept in a cache that knows every file it was made from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import __version__ as llvmlite_version
from numba.core import config
from numba.core.codegen import get_host_cpu_features

from gpu.cache import cache_directory
from gpu.kernels.cpu import describe_cpu

_SOURCES = (
    "../blocks.py",
    "__init__.py",
    "attend.py",
    "draw.py",
    "header.py",
    "jit.py",
    "layers.py",
    "rows.py",
    "simd.py",
    "threads.py",
    "tiles.py",
)
"""What compiled code is made from."""


def _fingerprint() -> str:
    """Numba looks at the file a function is in, not at those it draws in: so all of them make the key."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite_version} {describe_cpu().isa}".encode())
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


if "NUMBA_CACHE_DIR" not in os.environ:
    setattr(config, "CACHE_DIR", str(cache_directory() / "kernels" / _fingerprint()))  # noqa: B010 - made at run time

ISA = describe_cpu().isa

if ISA == "avx512vnni" and "NUMBA_CPU_FEATURES" not in os.environ:
    # Otherwise LLVM takes `vpdpwssd` apart again, into a product, a sum and a broadcast: for one chain that is
    # quicker, for as many as `tiles` has at once it takes three times the instructions.
    features = get_host_cpu_features()  # type: ignore[no-untyped-call]
    setattr(config, "CPU_FEATURES", f"{features},+fast-dpwssd")  # noqa: B010 - made at run time

_OPERATION = "void(int64, int64, int64)"


def compiled(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Compile to a C function: its `.address` can be called without the interpreter's lock."""
    return numba.cfunc(signature, cache=True)


def operation(function: Callable[[int, int, int], None]) -> Any:
    """Compile an operation, `(arguments' address, chunk, thread)`, to be named in programs by its address."""
    return compiled(_OPERATION)(function)


def native(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that Python calls, and that lets go of the interpreter's lock."""
    return numba.njit(signature, nogil=True, cache=True)


inner = numba.njit(nogil=True)
"""A function that only other kernels call: compiled into each of them."""
