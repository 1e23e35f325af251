"""Building a catalog: from approved rows, in JSON Lines or Parquet, to the sorted file that is served.

Two passes: the first reads every row for its keys and keeps only where the row is, the second reads the rows
again in key order and appends. Memory is some 300 bytes an entry, whatever the answers' length.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import lmdb
import msgspec
from attrs import field, frozen

from store.catalog import (
    ABOUT_KEY,
    ENGINE,
    FEATURES,
    SCHEMA,
    About,
    pack,
    pack_alias,
)
from store.durable import flush
from store.normalise import NORMALISER, key_of

MAP_SIZE = 1 << 38
"""Address space to build in; the file is as long as its contents."""
BATCH = 20_000
"""Rows a transaction: bounds the pages held in memory."""
PIECE, THREADS = 256, min(4, os.cpu_count() or 1)
"""Rows packed at a time, and how many pieces at once."""
EPOCH = dt.date(1970, 1, 1)
_valid_name = re.compile(r"[A-Za-z0-9._-]{1,64}").fullmatch


class CatalogRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An approved question and answer, as it is written in a source file."""

    question: str
    answer: str
    approved_by: str
    """Who reviewed it. A row nobody answers for is refused."""
    answered_on: dt.date
    id: str = ""
    """Letters, digits, `.`, `_`, `-`, at most 64. Made from the key when there is none."""
    also: tuple[str, ...] = ()
    """Other phrasings with the same answer."""
    uplift: float = 0.0
    """Measured satisfaction of the answer less that of the model's."""
    frequency: int = 0
    """Times asked in the window the catalog was made from."""
    feedback: int = 0
    """Ratings the answer has had."""


@frozen
class Problem:
    """A row that does not go in. `line` counts from 1."""

    line: int
    kind: str
    """`invalid`, `no_key`, `conflict` or `duplicate`."""
    text: str


@frozen
class BuildReport:
    """What a build did. Duplicates are left out and harmless; every other problem is an error."""

    rows: int
    entries: int
    keys: int
    size: int
    """Bytes of the file."""
    problems: tuple[Problem, ...] = ()
    errors: int = field()

    @errors.default
    def _count_errors(self) -> int:
        return sum(problem.kind != "duplicate" for problem in self.problems)


class BuildRefused(Exception):
    """Rows conflict or cannot be used; nothing was built. `report` names them."""

    def __init__(self, report: BuildReport) -> None:
        super().__init__(
            f"{report.errors} of {report.rows} rows cannot go in: mend them, or build with --keep-going"
            if report.errors
            else "no rows: a catalog needs at least one"
        )
        self.report = report


class Source(Protocol):
    """Rows that can be read one after the other, and again one by one."""

    def __iter__(self) -> Iterator[tuple[int, CatalogRow | str]]:
        """Yield (where, row), or the text of what is wrong with it."""

    def read(self, where: int) -> CatalogRow:
        """Read a row again."""


class JsonLines:
    """A file with one JSON object a line; `where` is a byte offset."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decode = msgspec.json.Decoder(CatalogRow).decode

    def __iter__(self) -> Iterator[tuple[int, CatalogRow | str]]:
        self._file.seek(0)
        where = 0
        for line in self._file:
            if line.strip():
                try:
                    yield where, self._decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    yield where, str(error)
            where += len(line)

    def read(self, where: int) -> CatalogRow:
        """Read a row again."""
        self._file.seek(where)
        return self._decode(self._file.readline())


class Parquet:
    """A Parquet file with the same columns; `where` is a row's number. Needs `pyarrow`."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet  # noqa: PLC0415  optional

        self._table: Any = parquet.read_table(path, memory_map=True)

    def __iter__(self) -> Iterator[tuple[int, CatalogRow | str]]:
        where = 0
        for batch in self._table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                try:
                    yield where, _from_columns(row)
                except msgspec.ValidationError as error:
                    yield where, str(error)
                where += 1

    def read(self, where: int) -> CatalogRow:
        """Read a row again."""
        return _from_columns(self._table.slice(where, 1).to_pylist()[0])


def _from_columns(row: dict[str, Any]) -> CatalogRow:
    return msgspec.convert({name: value for name, value in row.items() if value is not None}, CatalogRow)


def open_source(path: Path) -> Source:
    """Read Parquet by its suffix, else JSON Lines."""
    return Parquet(path) if path.suffix == ".parquet" else JsonLines(path)


@frozen
class _Place:
    """Where a key's row is, and a digest of its answer. An alias has the key that holds the entry."""

    where: int
    answer: bytes
    target: bytes = b""


