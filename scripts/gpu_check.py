"""`scripts/gpu_check`: the kernels on a card against their references, and their speed against its limits."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from rich.console import Console

from gpu.cache import cache_directory
from gpu.errors import EngineError
from gpu.kernels.cuda import Limits
from gpu.kernels.cuda_device import CupyDevice
from gpu.llama import Llama
from scripts.bench import report
from scripts.bench.report import Row
from scripts.gpu_golden import golden_rows
from scripts.gpu_invariance import made_up_rows
from scripts.gpu_limits import Limits as CardLimits
from scripts.gpu_limits import measure_bandwidth, measure_matrix_rate
from scripts.gpu_peers import TransformersPeer, most_sequences
from scripts.gpu_speed import (
    EIGHT_B,
    SMOLLM2,
    Speed,
    decoding_step,
    make_up,
    measure,
    prefill_step,
    time_outside,
)

ROOT = Path(__file__).parents[1]
Case = tuple[int, int]
"""Sequences at once, and how long each is."""
DECODES: tuple[Case, ...] = (
    *((1, 512), (1, 8192), (8, 512), (8, 4096)),
    *((64, 512), (64, 2048), (256, 512), (256, 2048)),
)
PREFILL_TOKENS = 4096
CACHE_BLOCKS = 16384
TILE = 1 << 25
SECONDS = 350
"""For everything. Of it 100 at most for the kernel tests and 100 for the memory checker, which are stopped then; about
20 for the limits and the two small models' histories, 40 for the large shape, and what is left for the peer, who comes
last and is left out where it would not be."""
SECONDS_A_PART = 100
SECONDS_A_CASE = 5
"""Of ours at most: a case is not begun with less left."""
SECONDS_A_PEER = 20
"""To make the peer's model, or to run one case of it."""


@frozen
class Clock:
    """What is left of `seconds`."""

    seconds: float = SECONDS
    began: float = field(factory=time.monotonic)

    def left(self) -> float:
        """In seconds; below 0 when they are over."""
        return self.began + self.seconds - time.monotonic()


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
    gpu = _describe(cupy)
    rows: list[Row] = []
    for part in _parts(device, cupy, Clock()):
        rows += part
        # After every part: what ends this process costs the rest of the report, and no more.
        _write(options.json, rows, gpu | {"finished": False})
        _give_back(device)
    _write(options.json, rows, gpu | {"finished": True})
    report.print_table(rows, Console())
    failed = any(row.value is None and row.note.startswith("failed") for row in rows)
    return int(failed or report.exit_code(rows))


def _write(path: Path, rows: list[Row], gpu: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(report.as_json(rows)) | {"gpu": gpu}, indent=2) + "\n")


def _give_back(device: CupyDevice) -> None:
    """What a part left, a failed one too, goes back to the card: PyTorch cannot use what CuPy keeps, nor CuPy the other's."""
    gc.collect()
    device.close()
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # from a card that failed
            torch.cuda.empty_cache()


def _parts(device: CupyDevice, cupy: Any, clock: Clock) -> Iterator[list[Row]]:
    """One list of rows after the other. What is ours comes before the peer, who takes most of the card."""
    compared = _comparisons(device.memory()[1])
    yield _part("kernel tests", _kernel_tests)
    yield _part("memory checker", _sanitizer)
    bandwidth = _limit(device, "copy bandwidth", "GB/s", 1e9, lambda: measure_bandwidth(cupy))
    yield [bandwidth]
    matrix_rate = _limit(device, "matrix rate, 16 bits", "TFLOP/s", 1e12, lambda: measure_matrix_rate(cupy))
    yield [matrix_rate]
    limits = CardLimits(_times(bandwidth.value, 1e9), _times(matrix_rate.value, 1e12))
    yield _part("made-up model", lambda: made_up_rows(device))
    yield _part("golden text", lambda: golden_rows(device))
    yield _part("SmolLM2-shaped", lambda: _host_time(device))
    rates: dict[Case, float] = {}
    yield _part("8B-shaped", lambda: _eight_b(device, limits, compared, rates, clock))
    yield _part("transformers", lambda: _beside_peer(compared, rates, clock))


def _part(name: str, run: Callable[[], list[Row]]) -> list[Row]:
    """One part's rows. What goes wrong in it is reported, and the other parts still run."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a report with a hole in it beats none
        return [Row(name, None, "", note=f"failed: {_said(error)}")]


def _said(error: Exception) -> str:
    """Its kind and first line: CuPy and PyTorch write pages."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _limit(device: CupyDevice, name: str, unit: str, each: float, run: Callable[[], float]) -> Row:
    def measured() -> list[Row]:
        with device.active():
            return [Row(name, run() / each, unit)]

    return _part(name, measured)[0]


