"""Kernels compiled ahead of time, with no GPU and no driver: NVRTC turns each .cu file into a cubin.

The compiler comes with `pip install "antiphon[gpu]"`: NVRTC's wheel and thin bindings to it. A cubin is kept
under a name that holds the hash of all it was made from, so a stale one is never loaded.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from attrs import frozen

from gpu.errors import EngineError

FOLDER = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_90")
"""What CI builds for. A cubin runs on its own and on later minor versions: sm_80 also on an L4."""
# No fused multiply-add that the text does not ask for: kernels that promise the same bits must round alike.
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "--diag-suppress=177")
_MISSING = 'the CUDA compiler is not installed: pip install "antiphon[gpu]"'


class KernelBuildError(EngineError):
    """A kernel did not compile, or the compiler is not installed; the text is the compiler's."""


@frozen
class Resources:
    """What one kernel takes of a multiprocessor, as the assembler reports it. Spills are in bytes."""

    kernel: str
    architecture: str
    registers: int
    spill_stores: int
    spill_loads: int


def sources() -> list[Path]:
    """Every .cu file, by name."""
    return sorted(FOLDER.glob("*.cu"))


def source_digest(source: Path, architecture: str, compiler: str) -> str:
    """A hash over the file, every header, the options, the architecture and the compiler's version."""
    texts = [source.read_bytes(), *(header.read_bytes() for header in sorted(FOLDER.glob("*.cuh")))]
    parts = [*texts, architecture.encode(), compiler.encode(), " ".join(OPTIONS).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(stem: str, architecture: str, cache: Path) -> Path:
    """The cubin of `<stem>.cu`, compiled unless `cache` has it. Raises `KernelBuildError`."""
    source = FOLDER / f"{stem}.cu"
    nvrtc = _nvrtc()
    target = cache / f"{stem}-{architecture}-{source_digest(source, architecture, compiler_version())}.cubin"
    if not target.exists():
        code, log = _compile(nvrtc, source, architecture)
        cache.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".log").write_text(log)
        # By rename: a process that is killed here, or a second one, leaves no half a cubin.
        draft = target.with_suffix(f".{hashlib.sha256(code).hexdigest()[:8]}.part")
        draft.write_bytes(code)
        draft.replace(target)
    return target


def compiler_version() -> str:
    """Of the compiler that `build` uses. Raises `KernelBuildError` where there is none."""
    nvrtc = _nvrtc()
    try:
        return ".".join(str(part) for part in _checked(nvrtc, nvrtc.nvrtcVersion()))
    except RuntimeError as error:  # the bindings are here, the library is not
        raise KernelBuildError(f"{_MISSING} ({error})") from error


def resources(cubin: Path) -> list[Resources]:
    """The assembler's report on every kernel of a cubin that `build` made."""
    log = cubin.with_suffix(".log").read_text()
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        re.DOTALL,
    )
    return [
        Resources(name, arch, int(registers), int(stores), int(loads))
        for name, arch, stores, loads, registers in pattern.findall(log)
    ]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - hosts without a GPU do without it
    except ImportError as error:
        raise KernelBuildError(_MISSING) from error
    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC: {status}")
    return tuple(values)


def _compile(nvrtc: Any, source: Path, architecture: str) -> tuple[bytes, str]:
    headers = sorted(FOLDER.glob("*.cuh"))
    texts = [header.read_bytes() for header in headers]
    names = [header.name.encode() for header in headers]
    (program,) = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(headers), texts, names),
    )
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _text(nvrtc, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"{source.name} for {architecture}:\n{log}")
    (size,) = _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
    code = bytearray(size)
    _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc, nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), log


def _text(nvrtc: Any, program: Any) -> str:
    (size,) = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    log = bytearray(size)
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0").decode()
