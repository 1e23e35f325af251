"""Long prompts: time to the first token against llama.cpp's server, and what those who decode beside it notice."""

from __future__ import annotations

import statistics

import numpy as np

from scripts.bench.engine_streams import NO_PEER, Ours, Peer, Stream, peer, prompt
from scripts.bench.report import Row

NAME = "prefill"
ROUNDS = 3
LONG, LONGEST, NEIGHBOURS = 1000, 4000, 8


def run() -> list[Row]:
    """Measure, interleaved; several rounds."""
    ours = Ours()
    try:
        with peer(NEIGHBOURS + 1, LONGEST + 512) as other:
            rows = [row for beside in (0, NEIGHBOURS) for row in _first_token(ours, other, beside)]
        return [*rows, _stall(ours)]
    finally:
        ours.close()


def _first_token(ours: Ours, other: Peer | None, beside: int) -> list[Row]:
    mine, theirs = [], []
    for turn in range(ROUNDS):
        mine.append(_ours(ours, beside, turn))
        if other:
            theirs.append(_theirs(other, beside, turn))
    where = f"beside {beside} decoding" if beside else "alone"
    name = f"first token of {LONG} tokens, {where}"
    rows = [Row(f"{name}, engine in process", statistics.median(mine), "s", low=min(mine), high=max(mine))]
    title = f"{name}: engine in process over llama.cpp's server"
    if not theirs:
        return [*rows, Row(title, None, "x", 0.8, 0.3, "lower", note=NO_PEER)]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    rows.append(
        Row(f"{name}, llama.cpp's server", statistics.median(theirs), "s", low=min(theirs), high=max(theirs))
    )
    return [
        *rows,
        Row(title, statistics.median(ratios), "x", 0.8, 0.3, "lower", low=min(ratios), high=max(ratios)),
    ]


def _neighbours(ours: Ours, beside: int, turn: int) -> list[Stream]:
    ours.forget()
    streams = [ours.ask(prompt(32, 100 * turn + i), 2000) for i in range(beside)]
    for _ in range(8 if beside else 0):
        ours.step()
    return streams


def _stop(ours: Ours) -> None:
    for name in list(ours.streams):
        ours.engine.cancel(name)
    ours.drain()


def _ours(ours: Ours, beside: int, turn: int) -> float:
    _neighbours(ours, beside, turn)
    stream = ours.ask(prompt(LONG, 7000 + turn), 2)
    while not stream.times:
        ours.step()
    _stop(ours)
    return stream.first


def _theirs(other: Peer, beside: int, turn: int) -> float:
    count = 200 if beside else 0
    running = [other.ask(prompt(32, 100 * turn + i), count) for i in range(beside)]
    while any(len(stream.times) < 8 for stream, _ in running):
        running[0][1].join(0.01)
    stream, reader = other.ask(prompt(LONG, 7000 + turn), 2)
    for _, each in [*running, (stream, reader)]:
        each.join()
    return stream.first


def _stall(ours: Ours) -> Row:
    """The neighbours' gaps while a prompt of 4,000 is computed, against the same without it: 99th percentiles.

    Without it means the same streams over the same steps of theirs: their contexts grow alike, and with them their gaps.
    """
    ratios = []
    for turn in range(ROUNDS):
        streams = _neighbours(ours, NEIGHBOURS, 50 + turn)
        began = streams[0].times[-1]
        long = ours.ask(prompt(LONGEST, 9000 + turn), 1)
        while not long.times:
            ours.step()
        busy = [gap for stream in streams for gap in stream.gaps(began, long.times[0])]
        _stop(ours)
        streams = _neighbours(ours, NEIGHBOURS, 50 + turn)
        began = streams[0].times[-1]
        for _ in range(len(busy) // NEIGHBOURS):
            ours.step()
        calm = [gap for stream in streams for gap in stream.gaps(began, stream.times[-1])]
        _stop(ours)
        ratios.append(float(np.percentile(busy, 99) / np.percentile(calm, 99)))
    name = f"p99 gap of {NEIGHBOURS} streams while {LONGEST} tokens are prefilled, over the same without"
    return Row(name, statistics.median(ratios), "x", 3.0, 1.5, "lower", low=min(ratios), high=max(ratios))
