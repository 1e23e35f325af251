"""The whole of `antiphon serve` against llama.cpp's server: total tokens a second at 1, 4, 16 and 32 chats.

Both are asked over their chat completions, streamed, by the same client with the same messages and the same
file; the two take turns within a run. The clock runs from the first request to the last token, so that prefill,
safety, journal and books are in our figure, and the peer's prefill in its own.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import frozen

from scripts import credentials
from scripts.bench.engine import TOKENS
from scripts.bench.engine_streams import NO_PEER, peer
from scripts.bench.real_tree import PATIENCE, real_tree
from scripts.bench.report import Row

NAME = "serve"
TARGETS = {1: (1.0, 1.3), 4: (1.0, 2.5), 16: (1.0, 4.0), 32: (1.0, 4.0)}
"""Chats → floor and aim of our rate over the peer's: keeping every word must not cost the peer's speed."""
ROUNDS = 3
WORDS = 12
"""Of a question, drawn anew for each: no two share a prefix beyond the template's."""
VOCABULARY = (
    *("river", "stone", "engine", "garden", "letter", "winter", "silver", "market", "bridge", "candle"),
    *("forest", "mirror", "harbour", "signal", "copper", "planet", "button", "thunder", "cotton", "rocket"),
)


@frozen
class _Door:
    """A server's address, and the key it wants."""

    host: str
    key: str = ""

    def chat(self, question: str, count: int) -> int:
        """Ask for exactly `count` tokens, streamed; returns how many the server says it made."""
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(_wanted(question, count)), headers)
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            raise RuntimeError(f"{self.host}: {reply.status}: {reply.read().decode()}")
        made = 0
        for line in reply:
            if line.startswith(b"data: {") and b'"usage"' in line:
                made = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", made)
        connection.close()
        if made != count:
            raise RuntimeError(f"{self.host} made {made} tokens, not {count}")
        return made


def _wanted(question: str, count: int) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
    }


def run() -> list[Row]:
    """Measure, interleaved; several rounds."""
    with (
        tempfile.TemporaryDirectory(prefix="serve") as directory,
        real_tree(Path(directory)) as state,
        peer(max(TARGETS), 1024) as other,
    ):
        found = credentials.read(state)
        host = found.base_url.removeprefix("http://").removesuffix("/v1")
        ours = _Door(host, found.api_key)
        theirs = _Door(f"127.0.0.1:{other.port}") if other else None
        return [row for streams in TARGETS for row in _rows(streams, *_rounds(ours, theirs, streams))]


def _rounds(ours: _Door, theirs: _Door | None, streams: int) -> tuple[list[float], list[float]]:
    mine, others = [], []
    for turn in range(ROUNDS + 1):
        draw = random.Random(f"{streams} {turn}")  # noqa: S311 - no secret depends on it
        questions = [" ".join(draw.choices(VOCABULARY, k=WORDS)) for _ in range(streams)]
        mine.append(_rate(ours, questions, TOKENS[streams]))
        if theirs:
            others.append(_rate(theirs, questions, TOKENS[streams]))
    # The first turn warms both up.
    return mine[1:], others[1:]


def _rate(door: _Door, questions: Sequence[str], count: int) -> float:
    with ThreadPoolExecutor(len(questions)) as pool:
        begun = time.perf_counter()
        made = sum(pool.map(lambda question: door.chat(question, count), questions))
        return made / (time.perf_counter() - begun)


def _rows(streams: int, mine: list[float], theirs: list[float]) -> list[Row]:
    floor, aim = TARGETS[streams]
    name = f"{streams} chats: antiphon serve over llama.cpp's server"
    rows = [_row(f"{streams} chats, antiphon serve", mine)]
    if not theirs:
        return [*rows, Row(name, None, "x", floor, aim, note=NO_PEER)]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return [
        *rows,
        _row(f"{streams} chats, llama.cpp's server", theirs),
        Row(name, statistics.median(ratios), "x", floor, aim, low=min(ratios), high=max(ratios)),
    ]


def _row(name: str, rates: list[float]) -> Row:
    return Row(name, statistics.median(rates), "tok/s", low=min(rates), high=max(rates))
