"""Requests that broke other servers, sent among the good ones: each must be refused, and harm nobody (invariant H)."""

from __future__ import annotations

import random

import httpx

from scripts.chaos.clients import Door
from scripts.chaos.record import Violation

BODIES: tuple[bytes, ...] = (
    b'{"model":"default","messages":[{"role":"user","content":"x"}],"logit_bias":{"191222":-100}}',
    b'{"model":"default","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    b'{"model":"default","messages":[{"role":"user","content":"x"}],"n":1000000000000}',
    b'{"model":"default","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"default","messages":[]}',
    b'{"model":"default","messages":' + b"[" * 9000 + b"]" * 9000 + b"}",
    b'{"model":"default","model":"default","messages":[{"role":"user","content":"x"}]}',
    b"null",
    b"",
)


def provoke(door: Door, rng: random.Random) -> list[Violation]:
    """Send one; a server that answers must answer 400. One that is being restarted may not answer at all."""
    body = rng.choice(BODIES)
    headers = {**door.headers(0), "Content-Type": "application/json"}
    try:
        answer = httpx.post(f"{door.root}/v1/chat/completions", content=body, headers=headers, timeout=30)
    except httpx.TransportError:
        return []
    if answer.status_code in {400, 503}:
        return []
    return [Violation("H", f"{body[:80]!r} was answered with {answer.status_code}")]
