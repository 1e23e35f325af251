"""Fast answers: lookups a second of one replica, against Redis and gRPC; memory; swaps under load; HTTP.

One replica is pinned to one core, who asks to another. `ANTIPHON_BENCH_ENTRIES` sets the catalog's size
(200,000); `ANTIPHON_BENCH_LARGE=1` adds the rows with ten times as many, which take minutes to build.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trio

from actors.protocol import Hit, Lookup, Metrics, ReadMetrics
from scripts.bench import fast_answers_http
from scripts.bench import fast_answers_peers as peers
from scripts.bench.fast_answers_load import (
    BATCH,
    IN_FLIGHT,
    ask_all,
    asking_core,
    in_batches,
    make_release,
    one_by_one,
    opened,
    process,
    replica,
)
from scripts.bench.fast_answers_replica import CLIENT, REPLICAS, living, names
from scripts.bench.fast_answers_traffic import MadeUpRows, question, traffic
from scripts.bench.report import Row
from store.normalise import key_of
from store.release_publish import activate, rollback
from supervision.actor import Actor
from supervision.context import ActorContext
from supervision.errors import AskFailed

NAME = "fast-answers"
ROUNDS = 5
LOOKUPS, SLOW_LOOKUPS = 40_000, 6_000
"""A round's, of contenders with many lookups a message and with one."""
SWAPS = 1_000
AT_ONCE = 128
"""Lookups in flight where a message has one: 30,000 a second, each 4 ms."""
LIMIT = 0.2
"""Seconds a turn waits for a lookup."""
LOGGING = 1
"""The replica that logs its decisions."""


def run() -> list[Row]:
    """Run everything. Contenders take turns within each round."""
    entries = int(os.environ.get("ANTIPHON_BENCH_ENTRIES", "200000"))
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as directory:
        base = Path(directory)
        rows = [_build(base, entries)]
        rows += _compare(base, entries)
        rows += _memory(base, entries)
        rows += _large(base, entries)
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as directory:
        rows += _swaps(Path(directory))
    return rows + fast_answers_http.rows()


def _build(base: Path, entries: int) -> Row:
    begun = time.perf_counter()
    size = make_release(base, "v1", MadeUpRows(entries))
    seconds = time.perf_counter() - begun
    activate(base / "releases", "v1")
    note = f"{entries:,} entries, {size / 2**20:,.0f} MiB"
    return Row("build and publish a release", seconds, "s", better="lower", note=note)


def _compare(base: Path, entries: int) -> list[Row]:
    texts = traffic(entries, LOOKUPS, seed=1)
    measured: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.enter_context(replica(base))
        stack.enter_context(replica(base, LOGGING, logs=True))
        contenders = _contenders(stack, base, texts)
        stack.enter_context(asking_core())
        for _ in range(ROUNDS):
            for contend in contenders:
                for name, value in contend().items():
                    measured.setdefault(name, []).append(value)
    return _compared(measured)


def _contenders(stack: ExitStack, base: Path, texts: list[str]) -> list[Callable[[], dict[str, float]]]:
    """Start the peers that are here; return a function for each contender's round."""
    many, few = in_batches(texts), one_by_one(texts[:SLOW_LOOKUPS])

    def ours() -> dict[str, float]:
        batched, single = ask_all(base, many, IN_FLIGHT), ask_all(base, few, AT_ONCE)
        logged = ask_all(base, many, IN_FLIGHT, LOGGING)
        return {
            "logged": logged.rate,
            "batched": batched.rate,
            "batched p99": batched.p99,
            "single": single.rate,
            "single p99": single.p99,
        }

    found = [ours]
    if not peers.redis_is_here():
        release = opened(base)
        stack.callback(release.close)
        stack.enter_context(process(*peers.redis_command(base), ready=False))
        peers.fill_redis(base, release)
        found.append(lambda: {"redis": peers.redis_rate(base, release, texts, BATCH, IN_FLIGHT)})
    if not peers.grpc_is_here():
        module = "scripts.bench.fast_answers_peers"
        stack.enter_context(process(sys.executable, "-m", module, str(base), str(base / "releases")))
        found.append(lambda: {"grpc": peers.grpc_rate(base, texts[:SLOW_LOOKUPS], 1, AT_ONCE)})
        found.append(lambda: {"grpc batched": peers.grpc_rate(base, texts, BATCH, IN_FLIGHT)})
    return found


def _compared(measured: dict[str, list[float]]) -> list[Row]:
    ours, single = measured["batched"], measured["single"]
    batches, singles = f"{BATCH} lookups a message, {IN_FLIGHT} in flight", f"{AT_ONCE} in flight"
    return [
        _row("lookups of one replica", ours, "1/s", 30_000, 100_000, note=batches),
        _row("p99 of a message", measured["batched p99"], "ms", 10, better="lower"),
        _row("lookups, decisions logged", measured["logged"], "1/s", 30_000, 100_000, note=batches),
        _row("lookups, one a message", single, "1/s", note=f"{singles}; frames coalesce"),
        _row("p99 of a message with one", measured["single p99"], "ms", 10, better="lower"),
        _times("redis", ours, measured, 2.0, peers.redis_is_here(), batches),
        _times("grpc", ours, measured, 5.0, peers.grpc_is_here(), f"gRPC: {singles}, one a call"),
        _times("grpc batched", ours, measured, None, peers.grpc_is_here(), batches),
    ]


