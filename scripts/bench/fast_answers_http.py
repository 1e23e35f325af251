"""Fast answers end to end: the real tree and the real model over HTTP, one client, one request at a time.

Times run from sending the request to the first text of the reply at the client. Kinds of request take turns,
so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from scripts import credentials
from scripts.bench.real_tree import PATIENCE, real_tree, until
from scripts.bench.report import Row
from scripts.model import DEFAULT, models_directory
from supervision.status import read_status

COMMON, RARE = "What is Antiphon?", "Why do lighthouses turn?"
"""A question that the example catalog answers, and one that it does not."""
PAIRS = 60
STOPS = 3
"""How often every replica is stopped."""
AFTER_A_STOP = 20
"""Requests of each kind while they are stopped, beyond the first."""
FEW, ENOUGH = 4, 128
"""Tokens: to see a reply begin, and to have room for the catalog's answer."""
LIMIT_MS, HIT_MS, MISS_MS = 200.0, 10.0, 2.0


@frozen
class Figures:
    """Milliseconds to the first text, by kind of request."""

    hits: list[float]
    model: list[float]
    misses: list[float]
    off: list[float]
    first_stopped: list[float]
    later_stopped: list[float]
    later_off: list[float]


def rows() -> list[Row]:
    """Measure everything on one tree."""
    if not (models_directory() / DEFAULT.file_name).exists():
        note = "not run: the default model is not here (antiphon model fetch)"
        return [Row("first text of a hit over HTTP", None, "ms", HIT_MS, better="lower", note=note)]
    with (
        tempfile.TemporaryDirectory(prefix="antiphon-bench-") as directory,
        real_tree(Path(directory)) as state,
    ):
        return _report(_measure(state))


def _measure(state: Path) -> Figures:
    door = Door(state)
    until(lambda: door.first_text(COMMON).entry != "", "the catalog answers")
    for _ in range(3):
        door.first_text(RARE, fast_answers="off")
    hits, model = _taking_turns(
        PAIRS, lambda: door.ms(COMMON, hit=True), lambda: door.ms(COMMON, fast_answers="off")
    )
    misses, off = _taking_turns(PAIRS, lambda: door.ms(RARE), lambda: door.ms(RARE, fast_answers="off"))
    first, later, later_off = [], [], []
    for _ in range(STOPS):
        with _stopped(state):
            first.append(door.ms(RARE))
            with_it, without = _taking_turns(
                AFTER_A_STOP, lambda: door.ms(RARE), lambda: door.ms(RARE, fast_answers="off")
            )
        later += with_it
        later_off += without
        until(lambda: door.first_text(COMMON).entry != "", "the catalog answers again")
    return Figures(hits, model, misses, off, first, later, later_off)


def _report(found: Figures) -> list[Row]:
    off = statistics.median(found.off)
    stopped = [ms - off for ms in found.first_stopped]
    return [
        _row("first text of a hit over HTTP", found.hits, HIT_MS, f"{PAIRS} requests, one at a time"),
        _row("first text of the model, same question", found.model, None, "fast answers off, prompt cached"),
        _added("added to the model's first text by a miss", found.misses, found.off, MISS_MS),
        _row("first text after a miss", found.misses, None, f"{off:.1f} ms with fast answers off"),
        _row(
            "added by replicas that are stopped, first request",
            stopped,
            LIMIT_MS,
            f"SIGSTOP, {STOPS} times; one replica: each costs one request",
        ),
        _added("added by them after that", found.later_stopped, found.later_off, MISS_MS),
    ]


def _row(name: str, values: Sequence[float], floor: float | None, note: str) -> Row:
    return Row(
        name, statistics.median(values), "ms", floor, None, "lower", min(values), max(values), f"p50; {note}"
    )


def _added(name: str, with_it: Sequence[float], without: Sequence[float], floor: float) -> Row:
    """The median of what each request took more than the one beside it; the quartiles as its spread."""
    added = [mine - other for mine, other in zip(with_it, without, strict=True)]
    low, median, high = statistics.quantiles(added, n=4)
    note = f"p50 of {len(added)} pairs, spread is the quartiles"
    return Row(name, median, "ms", floor, None, "lower", low, high, note)


def _taking_turns(
    count: int, one: Callable[[], float], other: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Do both `count` times, in pairs whose order alternates."""
    ones, others = [], []
    for number in range(count):
        if number % 2:
            ones.append(one())
            others.append(other())
        else:
            others.append(other())
            ones.append(one())
    return ones, others


@frozen
class FirstText:
    """When a reply began, and which entry of the catalog it is ("" for the model's)."""

    ms: float
    entry: str


class Door:
    """One kept-alive connection to the tree."""

    def __init__(self, state: Path) -> None:
        found = credentials.read(state)
        host = found.base_url.removeprefix("http://").removesuffix("/v1")
        self._connection = http.client.HTTPConnection(host, timeout=PATIENCE)
        self._headers = {"authorization": f"Bearer {found.api_key}", "content-type": "application/json"}

    def ms(self, question: str, *, hit: bool = False, **fields: Any) -> float:
        """Return the milliseconds to the first text. Raises when a hit is wanted and none comes."""
        found = self.first_text(question, **fields)
        if hit and not found.entry:
            raise RuntimeError(f"no fast answer came to {question!r}")
        return found.ms

    def first_text(self, question: str, **fields: Any) -> FirstText:
        """Ask for a stream, and read it to its end: the next request finds a quiet server."""
        is_model = "fast_answers" in fields or question == RARE
        limit = FEW if is_model else ENOUGH
        messages = [{"role": "user", "content": question}]
        wanted = {"model": "default", "stream": True, "messages": messages, "max_completion_tokens": limit}
        body = json.dumps({**wanted, **fields})
        begun = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, self._headers)
        reply = self._connection.getresponse()
        if reply.status != http.client.OK:
            raise RuntimeError(f"{reply.status}: {reply.read().decode()}")
        seconds = 0.0
        while line := reply.readline():
            if not seconds and _shows_something(line):
                seconds = time.perf_counter() - begun
        return FirstText(seconds * 1000, reply.headers.get("x-antiphon-fast-answer", ""))


def _shows_something(line: bytes) -> bool:
    """Whether a line of the stream has text, or the end of a reply that has none."""
    if not line.startswith(b"data: {"):
        return False
    (choice,) = json.loads(line[6:])["choices"]
    return bool(choice["delta"].get("content")) or choice["finish_reason"] is not None


@contextmanager
def _stopped(state: Path) -> Iterator[None]:
    """Stop every replica with SIGSTOP. The supervisor may kill and replace one before the block ends."""
    pids = [actor.pid for actor in read_status(state) if actor.name.startswith("fast_answer.")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # the supervisor found it stuck and replaced it
