"""The bytes of a server-sent event stream, kept to what every client reads right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()

# Characters that some clients take for line ends, and what they become. Their UTF-8 bytes occur nowhere else.
_LINE_ENDS = (
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
    ("\u0085".encode(), rb"\u0085"),
)


def encode(value: Any) -> bytes:
    """Return compact JSON on one line, whatever line ends the text in it has."""
    data = _encoder.encode(value)
    for raw, escape in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escape)
    return data


def event(data: bytes) -> bytes:
    """Return one event: `data:` and a space, which some clients insist on, and an empty line."""
    return b"data: " + data + b"\n\n"


def events(items: Iterable[bytes]) -> bytes:
    """Return several events as one write."""
    return b"".join(map(event, items))
