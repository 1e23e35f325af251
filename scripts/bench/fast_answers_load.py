"""Processes and load for `antiphon bench fast-answers`: a replica on one core, who asks on another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio
from attrs import frozen

from actors.protocol import Declined, Hit, LookedUp, Lookup, LookupMany
from scripts.bench.fast_answers_replica import CLIENT, living, names
from scripts.bench.fast_answers_traffic import MadeUpRows
from store.answer import unpack_answer
from store.catalog_build import CatalogBuilder
from store.decision import EVEN, SCHEMA, Logistic
from store.release import CATALOG, OpenRelease, ReleaseError, open_release, read_pointer
from store.release_publish import build, publish
from supervision.actor import Actor
from supervision.context import ActorContext

BATCH, IN_FLIGHT = 256, 2
"""Lookups a message and messages in flight: as many as a frame of a busy mailbox carries, one on its way there
and one on its way back."""
MODEL = Logistic(
    SCHEMA,
    "bench",
    ("historical_uplift", "log_query_frequency", "answer_age_days", "log_feedback_volume", "request_words"),
    (1.0, 0.1, -0.0001, 0.01, -0.01),
    1.0,
)


@frozen
class Asked:
    """One round: lookups a second, and the 99th percentile of the time a message took, in ms."""

    rate: float
    p99: float


def make_release(base: Path, version: str, source: MadeUpRows) -> int:
    """Build and publish a release under `base`; return the bytes of its catalog."""
    made = base / f"made-{version}"
    made.mkdir()
    report = CatalogBuilder(source).build(made / CATALOG)
    build(made / version, version, made / CATALOG, MODEL, EVEN)
    (made / CATALOG).unlink()
    publish(base / "releases", made / version)
    (made / version / CATALOG).unlink()
    return report.size


def opened(base: Path) -> OpenRelease:
    """Open the active release in this process."""
    pointer = read_pointer(base / "releases")
    if pointer is None:
        raise ReleaseError("no release is active")
    return open_release(base / "releases", pointer.active)


def cores() -> tuple[int, int]:
    """Return the core that serves and the core that asks; the same where there is one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


@contextmanager
def asking_core() -> Iterator[None]:
    """Ask from the second core for as long as the block lasts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores()[1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def process(*command: str, ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run a process on the serving core until the block ends. One that says `ready` is waited for."""
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(running.pid, {cores()[0]})
        if ready and (running.stdout is None or running.stdout.readline().strip() != "ready"):
            raise RuntimeError(f"{' '.join(command)} ended before it was ready")
        yield running
    finally:
        running.kill()
        running.communicate()


@contextmanager
def replica(
    base: Path, number: int = 0, *, follow: float = 0.25, logs: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a replica; one that `logs` its decisions does what none of those compared with does."""
    module = "scripts.bench.fast_answers_replica"
    feedback = str(base / "feedback") if logs else ""
    where = (str(base), str(base / "releases"), str(follow), feedback)
    with process(sys.executable, "-m", module, names()[number], *where) as running:
        yield running


def in_batches(texts: Sequence[str]) -> list[LookupMany]:
    """Return messages of `BATCH` lookups."""
    parts = [tuple(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    return [LookupMany(tuple(map(str, range(len(part)))), ("acme",) * len(part), part) for part in parts]


def one_by_one(texts: Sequence[str]) -> list[Lookup]:
    """Return messages of one lookup."""
    return [Lookup(str(number), "acme", text, is_probe=False) for number, text in enumerate(texts)]


def ask_all(base: Path, messages: Sequence[LookupMany | Lookup], in_flight: int, number: int = 0) -> Asked:
    """Ask a replica everything, so many messages at a time, after a warm-up of a twentieth."""
    return trio.run(_ask_all, base, messages, in_flight, names()[number])


async def _ask_all(base: Path, messages: Sequence[LookupMany | Lookup], in_flight: int, name: str) -> Asked:
    async with living(Actor(), CLIENT, base) as context:
        await _asked(context, name, messages[: max(1, len(messages) // 20)], in_flight)
        begun = time.perf_counter()
        times = await _asked(context, name, messages, in_flight)
        seconds = time.perf_counter() - begun
    lookups = sum(len(m.texts) if isinstance(m, LookupMany) else 1 for m in messages)
    return Asked(lookups / seconds, sorted(times)[len(times) * 99 // 100] * 1000)


def _read(reply: object) -> list[str]:
    """Unpack the answers, as a session does."""
    if isinstance(reply, LookedUp):
        return [unpack_answer(packed) for packed in reply.packed if packed]
    if isinstance(reply, Hit | Declined):
        return [reply.answer] if isinstance(reply, Hit) else []
    raise TypeError(f"a lookup was answered with {reply!r}")


async def _asked(
    context: ActorContext, name: str, messages: Sequence[LookupMany | Lookup], in_flight: int
) -> list[float]:
    times: list[float] = []
    left = iter(messages)

    async def asker() -> None:
        for message in left:
            begun = time.perf_counter()
            reply = await context.ask(name, message, timeout=10, owner="acme")
            times.append(time.perf_counter() - begun)
            _read(reply)

    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(asker)
    return times
