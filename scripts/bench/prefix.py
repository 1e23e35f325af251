"""The prefix cache: what a second request with the same 1,000 tokens waits, and that no other owner gains."""

from __future__ import annotations

import statistics

from scripts.bench.engine_streams import Ours, prompt
from scripts.bench.report import Row

NAME = "prefix"
ROUNDS = 5
LENGTH = 1000


def run() -> list[Row]:
    """First, second and another owner's request, in turn; several rounds."""
    ours = Ours()
    again, others, leaked = [], [], 0
    try:
        for turn in range(ROUNDS):
            ours.forget()
            tokens = prompt(LENGTH, turn)
            first = _first(ours, tokens, "ann")[0]
            again.append(100 * _first(ours, tokens, "ann")[0] / first)
            seconds, cached = _first(ours, tokens, "bob")
            others.append(100 * seconds / first)
            leaked = max(leaked, cached)
    finally:
        ours.close()
    mine = f"second request with the same {LENGTH} tokens: first token, of the first's time"
    return [
        Row(mine, statistics.median(again), "%", 10, 10, "lower", low=min(again), high=max(again)),
        Row(
            "the same from another owner",
            statistics.median(others),
            "%",
            50,
            90,
            low=min(others),
            high=max(others),
        ),
        Row("cached tokens of another owner", float(leaked), "tokens", 0, 0, "lower"),
    ]


def _first(ours: Ours, tokens: tuple[int, ...], owner: str) -> tuple[float, int]:
    stream = ours.ask(tokens, 1, owner)
    ours.drain()
    return stream.first, stream.cached
