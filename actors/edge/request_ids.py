"""Request ids: a UUIDv7 that also remembers which session host its turn lives on.

A UUIDv7 is 48 bits of Unix milliseconds and 74 random bits. The first twelve of those (`rand_a`) hold the
number of the session host, so that an edge that has only the id knows whom to ask first. That is a hint and
no secret: every host checks the owner, and the remaining 62 bits are random.
"""

from __future__ import annotations

import secrets
import time
import uuid

CHAT_PREFIX = "chatcmpl-"
RESPONSE_PREFIX = "resp_"
MESSAGE_PREFIX = "msg_"
HOSTS = 2**12


def mint(host: str, *, now_ms: int | None = None) -> str:
    """Return a new request id for a turn on session host `host` (`session.3`)."""
    milliseconds = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    value = (milliseconds & (2**48 - 1)) << 80
    value |= 0x7 << 76 | host_number(host) << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))


def host_number(host: str) -> int:
    """Return the number in a replica's name; 0 for one without."""
    number = host.rpartition(".")[2]
    return int(number) % HOSTS if number.isascii() and number.isdigit() else 0


def hint(request_id: str) -> int:
    """Return the number of the host that the id was minted for."""
    return uuid.UUID(request_id).int >> 64 & (HOSTS - 1)


def parse(text: str, prefix: str) -> str | None:
    """Return the request id in a wire id such as `resp_<uuid>`; None when it is not one that we minted."""
    if not text.startswith(prefix):
        return None
    bare = text.removeprefix(prefix)
    try:
        value = uuid.UUID(bare)
    except ValueError:
        return None
    return bare if str(value) == bare and value.version == 7 else None