def _times(
    peer: str,
    ours: list[float],
    measured: dict[str, list[float]],
    floor: float | None,
    missing: str,
    how: str,
) -> Row:
    if missing:
        return Row(f"times {peer}", None, "x", floor, note=missing)
    theirs = measured[peer]
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return _row(f"times {peer}", ratios, "x", floor, note=f"{statistics.median(theirs):,.0f}/s; {how}")


def _row(
    name: str,
    values: Sequence[float],
    unit: str,
    floor: float | None = None,
    aim: float | None = None,
    better: Any = "higher",
    note: str = "",
) -> Row:
    return Row(name, statistics.median(values), unit, floor, aim, better, min(values), max(values), note)


def _memory(base: Path, entries: int) -> list[Row]:
    """Private and proportional memory of four replicas after the same traffic each."""
    messages = in_batches(traffic(entries, LOOKUPS, seed=2))
    with ExitStack() as stack:
        running = [stack.enter_context(replica(base, number, logs=True)) for number in range(REPLICAS)]
        for number in range(REPLICAS):
            ask_all(base, messages, IN_FLIGHT, number)
        sizes = [_smaps(each.pid) for each in running]
    private = [size["Private_Clean"] + size["Private_Dirty"] for size in sizes]
    return [
        _row("private memory of a replica", private, "MiB", 60, better="lower", note=f"{REPLICAS} replicas"),
        _row("PSS of a replica", [size["Pss"] for size in sizes], "MiB", better="lower"),
    ]


def _smaps(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}


def _swaps(base: Path) -> list[Row]:
    """Activate and roll back under load. Every answer begins with the version it was made for."""
    for version in ("v1", "v2"):
        make_release(base, version, MadeUpRows(2_000, mark=version))
    activate(base / "releases", "v1")
    with replica(base, follow=0.005):
        errors, mixed, asked, late, taken = trio.run(_swap_under_load, base)
    note = f"{asked:,} lookups meanwhile, {late:,} past 200 ms; the replica took up {taken:,} changes"
    return [
        Row(
            "errors during swaps",
            errors,
            "",
            0,
            better="lower",
            note=f"{SWAPS:,} swaps and rollbacks; {note}",
        ),
        Row("answers of another release", mixed, "", 0, better="lower"),
    ]


async def _swap_under_load(base: Path) -> tuple[int, int, int, int, int]:
    errors, mixed, asked, late = 0, 0, 0, 0

    async def load(context: ActorContext) -> None:
        nonlocal errors, mixed, asked, late
        while True:
            asked += 1
            begun = trio.current_time()
            try:
                reply = await context.ask(
                    names()[0], Lookup("r", "acme", question(asked % 2_000), is_probe=False), timeout=5
                )
            except AskFailed:
                errors += 1
                continue
            late += trio.current_time() - begun > LIMIT
            errors += not isinstance(reply, Hit)
            mixed += isinstance(reply, Hit) and not reply.answer.startswith(reply.release)

    def swap(number: int) -> None:
        if number % 2:
            rollback(base / "releases")
        else:
            activate(base / "releases", "v2")

    async with living(Actor(), CLIENT, base) as context:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, context)
            for number in range(SWAPS):
                await trio.to_thread.run_sync(swap, number)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        return errors, mixed, asked, late, await _changes(context)


async def _changes(context: ActorContext) -> int:
    metrics: Metrics = await context.ask(names()[0], ReadMetrics(), timeout=5)
    return next(int(line.split()[-1]) for line in metrics.lines if "_swaps_total{" in line)


def _large(base: Path, entries: int) -> list[Row]:
    """Ten times the entries: how long they take to open, and to be found."""
    if not os.environ.get("ANTIPHON_BENCH_LARGE"):
        note = "not run: minutes of building; ANTIPHON_BENCH_LARGE=1 runs it"
        return [
            Row("open ten times the entries", None, "s", 1, better="lower", note=note),
            Row("time of a lookup in them", None, "x", 2, better="lower", note=note),
        ]
    small = _lookup_time(base, entries)
    make_release(base, "large", MadeUpRows(10 * entries))
    activate(base / "releases", "large")
    begun = time.perf_counter()
    opened(base).close()
    seconds = time.perf_counter() - begun
    note = f"{10 * entries:,} entries"
    return [
        Row("open ten times the entries", seconds, "s", 1, better="lower", note=note),
        Row(
            "time of a lookup in them",
            _lookup_time(base, 10 * entries) / small,
            "x",
            2,
            better="lower",
            note=note,
        ),
    ]


def _lookup_time(base: Path, entries: int) -> float:
    """Seconds to find an entry of the traffic in the active release, in this process, pages being there."""
    keys = [key for text in traffic(entries, LOOKUPS, seed=3) if (key := key_of(text))]
    release = opened(base)
    for key in keys:
        release.catalog.find(key)
    begun = time.perf_counter()
    for key in keys:
        release.catalog.find(key)
    seconds = time.perf_counter() - begun
    release.close()
    return seconds / len(keys)