class CatalogBuilder:
    """Collects keys from a source, then writes them.

    `progress(done, of)` is called now and then; `of` is 0 while it is unknown.
    """

    def __init__(
        self, source: Source, progress: Callable[[int, int], None] = lambda _done, _of: None
    ) -> None:
        self._source = source
        self._progress = progress
        self._places: dict[bytes, _Place] = {}
        self._problems: list[Problem] = []
        self._names: set[str] = set()
        self._rows = 0

    def build(self, target: Path, *, keep_going: bool = False) -> BuildReport:
        """Write the catalog as a new file, flushed to the disk. Equal rows give an equal file.

        Raises `BuildRefused` when rows conflict or cannot be used, unless they are to be left out.
        """
        for where, row in self._source:
            self._rows += 1
            self._collect(where, row)
            if self._rows % 1000 == 0:
                self._progress(self._rows, 0)
        report = self._report(0)
        if not self._places or (report.errors and not keep_going):
            raise BuildRefused(report)
        try:
            self._write(target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return self._report(target.stat().st_size)

    def _report(self, size: int) -> BuildReport:
        entries = sum(not place.target for place in self._places.values())
        return BuildReport(self._rows, entries, len(self._places), size, tuple(self._problems))

    def _collect(self, where: int, row: CatalogRow | str) -> None:
        fault = row if isinstance(row, str) else _fault(row) or self._name_fault(row)
        if isinstance(row, str) or fault:
            self._problem("invalid", fault)
            return
        key = self._enter(row.question, where, row.answer, b"")
        if key is not None:
            for phrasing in row.also:
                self._enter(phrasing, where, row.answer, key)

    def _name_fault(self, row: CatalogRow) -> str:
        if row.id in self._names:
            return f"id {row.id!r} is used twice"
        if row.id:
            self._names.add(row.id)
        return ""

    def _enter(self, question: str, where: int, answer: str, target: bytes) -> bytes | None:
        key = key_of(question)
        if key is None:
            self._problem("no_key", question)
            return None
        digest = hashlib.blake2b(answer.encode(), digest_size=8).digest()
        there = self._places.setdefault(key, _Place(where, digest, target))
        if there.where == where and there.target == target:
            return key
        self._problem("duplicate" if there.answer == digest else "conflict", question)
        return None

    def _problem(self, kind: str, text: str) -> None:
        self._problems.append(Problem(self._rows, kind, text[:200]))

    def _write(self, target: Path) -> None:
        environment: Any = lmdb.open(
            str(target),
            subdir=False,
            map_size=MAP_SIZE,
            lock=False,
            sync=False,
            readahead=False,
            lib_version=ENGINE,
        )
        try:
            for batch in _batches(self._records()):
                with environment.begin(write=True) as transaction:
                    transaction.cursor().putmulti(batch, append=True)
        finally:
            environment.close()
        flush(target)

    def _records(self) -> Iterator[tuple[bytes, bytes]]:
        """Everything in the file, in key order: the catalog's own record first."""
        keys = sorted(self._places)
        entries = sum(not place.target for place in self._places.values())
        probe = keys[len(keys) // 2].decode()
        about = About(SCHEMA, NORMALISER.digest, FEATURES, entries, len(keys), probe)
        yield ABOUT_KEY, msgspec.json.encode(about)
        yield from self._packed(keys)

    def _packed(self, keys: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Pack in threads, for compressing lets go of the interpreter; a few pieces ahead of who writes."""
        waiting: deque[Future[list[tuple[bytes, bytes]]]] = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, len(keys), PIECE):
                self._progress(start, len(keys))
                rows = [(key, self._row_of(key)) for key in keys[start : start + PIECE]]
                waiting.append(pool.submit(_pack, rows))
                if len(waiting) > 2 * THREADS:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        self._progress(len(keys), len(keys))

    def _row_of(self, key: bytes) -> CatalogRow | bytes:
        """Read a key's row again; for another phrasing, the key that has it."""
        place = self._places[key]
        return place.target or self._source.read(place.where)


def _fault(row: CatalogRow) -> str:
    if not row.approved_by.strip():
        return "approved_by is empty: every answer needs a reviewer"
    if not row.answer.strip():
        return "answer is empty"
    if row.id and _valid_name(row.id) is None:
        return f"id {row.id!r}: letters, digits, '.', '_' and '-' only, at most 64"
    if not math.isfinite(row.uplift):
        return f"uplift {row.uplift}: it must be a number"
    return "frequency and feedback cannot be negative" if min(row.frequency, row.feedback) < 0 else ""


def _packed_row(key: bytes, row: CatalogRow) -> bytes:
    features = (row.uplift, float(row.frequency), float((row.answered_on - EPOCH).days), float(row.feedback))
    return pack(key, row.id or hashlib.sha256(key).hexdigest()[:12], features, row.answer)


def _pack(rows: list[tuple[bytes, CatalogRow | bytes]]) -> list[tuple[bytes, bytes]]:
    return [(key, pack_alias(row) if isinstance(row, bytes) else _packed_row(key, row)) for key, row in rows]


def _batches(records: Iterator[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    while batch := list(islice(records, BATCH)):
        yield batch
