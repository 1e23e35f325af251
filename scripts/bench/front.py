"""What the tree adds to a bare handler: the first byte, the gaps between events, 200 streams at once.

The real processes with a scripted engine stand against a bare Quart handler on the stock server, in turn, in
one run: both stream a token an event at the same pace, to the same client.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import trio
from attrs import frozen

from scripts.bench.front_servers import MODEL
from scripts.bench.report import Row

NAME = "front"
ROUNDS = 5
FIRST_BYTES = 12
"""Requests per round and side whose first byte is timed."""
LONG = "%" * 80
"""A message whose characters begin no rule of the policy, so that each is let out as it comes."""
SHORT = "%%"
STREAMS = 200
PATIENCE = 60.0

_TEXT = re.compile(rb'"content": ?"[^"]')
"""Where an event has text."""


@frozen
class _Server:
    """A server under measurement."""

    port: int
    key: str

    def request(self, message: str) -> bytes:
        """Return the bytes of a streamed request for this message's echo."""
        messages = [{"role": "user", "content": message}]
        body = json.dumps(
            {"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 200, "messages": messages}
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self.key}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@frozen
class _Timed:
    """One stream: milliseconds from the request to its first event and its first text, and its gaps."""

    first_byte: float
    first_text: float
    gaps: tuple[float, ...]


def run() -> list[Row]:
    """Return the rows. Takes about half a minute."""
    with (
        tempfile.TemporaryDirectory(prefix="front") as state,
        _served("tree", state) as ours,
        _served("bare") as bare,
    ):
        for server in (ours, bare):
            _stream(server, LONG)
        rounds = [_round(ours, bare) for _ in range(ROUNDS)]
        complete = trio.run(_many, ours)
    first_byte, first_text, gap = zip(*rounds, strict=True)
    return [
        _row("first byte later than bare, p50", first_byte, floor=5.0),
        _row("first text later than bare, p50", first_text),
        _row("added gap between events, p50", gap, floor=1.0),
        Row(f"of {STREAMS} streams at once, complete", complete, "streams", floor=STREAMS),
    ]


def _row(name: str, values: tuple[float, ...], floor: float | None = None) -> Row:
    return Row(
        name,
        statistics.median(values),
        "ms",
        floor=floor,
        better="lower",
        low=min(values),
        high=max(values),
    )


@contextmanager
def _served(*arguments: str) -> Iterator[_Server]:
    command = [sys.executable, "-m", "scripts.bench.front_servers", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            port, key = line.split()
            yield _Server(int(port), key)
        finally:
            process.terminate()


def _round(ours: _Server, bare: _Server) -> tuple[float, float, float]:
    """Return by how many milliseconds we are later: first byte, first text, gap; medians of one round."""
    pairs = [(_stream(ours, SHORT), _stream(bare, SHORT)) for _ in range(FIRST_BYTES)]
    mine, theirs = _stream(ours, LONG), _stream(bare, LONG)
    return (
        _median(p[0].first_byte for p in pairs) - _median(p[1].first_byte for p in pairs),
        _median(p[0].first_text for p in pairs) - _median(p[1].first_text for p in pairs),
        _median(mine.gaps) - _median(theirs.gaps),
    )


def _median(values: Iterator[float] | tuple[float, ...]) -> float:
    return statistics.median(values)


def _stream(server: _Server, message: str) -> _Timed:
    """Time one stream as a client sees it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        client.sendall(server.request(message))
        first_byte, texts, data = 0.0, [], b""
        while b"[DONE]" not in data:
            data = client.recv(65536)
            if not data:
                raise RuntimeError("the stream ended early")
            at = (time.perf_counter() - began) * 1000
            if b"data: " in data:
                first_byte = first_byte or at
                texts += [at] * len(_TEXT.findall(data))
    return _Timed(first_byte, texts[0], tuple(b - a for a, b in pairwise(texts)))


async def _many(server: _Server) -> int:
    """Return how many of many simultaneous streams got the whole of their own text."""
    complete = 0

    async def one(number: int) -> None:
        nonlocal complete
        said = await _whole(server, f"{number:%>20}")
        complete += f"You said: {number:%>20}" == said

    with trio.move_on_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(one, number)
    return complete


async def _whole(server: _Server, message: str) -> str:
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream:
        await stream.send_all(server.request(message))
        got = b"".join([data async for data in stream])
    lines = [line[6:] for line in got.decode().split("\n") if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return ""
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["delta"].get("content", "") for choice in choices)
