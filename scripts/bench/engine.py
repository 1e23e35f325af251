"""Decoding against llama.cpp's server: total tokens a second at 1, 4, 16 and 32 streams.

Same file, same threads, same prompts; the two take turns within a run. Ours is the engine in process, the peer
answers over HTTP on the loopback: the whole of `antiphon serve` is not in these figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from gpu.memory import copy_bandwidth
from gpu.sequence import StepStats
from scripts.bench.engine_streams import NO_PEER, Ours, Peer, peer, prompt, together
from scripts.bench.report import Row

NAME = "engine"
ROUNDS = 3
PROMPT = 16
TARGETS = {1: (1.0, 1.5), 4: (1.3, 2.5), 16: (3.0, 6.0), 32: (4.0, 8.0)}
"""Streams → floor and aim of our rate over the peer's."""
TOKENS = {1: 96, 4: 96, 16: 96, 32: 128}
"""Of each reply: long enough that all streams run together for most of it."""


def run() -> list[Row]:
    """Measure, interleaved; several rounds."""
    ours = Ours(max_batch=32)
    try:
        with peer(max(TARGETS), 1024) as other:
            rates = {streams: _rounds(ours, other, streams) for streams in TARGETS}
        return [row for streams in TARGETS for row in _rows(streams, *rates[streams])] + _own_rows(ours)
    finally:
        ours.close()


def _rounds(ours: Ours, other: Peer | None, streams: int) -> tuple[list[float], list[float]]:
    mine, theirs = [], []
    for turn in range(ROUNDS + 1):
        prompts = [prompt(PROMPT, 1000 * turn + i) for i in range(streams)]
        mine.append(_ours(ours, prompts, TOKENS[streams]))
        if other:
            theirs.append(_theirs(other, prompts, TOKENS[streams]))
    # The first turn warms both up.
    return mine[1:], theirs[1:]


def _ours(ours: Ours, prompts: Sequence[tuple[int, ...]], count: int) -> float:
    ours.forget()
    streams = [ours.ask(tokens, count) for tokens in prompts]
    ours.drain()
    return together(streams)


def _theirs(other: Peer, prompts: Sequence[tuple[int, ...]], count: int) -> float:
    running = [other.ask(tokens, count) for tokens in prompts]
    for _, reader in running:
        reader.join()
    return together([stream for stream, _ in running])


def _rows(streams: int, mine: list[float], theirs: list[float]) -> list[Row]:
    floor, aim = TARGETS[streams]
    name = f"decode, {streams} streams: engine in process over llama.cpp's server"
    rows = [
        Row(
            f"decode, {streams} streams, engine in process",
            statistics.median(mine),
            "tok/s",
            low=min(mine),
            high=max(mine),
        )
    ]
    if not theirs:
        return [*rows, Row(name, None, "x", floor, aim, note=NO_PEER)]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    rows.append(
        Row(
            f"decode, {streams} streams, llama.cpp's server",
            statistics.median(theirs),
            "tok/s",
            low=min(theirs),
            high=max(theirs),
        )
    )
    rows.append(Row(name, statistics.median(ratios), "x", floor, aim, low=min(ratios), high=max(ratios)))
    return rows


def _own_rows(ours: Ours) -> list[Row]:
    full = [s for s in ours.stats if s.batch == 16 and not s.prefilled]
    alone = [s for s in ours.stats if s.batch == 1 and not s.prefilled]
    reached = statistics.median(s.bytes_moved / s.forward_seconds for s in alone)
    copied = copy_bandwidth()
    return [
        Row("share of a step that is Python, 16 streams", 100 * _python_share(full), "%", 15, 5, "lower"),
        Row("bytes moved by one stream's steps", reached / 1e9, "GB/s"),
        Row("the machine's copy bandwidth, read and written", copied / 1e9, "GB/s"),
    ]


def _python_share(steps: Sequence[StepStats]) -> float:
    shares = [s.python_seconds / (s.python_seconds + s.forward_seconds + s.sampling_seconds) for s in steps]
    return float(np.median(shares))
