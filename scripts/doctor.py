"""`antiphon doctor`: what is here, what is wrong with it, and how to mend it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import attrs
from attrs import frozen
from rich.table import Table
from rich.text import Text

from scripts import config, tables
from scripts.failure import UsageFault
from scripts.model import KNOWN, models_directory

LEAST_DISK_GIB = 2.0
LEAST_MEMORY_GIB = 2.0
SLOW_FSYNC_MS = 30.0


@frozen
class Finding:
    """One thing looked at. `mend` is empty when there is nothing to do."""

    name: str
    state: Literal["ok", "note", "wrong"]
    found: str
    mend: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `antiphon doctor`."""
    parser = subparsers.add_parser(
        "doctor", help="look at this machine and installation, and say what to mend"
    )
    parser.add_argument("--state", default=None)
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Print every finding. Returns 1 when something is wrong."""
    findings = examine(args.state, args.port)
    if args.json:
        print(json.dumps({"findings": [attrs.asdict(f) for f in findings]}, indent=2))
    else:
        tables.show(_table(findings))
    return int(any(f.state == "wrong" for f in findings))


def examine(state: str | None, port: int | None) -> list[Finding]:
    """Look at everything, with the settings that `serve` would use."""
    try:
        settings = config.load({"state": state, "port": port})
        first = [Finding("settings", "ok", "every key is known")]
    except UsageFault as fault:
        settings, first = config.Config(), [Finding("settings", "wrong", str(fault), "mend that key")]
    checks: list[Callable[[config.Config], Finding]] = [
        _python,
        _memory,
        _processor,
        _gpus,
        _cupy,
        _engine,
        _compiler,
        _model,
        _state,
        _disk,
        _fsync,
        _port,
        _fast_answers,
    ]
    return first + [check(settings) for check in checks]


def _python(_settings: config.Config) -> Finding:
    return Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _memory(_settings: config.Config) -> Finding:
    pairs = (line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = int(dict(pairs)["MemAvailable"].split()[0]) / 2**20
    state: Literal["ok", "wrong"] = "ok" if free >= LEAST_MEMORY_GIB else "wrong"
    return Finding(
        "memory",
        state,
        f"{free:.1f} GiB available",
        "" if state == "ok" else "free some memory or use a smaller model",
    )


def _processor(_settings: config.Config) -> Finding:
    from gpu.kernels.cpu import describe_cpu  # noqa: PLC0415 - the other checks must work without the engine

    cpu = describe_cpu()
    kernels = f"{cpu.isa} kernels ({', '.join(cpu.features)}), {cpu.threads} threads"
    return Finding("processor", "ok", f"{cpu.name}, {cpu.cores} cores; {kernels}")


def _gpus(_settings: config.Config) -> Finding:
    from gpu.kernels.cuda_cards import list_cards  # noqa: PLC0415 - see _processor

    if shutil.which("nvidia-smi") is None:
        return Finding("gpus", "note", "none found (no nvidia-smi): the engine runs on the processor")
    cards = list_cards()
    if not cards:
        mend = "reinstall or restart the NVIDIA driver, if there is a GPU; see also CUDA_VISIBLE_DEVICES"
        return Finding("gpus", "wrong", "nvidia-smi lists none that this process may use", mend)
    return Finding("gpus", "ok", "; ".join(card.words for card in cards))


def _cupy(_settings: config.Config) -> Finding:
    from scripts.engines import INSTALL_CUPY, cupy_is_here  # noqa: PLC0415 - see _processor

    if not cupy_is_here():
        return Finding(
            "cupy", "note", "not installed; needed only for a GPU", f"on a GPU host: {INSTALL_CUPY}"
        )
    return Finding("cupy", "ok", "installed")


def _engine(settings: config.Config) -> Finding:
    from scripts.engines import choose  # noqa: PLC0415 - see _processor

    try:
        chosen = choose(settings.engine)
    except UsageFault as fault:
        return Finding("engine", "wrong", str(fault), "mend that, or set engine to auto")
    return Finding("engine", "note" if chosen.note else "ok", f"runs on {chosen.words}", chosen.note)


def _compiler(_settings: config.Config) -> Finding:
    found = shutil.which("g++")
    if found is None:
        return Finding(
            "c++ compiler",
            "note",
            "none: not needed to serve; the CUDA sources' tests on the CPU are skipped",
        )
    return Finding("c++ compiler", "ok", found)


def _model(settings: config.Config) -> Finding:
    from gpu.errors import ModelError  # noqa: PLC0415 - see _processor
    from gpu.model_card import read_model_card  # noqa: PLC0415 - see _processor

    known = KNOWN.get(settings.model)
    path = models_directory() / known.file_name if known else Path(settings.model).expanduser()
    if not path.exists():
        mend = "antiphon model fetch" if known else "give the path of a GGUF file or a safetensors directory"
        return Finding("model", "note" if known else "wrong", f"{settings.model}: not here yet", mend)
    try:
        card = read_model_card(path)
    except ModelError as error:
        return Finding("model", "wrong", str(error), "fetch it again, or give another file")
    return Finding("model", "ok", f"{card.name}: {card.architecture}, context {card.context_length} ({path})")


def _state(settings: config.Config) -> Finding:
    from scripts.tree import longest_state_path  # noqa: PLC0415 - see _processor

    path = Path(settings.state).expanduser().resolve()
    there = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("state", "wrong", f"{path} cannot be written", "give --state a directory of your own")
    if len(os.fsencode(path)) > (limit := longest_state_path(settings)):
        return Finding(
            "state",
            "wrong",
            f"{path} is too long for socket files",
            f"use a path of at most {limit} bytes",
        )
    return Finding("state", "ok", str(path))


def _disk(settings: config.Config) -> Finding:
    path = Path(settings.state).resolve()
    there = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(there).free / 2**30
    state: Literal["ok", "wrong"] = "ok" if free >= LEAST_DISK_GIB else "wrong"
    return Finding(
        "disk",
        state,
        f"{free:.1f} GiB free",
        "" if state == "ok" else f"free at least {LEAST_DISK_GIB:.0f} GiB: the books stop on a full disk",
    )


def _fsync(settings: config.Config) -> Finding:
    path = Path(settings.state).resolve()
    there = next(p for p in (path, *path.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            began = time.monotonic()
            for _ in range(10):
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            each = (time.monotonic() - began) * 100
    except OSError as error:
        return Finding("fsync", "wrong", str(error), "give --state a directory that can be written")
    note = "" if each < SLOW_FSYNC_MS else "a slow disk: charges are grouped, but closing a turn waits for it"
    return Finding("fsync", "ok" if not note else "note", f"{each:.1f} ms each", note)


def _port(settings: config.Config) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Finding(
                "port",
                "note",
                f"{settings.host}:{settings.port}: {error.strerror}",
                "fine if Antiphon runs there; else give --port",
            )
    return Finding("port", "ok", f"{settings.host}:{settings.port} is free")


def _fast_answers(settings: config.Config) -> Finding:
    from scripts.first_release import MEND, is_example  # noqa: PLC0415 - see _processor
    from store.release import ReleaseError, Unhashed, examine_named, read_pointer  # noqa: PLC0415 - see _processor

    name, root = "fast answers", Path(settings.state).resolve() / "releases"
    mend = MEND
    try:
        pointer = read_pointer(root)
        if pointer is None:
            return Finding(name, "note", f"no release is active in {root}", "antiphon serve makes the first")
        if is_example(root / pointer.active.version):
            mend = "start antiphon serve again: it makes the example anew"
        found = examine_named(root, pointer.active)
    except Unhashed as error:
        return Finding(name, "note", str(error))
    except ReleaseError as error:
        return Finding(name, "wrong", str(error), mend)
    return Finding(name, "ok", f"{pointer.active.version} is active: {found.entries:,} entries")


def _table(findings: list[Finding]) -> Table:
    table = tables.table("what", "", "found", "to do")
    colours = {"ok": "green", "note": "yellow", "wrong": "red"}
    for f in findings:
        tables.add(table, f.name, Text(f.state, colours[f.state]), f.found, f.mend)
    return table
