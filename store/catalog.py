"""The catalog: reviewed answers by normal form, in one read-only LMDB file that all processes share.

A value holds the entry's features as fixed-width numbers, its name and its answer. Answers that would not
leave room for a second value on the page are deflated, each by itself, so that a page holds several and who
gets one can read it without the catalog. The catalog's own record has a key that begins with NUL, which no
question has.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec
from attrs import define

from store.answer import DamagedAnswer, pack_answer, unpack_answer
from store.normalise import NORMALISER

SCHEMA: Final = 2
FEATURES: Final = ("historical_uplift", "query_frequency", "answered_at", "feedback_volume")
"""In a value's order, float64 each. `answered_at` is in days since 1970."""
ABOUT_KEY: Final = b"\0about"
ROOMY_NODE: Final = 2038
"""Bytes of header, key and value of which two share a 4 KiB page; larger ones take pages of their own."""
NODE_HEADER: Final = 8
ENGINE: Final = 0
"""lmdb bundles two engines with incompatible files: which one wrote this."""

_HEAD: Final = struct.Struct(f"<B{len(FEATURES)}d")
"""The name's length, which is 0 for an alias, and the features. The name follows, then the packed answer."""
_head_of = _HEAD.unpack_from


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


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A reviewed answer. `features` are in the order of `FEATURES`, `packed` is for `unpack_answer`."""

    name: str
    features: tuple[float, ...]
    packed: bytes

    @property
    def answer(self) -> str:
        """The answer's text. Raises `DamagedAnswer` when it is damaged."""
        return unpack_answer(self.packed)


def pack(key: bytes, name: str, features: tuple[float, ...], answer: str) -> bytes:
    """Return an entry's value, with the answer deflated if it would not share its page otherwise."""
    head = _HEAD.pack(len(name), *features) + name.encode()
    return head + pack_answer(answer, ROOMY_NODE - NODE_HEADER - len(key) - len(head))


def pack_alias(target: bytes) -> bytes:
    """Lay out the value of another phrasing: the key that has the entry."""
    return b"\0" + target


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
        try:
            self.about = self._read_about(path)
        except CatalogError:
            self.close()
            raise

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
        value = self._get(key)
        if value is None:
            return None
        return _entry(value) if value[0] else self.find(value[1:])

    def find_many(self, keys: Sequence[bytes | None]) -> list[Entry | None]:
        """Return what `find` returns for each key, and None for what is no key."""
        get = self._get
        values = [get(key) if key else None for key in keys]
        return [value and (_entry(value) if value[0] else self.find(value[1:])) for value in values]

    def answers_its_probe(self) -> bool:
        """Look up the probe. Raises `CatalogError` when what is there cannot be read."""
        try:
            entry = self.find(self.about.probe.encode())
            answer = entry.answer if entry is not None else ""
        except (lmdb.Error, struct.error, UnicodeDecodeError, DamagedAnswer) as error:
            raise CatalogError(f"the catalog cannot be read: {error}") from error
        return bool(answer)

    def items(self) -> Iterator[tuple[bytes, Entry]]:
        """Yield every (key, entry) in key order, other phrasings too. For tools, not for serving."""
        for key, value in self._transaction.cursor():
            if not key.startswith(b"\0"):
                yield key, _entry(value if value[0] else self._get(value[1:]))

    def close(self) -> None:
        """Unmap the file. Nothing that was returned depends on it."""
        self._transaction.abort()
        _unmapped(self._file)


def _entry(value: bytes) -> Entry:
    head = _head_of(value)
    start = _HEAD.size + head[0]
    return Entry(value[_HEAD.size : start].decode(), head[1:], value[start:])