def _times(value: float | None, each: float) -> float | None:
    return None if value is None else value * each


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
    """Errors found while tests ran and passed. With none that passed, or one that failed, nothing was checked."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [Row("memory checker", None, "errors", note="compute-sanitizer is not here")]
    small = [f"tests/gpu/cuda/test_{name}.py" for name in ("add_norm", "rope_kv", "embedding")]
    done = _run([tool, sys.executable, "-m", "pytest", "-q", *small])
    found = re.findall(r"ERROR SUMMARY: (\d+) error", done)
    passed, failed = _count(done, "passed"), _count(done, "(?:failed|errors?)")
    errors = float(sum(map(int, found)))
    if errors or (found and passed >= 1 and failed == 0):
        return [Row("memory checker", errors, "errors", floor=0, better="lower")]
    why = f"{passed:.0f} tests passed and {failed:.0f} failed under it" if found else "it gave no summary"
    last = next((line for line in reversed(done.splitlines()) if line.strip()), "it said nothing")
    return [Row("memory checker", None, "errors", note=f"failed: {why}: {last.strip()}")]


def _run(command: list[str]) -> str:
    """What it wrote. After `SECONDS_A_PART` it is killed, with all that it started, and `TimeoutExpired` raised."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"ANTIPHON_KERNELS_ON": "card"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            return running.communicate(timeout=SECONDS_A_PART)[0]
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # the checker's own child holds the card, and the pipe
            raise


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


def _comparisons(memory: int) -> dict[Case, Case]:
    """Case to hold against the peer → the case it stands for. They differ where the peer needs more than the card has."""
    compared: dict[Case, Case] = {}
    for sequences, context in DECODES:
        fewer = most_sequences(EIGHT_B, sequences, context, int(0.95 * memory))
        if fewer:
            compared.setdefault((fewer, context), (sequences, context))
    return compared


def _eight_b(
    device: CupyDevice,
    limits: CardLimits,
    compared: dict[Case, Case],
    rates: dict[Case, float],
    clock: Clock,
) -> list[Row]:
    """Our figures, also of the cases that are only there to be compared; `rates` takes tokens a second."""
    most = max(sequences for sequences, _ in DECODES)
    model = make_up(EIGHT_B, device, Limits(PREFILL_TOKENS, most, 8192), _fill(device), CACHE_BLOCKS)
    rows: list[Row] = []
    try:
        for case in dict.fromkeys((*DECODES, *compared)):
            rows += _in_time(_name(case), clock, partial(_decode, model, case, limits, rates))
        rows += _in_time("8B-shaped prefill", clock, partial(_prefill, model, limits))
    finally:
        model.kernels.close()
    return rows


def _in_time(name: str, clock: Clock, run: Callable[[], list[Row]]) -> list[Row]:
    if clock.left() < SECONDS_A_CASE:
        return [Row(name, None, "", note="failed: the time was up")]
    return _part(name, run)


def _name(case: Case) -> str:
    return f"8B-shaped decode, {case[0]} at {case[1]}"


def _decode(model: Llama, case: Case, limits: CardLimits, rates: dict[Case, float]) -> list[Row]:
    sequences, context = case
    speed = measure(model, decoding_step(sequences, context, CACHE_BLOCKS))
    rates[case] = sequences / speed.in_all
    floor, aim = (0.6, 0.9) if sequences == 1 else (0.5, 0.75)
    return [
        _share(_name(case), limits, speed, floor, aim),
        Row(f"{_name(case)}: steps without a scheduler", rates[case], "tokens/s"),
    ]


def _share(name: str, limits: CardLimits, speed: Speed, floor: float, aim: float) -> Row:
    least = limits.seconds(speed.bytes_moved, speed.operations)
    if least is None:
        return Row(f"{name}: share of the limit", None, "", floor, aim, note="left out: a limit is missing")
    return Row(f"{name}: share of the limit", least / speed.on_card, "", floor, aim)


def _prefill(model: Llama, limits: CardLimits) -> list[Row]:
    speed = measure(model, prefill_step(PREFILL_TOKENS, CACHE_BLOCKS), rounds=5)
    return [_share(f"8B-shaped prefill of {PREFILL_TOKENS}", limits, speed, 0.5, 0.75)]


def _beside_peer(compared: dict[Case, Case], rates: dict[Case, float], clock: Clock) -> list[Row]:
    """Rates of steps over rates of forward passes: neither side has a scheduler in it."""
    if not rates:
        return [Row("transformers", None, "x", note="left out: there is no rate of ours to compare")]
    if clock.left() < SECONDS_A_PEER:
        return [Row("transformers", None, "x", note="left out: the time was up")]
    rows = [
        Row(_peer_name(case), None, "x", note="left out: the card cannot hold the peer with so many")
        for case in DECODES
        if case not in compared.values()
    ]
    cases = sorted(compared.keys() & rates.keys())
    if not cases:
        return rows
    try:
        peer = TransformersPeer(EIGHT_B)
    except ImportError as error:
        return [Row("transformers", None, "x", note=f"not here: {error}")]
    try:
        return rows + [_times_peer(peer, case, compared[case], rates[case], clock) for case in cases]
    finally:
        peer.close()


def _peer_name(case: Case) -> str:
    return f"{_name(case)}: steps, times transformers' forward"


def _times_peer(peer: TransformersPeer, case: Case, wanted: Case, rate: float, clock: Clock) -> Row:
    name = _peer_name(case)
    note = "" if case == wanted else f"the card cannot hold the peer with {wanted[0]} at {wanted[1]}"
    if clock.left() < SECONDS_A_PEER:
        return Row(name, None, "x", note="left out: the time was up")
    try:
        return Row(name, rate / peer.rate(*case), "x", 1.0, 2.0, note=note)
    except RuntimeError as error:  # it ran out of memory where this engine did not
        return Row(name, None, "x", note=f"the peer could not: {_said(error)}")
    except Exception as error:  # noqa: BLE001 - as in `_part`
        return Row(name, None, "x", note=f"failed: {_said(error)}")


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
