"""Rows of the journal that do not decode: another program wrote them, or the disk did.

One such row ends one turn, never the host: what can be read is, and the rest is said to be damaged.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from store.journal_records import Step, from_plain

UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, LookupError)
"""What decoding raises for bytes that it does not know."""
ANYBODYS: Final = ""
"""In place of a turn's id: nobody can say whose step it was."""


def salvage_steps(data: bytes) -> tuple[list[Step], set[str]]:
    """Return the steps of a log row that can be read, and the ids of turns that have others in it."""
    try:
        plains = msgspec.msgpack.decode(data, type=list[Any])
    except UNREADABLE:
        return [], {ANYBODYS}
    steps: list[Step] = []
    damaged: set[str] = set()
    for plain in plains:
        try:
            steps.append(from_plain(plain))
        except UNREADABLE:
            damaged.add(_whose(plain))
    return steps, damaged


def _whose(plain: object) -> str:
    if isinstance(plain, list) and len(plain) > 1 and isinstance(plain[1], str):
        return plain[1]
    return ANYBODYS
