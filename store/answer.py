"""An answer as a catalog keeps it and as it travels: UTF-8, deflated where that is wanted and shorter.

Each is packed by itself, so that whoever gets one can read it without its catalog. The one who finds answers
hands them on as they are; unpacking costs more than finding, and is left to those who show them.
"""

from __future__ import annotations

import zlib
from typing import Final

from isal import isal_zlib

_PLAIN, _DEFLATED = b"\0", b"\1"
"""What a packed answer begins with."""
_FIRST_BUFFER: Final = 4096
"""Bytes an answer is inflated into at first; more are taken when it is longer."""
_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # its stub has an instance


class DamagedAnswer(ValueError):
    """Bytes that are no packed answer; the text says why."""


def pack_answer(text: str, room: int) -> bytes:
    """Pack an answer: as it is when that takes at most `room` bytes, else as is shorter."""
    plain = _PLAIN + text.encode()
    if len(plain) <= room:
        return plain
    deflate = zlib.compressobj(zlib.Z_BEST_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
    return min(plain, _DEFLATED + deflate.compress(plain[1:]) + deflate.flush(), key=len)


def unpack_answer(packed: bytes) -> str:
    """Return the text of a packed answer. Raises `DamagedAnswer`."""
    kind, data = packed[:1], packed[1:]
    try:
        if kind == _DEFLATED:
            return isal_zlib.decompress(data, -zlib.MAX_WBITS, _FIRST_BUFFER).decode()
        if kind == _PLAIN:
            return data.decode()
    except (_InflateError, UnicodeDecodeError) as error:
        raise DamagedAnswer(f"an answer cannot be unpacked: {error}") from error
    raise DamagedAnswer(f"an answer cannot be unpacked: it begins with {kind!r}")
