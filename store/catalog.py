"""The catalog: reviewed answers by normal form, in one read-only LMDB file that all processes share.

A value holds the entry's features as fixed-width numbers, its name and its answer. Answers that would not
leave room for a second value on the page are compressed with a dictionary the catalog carries, so that a
page holds several. Records of the catalog itself have keys that begin with NUL, which no question has.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec
from attrs import define, frozen
from isal import isal_zlib

from store.normalise import LONGEST_KEY, NORMALISER
from store.recent import Recent

SCHEMA: Final = 1
FEATURES: Final = ("historical_uplift", "query_frequency", "answered_at", "feedback_volume")
"""In a value's order, float64 each. `answered_at` is in days since 1970."""
ABOUT_KEY: Final = b"\0about"
DICTIONARY_KEY: Final = b"\0dictionary"
ROOMY_NODE: Final = 2038
"""Bytes of header, key and value of which two share a 4 KiB page; larger ones take pages of their own."""
NODE_HEADER: Final = 8
ENGINE: Final = 0
"""lmdb bundles two engines with incompatible files: which one wrote this."""

_InflateError: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # its stub has an instance
_HEAD = struct.Struct(f"<BB{len(FEATURES)}d")
_PLAIN, _PACKED, _ALIAS = 0, 1, 2
_CACHED_ENTRIES = 4096
"""Decoded entries kept at most: the head of the traffic, some 12 MB at 2.5 KB an answer."""


class CatalogError(Exception):
    """The file is no catalog that this program can serve; the text says why."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a catalog says of itself."""

    schema: int
    normaliser: str
    """Digest of the normal form its keys are in."""
    features: tuple[str, ...]
    entries: int
    keys: int
    probe: str
    """A key that must be found in it, looked up before it serves."""


@frozen
class Entry:
    """A reviewed answer. `features` are in the order of `FEATURES`."""

    name: str
    features: tuple[float, ...]
    answer: str


class Packer:
    """Lays entries out as values."""

    def __init__(self, dictionary: bytes) -> None:
        # Level 1: on answers of 2 KB with a dictionary, a tenth larger than level 6 and twice as fast.
        self._primed = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, dictionary)

    def pack(self, key: bytes, entry: Entry) -> bytes:
        """Return an entry's value, compressed if it would not share its page otherwise."""
        answer = entry.answer.encode()
        plain = _packed(_PLAIN, entry, answer)
        if NODE_HEADER + len(key) + len(plain) <= ROOMY_NODE:
            return plain
        deflate = self._primed.copy()  # a third of the cost of taking the dictionary in again
        return min(plain, _packed(_PACKED, entry, deflate.compress(answer) + deflate.flush()), key=len)


def pack_alias(target: bytes) -> bytes:
    """Lay out the value of another phrasing: the key that has the entry."""
    return bytes([_ALIAS]) + target


def _packed(layout: int, entry: Entry, answer: bytes) -> bytes:
    name = entry.name.encode()
    return _HEAD.pack(layout, len(name), *entry.features) + name + answer


@define
class _Mapped:
    """A file's one mapping in this process, however many catalogs read it: lmdb allows no second."""

    file: tuple[int, int]
    environment: Any
    readers: int = 0


_mappings: dict[tuple[int, int], _Mapped] = {}
_mappings_lock = threading.Lock()


def _mapped(path: Path) -> _Mapped:
    with _mappings_lock:
        try:
            found = path.stat()
            file = found.st_dev, found.st_ino
            if file not in _mappings:
                options: dict[str, Any] = {
                    "subdir": False,
                    "readonly": True,
                    "lock": False,
                    "max_dbs": 0,
                    "readahead": False,
                }
                _mappings[file] = _Mapped(file, lmdb.open(str(path), lib_version=ENGINE, **options))
        except (lmdb.Error, OSError) as error:
            raise CatalogError(f"{path} cannot be opened as a catalog: {error}") from error
        _mappings[file].readers += 1
        return _mappings[file]


def _unmapped(mapped: _Mapped) -> None:
    with _mappings_lock:
        mapped.readers -= 1
        if mapped.readers == 0:
            del _mappings[mapped.file]
            mapped.environment.close()


class Catalog:
    """An open catalog, for one thread at a time. `close` unmaps it.

    The file must have been checked against its manifest first: a truncated one ends the process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read what it says of itself. Raises `CatalogError`."""
        self._file = _mapped(path)
        self._transaction: Any = self._file.environment.begin()
        self._get = self._transaction.get
        self._decoded: Recent[bytes, Entry] = Recent(_CACHED_ENTRIES // 2, LONGEST_KEY)
        try:
            self.about = self._read_about(path)
        except CatalogError:
            self.close()
            raise
        self._dictionary: bytes = self._get(DICTIONARY_KEY, b"")

    def _read_about(self, path: Path) -> About:
        try:
            about = msgspec.json.decode(self._get(ABOUT_KEY, b""), type=About)
        except (msgspec.DecodeError, lmdb.Error) as error:
            raise CatalogError(f"{path} has no readable description: {error}") from error
        if about.schema != SCHEMA or about.features != FEATURES:
            raise CatalogError(
                f"{path} has schema {about.schema} with features {', '.join(about.features)}; "
                f"this program reads schema {SCHEMA} with {', '.join(FEATURES)}: build it again"
            )
        if about.normaliser != NORMALISER.digest:
            raise CatalogError(
                f"{path} was built with normal form {about.normaliser[:12]}, this program has "
                f"{NORMALISER.digest[:12]} (version {NORMALISER.version}): build it again"
            )
        return about

    def find(self, key: bytes) -> Entry | None:
        """Return the entry of a key made by `key_of`, or None. Microseconds; waits for a page at most."""
        entry = self._decoded.get(key)
        if entry is not None:
            return entry
        value = self._get(key)
        if value is None:
            return None
        if value[0] == _ALIAS:
            return self.find(value[1:])
        entry = self._unpacked(value)
        self._decoded.put(key, entry)
        return entry

    def _unpacked(self, value: bytes) -> Entry:
        layout, name_length, *features = _HEAD.unpack_from(value)
        start = _HEAD.size + name_length
        answer = value[start:]
        if layout == _PACKED:
            answer = isal_zlib.decompressobj(-15, self._dictionary).decompress(answer)
        return Entry(value[_HEAD.size : start].decode(), tuple(features), answer.decode())

    def answers_its_probe(self) -> bool:
        """Look up the probe. Raises `CatalogError` when what is there cannot be read."""
        try:
            return self.find(self.about.probe.encode()) is not None
        except (lmdb.Error, _InflateError, struct.error, UnicodeDecodeError) as error:
            raise CatalogError(f"the catalog cannot be read: {error}") from error

    def items(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield every (key, entry) in key order, other phrasings too. For tools, not for serving."""
        for key, value in self._transaction.cursor():
            if not key.startswith(b"\0"):
                target: bytes = self._get(value[1:]) if value[0] == _ALIAS else value
                yield key, self._unpacked(target)

    def close(self) -> None:
        """Unmap the file. Nothing that was returned depends on it."""
        self._transaction.abort()
        _unmapped(self._file)
