"""`scripts/gpu_check`: the kernels on a card against their references, and their speed against its limits."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gpu.cache import cache_directory
from gpu.errors import EngineError
from gpu.kernels.cuda import Limits
from gpu.kernels.cuda_device import CupyDevice
from gpu.llama import Llama
from scripts.bench import report
from scripts.bench.report import Row
from scripts.gpu_golden import golden_rows
from scripts.gpu_limits import Limits as CardLimits
from scripts.gpu_limits import measure_limits
from scripts.gpu_peers import transformers_rate
from scripts.gpu_speed import EIGHT_B, SMOLLM2, decoding_step, make_up, measure, prefill_step, time_outside

ROOT = Path(__file__).parents[1]
DECODES = ((1, 512), (1, 8192), (8, 512), (8, 4096), (64, 512), (64, 2048), (256, 512), (256, 2048))
"""Sequences at once, and how long each is."""
PREFILL_TOKENS = 4096
CACHE_BLOCKS = 16384
TILE = 1 << 25
SECONDS_A_PART = 110
"""Two such parts, and two minutes of measuring, stay under six minutes."""


def main(arguments: list[str] | None = None) -> int:
    """Print a table, write the JSON, and return 0; 1 when a floor is missed or a part failed; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the report goes")
    options = parser.parse_args(arguments)
    try:
        device = CupyDevice(cache_directory() / "cubins")
        cupy = importlib.import_module("cupy")
    except EngineError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    rows = _all_rows(device, cupy)
    body = json.loads(report.as_json(rows)) | {"gpu": _describe(cupy)}
    options.json.write_text(json.dumps(body, indent=2) + "\n")
    report.print_table(rows, Console())
    failed = any(row.value is None and row.note.startswith("failed") for row in rows)
    return int(failed or report.exit_code(rows))


def _all_rows(device: CupyDevice, cupy: Any) -> list[Row]:
    rows = _part("kernel tests", _kernel_tests) + _part("memory checker", _sanitizer)
    with device.active():
        limits = measure_limits(cupy)
    rows += [
        Row("copy bandwidth", limits.bandwidth / 1e9, "GB/s"),
        Row("matrix rate, 16 bits", limits.matrix_rate / 1e12, "TFLOP/s"),
    ]
    rows += _part("8B-shaped", lambda: _eight_b(device, limits))
    rows += _part("SmolLM2-shaped", lambda: _host_time(device))
    return rows + _part("golden text", lambda: golden_rows(device))


def _part(name: str, run: Callable[[], list[Row]]) -> list[Row]:
    """One part's rows. What goes wrong in it is reported, and the other parts still run."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a report with a hole in it beats none
        return [Row(name, None, "", note=f"failed: {type(error).__name__}: {error}")]


def _kernel_tests() -> list[Row]:
    command = [sys.executable, "-m", "pytest", "tests/gpu/cuda", "-q", "--maxfail=20"]
    done = _run(command)
    return [
        Row("kernel tests passed on the card", _count(done, "passed"), "tests", floor=1),
        Row(
            "kernel tests failed on the card",
            _count(done, "(?:failed|errors?)"),
            "tests",
            floor=0,
            better="lower",
        ),
    ]


def _sanitizer() -> list[Row]:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [Row("memory checker", None, "errors", note="compute-sanitizer is not here")]
    small = [f"tests/gpu/cuda/test_{name}.py" for name in ("add_norm", "rope_kv", "embedding")]
    done = _run([tool, sys.executable, "-m", "pytest", "-q", *small])
    found = re.search(r"ERROR SUMMARY: (\d+) error", done)
    return [Row("memory checker", float(found[1]) if found else None, "errors", floor=0, better="lower")]


def _run(command: list[str]) -> str:
    environment = os.environ | {"ANTIPHON_KERNELS_ON": "card"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_A_PART,
        check=False,
    )
    return done.stdout + done.stderr


def _count(output: str, what: str) -> float:
    """So many as pytest's last line says, `3 failed, 40 passed, 1 error in 5.21s`."""
    summaries = [line for line in output.splitlines() if re.search(r"\bin [\d.]+s\b", line)]
    return float(sum(int(count) for count in re.findall(rf"(\d+) {what}\b", "".join(summaries[-1:]))))


def _fill(device: CupyDevice) -> Callable[[int, int], Any]:
    """Random bf16 of either sign between 1/128 and 1/64: one tile from the host, over and over."""
    bits = np.random.default_rng(2).integers(0, 1 << 16, TILE, np.uint16) & 0x807F | 120 << 7
    tile = bits.astype(np.uint16)

    def fill(rows: int, columns: int) -> Any:
        array = device.empty((rows * columns,), np.uint16)
        for begin in range(0, rows * columns, TILE):
            part = array[begin : begin + TILE]
            part.set(tile[: part.size])
        return array.reshape(rows, columns)

    return fill


def _eight_b(device: CupyDevice, limits: CardLimits) -> list[Row]:
    most = max(sequences for sequences, _ in DECODES)
    model = make_up(EIGHT_B, device, Limits(PREFILL_TOKENS, most, 8192), _fill(device), CACHE_BLOCKS)
    rates = {}
    rows = []
    for sequences, context in DECODES:
        speed = measure(model, decoding_step(sequences, context, CACHE_BLOCKS))
        rates[sequences, context] = sequences / speed.in_all
        name = f"8B-shaped decode, {sequences} at {context}"
        share = limits.seconds(speed.bytes_moved, speed.operations) / speed.on_card
        floor, aim = (0.6, 0.9) if sequences == 1 else (0.5, 0.75)
        rows.append(Row(f"{name}: share of the limit", share, "", floor, aim))
        rows.append(Row(f"{name}: rate", rates[sequences, context], "tokens/s"))
    rows += _prefill(model, limits)
    model.kernels.close()
    del model
    for (sequences, context), rate in rates.items():
        rows.append(_beside_peer(sequences, context, rate))
    return rows


def _prefill(model: Llama, limits: CardLimits) -> list[Row]:
    speed = measure(model, prefill_step(PREFILL_TOKENS, CACHE_BLOCKS), rounds=5)
    share = limits.seconds(speed.bytes_moved, speed.operations) / speed.on_card
    name = f"8B-shaped prefill of {PREFILL_TOKENS}: share of the limit"
    return [Row(name, share, "", 0.5, 0.75)]


def _beside_peer(sequences: int, context: int, rate: float) -> Row:
    name = f"8B-shaped decode, {sequences} at {context}: times transformers"
    try:
        return Row(name, rate / transformers_rate(EIGHT_B, sequences, context), "x", 1.0, 2.0)
    except ImportError as error:
        return Row(name, None, "x", note=f"not here: {error}")
    except RuntimeError as error:  # it ran out of memory where this engine did not
        return Row(name, None, "x", note=f"the peer could not: {str(error).splitlines()[0]}")


def _host_time(device: CupyDevice) -> list[Row]:
    model = make_up(SMOLLM2, device, Limits(64, 8, 2048), _fill(device), 512)
    outside = time_outside(model, 512, context=256, steps=200) * 1e6
    model.kernels.close()
    return [Row("SmolLM2-shaped decode, 1: time outside the GPU", outside, "µs", 300, 100, "lower")]


def _describe(cupy: Any) -> dict[str, Any]:
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "name": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "multiprocessors": properties["multiProcessorCount"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
