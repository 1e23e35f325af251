"""The normal form of `store.normalise` over whole Arrow columns, for offline use. Needs `pyarrow`.

The same answer as `key_of`, byte for byte: whole columns are folded as one array of code points, and only
texts whose characters reorder or join with their neighbours go through the scalar function.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from attrs import frozen
from numpy.typing import NDArray

from store.normalise import FOLD, LONGEST_KEY, LONGEST_TEXT, STOPS, TABLES, UNSETTLED, normalise

POINTS = 0x110000
PIECE = 4096
"""Rows at a time: their arrays stay in the CPU's cache, four times as fast as a whole column at once."""
BANG, SPACE = ord("!"), ord(" ")
Points = NDArray[np.uint32]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@frozen
class PointTables:
    """What is known of each code point, as arrays of `POINTS` entries."""

    fold_start: NDArray[np.int32]
    """Where its folded form begins in `fold_pool`."""
    fold_length: NDArray[np.uint8]
    fold_pool: Points
    unsettled: Flags
    word: Flags
    spoken: Flags
    """May be part of a spoken word: no digit, no sign but the apostrophe and the hyphen."""
    stop: Flags


@frozen
class Texts:
    """Rows of code points end to end: row i is `points[bounds[i]:bounds[i + 1]]`."""

    points: Points
    bounds: Indices


@cache
def point_tables() -> PointTables:
    """Spread the frozen tables over all code points: 8 MB, made once."""
    length = np.ones(POINTS, np.uint8)
    start = np.arange(POINTS, dtype=np.int32)
    pool = [np.arange(POINTS, dtype=np.uint32)]
    offset = POINTS
    for point, text in FOLD.items():
        start[point], length[point] = offset, len(text)
        pool.append(np.array([ord(c) for c in text], np.uint32))
        offset += len(text)
    word, spoken = _flags(TABLES["word"]), _flags(TABLES["word"]) & ~_flags(TABLES["number"])
    spoken[[ord("'"), ord("-")]] = True
    stop = np.zeros(POINTS, np.bool_)
    stop[[ord(c) for c in STOPS]] = True
    return PointTables(start, length, np.concatenate(pool), _flags(UNSETTLED), word, spoken, stop)


def keys_of(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return `key_of` of each text of a string column as a binary column, null where there is no key."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    pieces = [
        _piece_keys(chunk.slice(start, PIECE).cast(pa.large_string()))
        for chunk in chunks
        for start in range(0, len(chunk), PIECE)
    ]
    return pa.concat_arrays(pieces) if pieces else pa.array([], pa.binary())


def _piece_keys(column: Any) -> pa.Array:
    texts, too_long = _decoded(column)
    forms = _normalised(texts, column)
    data, bounds = _encoded(forms)
    sizes = np.diff(bounds)
    invalid = (sizes == 0) | (sizes > LONGEST_KEY) | too_long | _any(forms.points == 0, forms.bounds)
    invalid |= column.is_null().to_numpy(zero_copy_only=False)
    validity = pa.array(~invalid).buffers()[1]
    buffers = [validity, pa.py_buffer(bounds.astype(np.int32).tobytes()), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(column), buffers)


def _flags(runs: list[list[int]]) -> Flags:
    flags = np.zeros(POINTS, np.bool_)
    for low, high in runs:
        flags[low : high + 1] = True
    return flags


def _decoded(column: Any) -> tuple[Texts, Flags]:
    """Code points of every row, and which rows are over `LONGEST_TEXT`: those come out empty."""
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
    whole = column.buffers()[2].to_pybytes() if column.buffers()[2] is not None else b""
    data = whole[offsets[0] : offsets[-1]] if len(offsets) else b""
    leading = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    before = np.concatenate([[0], np.cumsum(leading)])
    texts = Texts(_points(data.decode()), before[offsets - offsets[0]].astype(np.int64))
    too_long = np.diff(texts.bounds) > LONGEST_TEXT
    return _kept(texts, ~np.repeat(too_long, np.diff(texts.bounds))), too_long


def _points(text: str) -> Points:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _encoded(texts: Texts) -> tuple[bytes, Indices]:
    sizes = 1 + (texts.points >= 0x80).astype(np.int64) + (texts.points >= 0x800) + (texts.points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(sizes)])
    return texts.points.tobytes().decode("utf-32-le").encode(), before[texts.bounds]


def _normalised(texts: Texts, column: Any) -> Texts:
    folded = _folded(texts)
    unsettled = np.flatnonzero(_any(point_tables().unsettled[folded.points], folded.bounds))
    return _replaced(
        _without_stops(_spaced(folded)),
        unsettled,
        [_points(normalise(column[int(i)].as_py())) for i in unsettled],
    )


def _folded(texts: Texts) -> Texts:
    tables = point_tables()
    lengths = tables.fold_length[texts.points].astype(np.int64)
    if (lengths == 1).all():
        return Texts(tables.fold_pool[tables.fold_start[texts.points]], texts.bounds)
    before = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(before[-1]) - np.repeat(before[:-1], lengths)
    pool = tables.fold_pool[np.repeat(tables.fold_start[texts.points], lengths) + within]
    return Texts(pool, before[texts.bounds])


def _spaced(texts: Texts) -> Texts:
    """One space for a run of them, none at either end of a row."""
    space = texts.points == SPACE
    kept = ~space
    kept[1:] |= space[1:] & ~space[:-1]
    kept[_starts(texts)] = ~space[_starts(texts)]
    texts = _kept(texts, kept)
    kept = np.ones(len(texts.points), np.bool_)
    kept[_ends(texts)] = texts.points[_ends(texts)] != SPACE
    return _kept(texts, kept)


def _without_stops(texts: Texts) -> Texts:
    """Row by row what `store.normalise` does at the end of a text, all rows at once."""
    tables, points = point_tables(), texts.points
    index = np.arange(len(points))
    rows = np.flatnonzero(np.diff(texts.bounds))
    start, end = texts.bounds[rows], texts.bounds[rows + 1]
    stop = tables.stop[points]
    body = np.maximum(_last(~stop, index)[end - 1], start - 1) + 1
    token = np.maximum(_last(points == SPACE, index)[body - 1], start - 1) + 1
    token = np.minimum(token, body)
    cut = _count(tables.word[points], token, body) > 0
    spoken = (_count(tables.spoken[points], token, body) == body - token) & (body - token >= 2)
    after_bangs = _next(points != BANG, index)[body]
    new_end = np.where(spoken, body, np.minimum(after_bangs, end))
    kept = np.ones(len(points), np.bool_)
    kept[_between(np.where(cut, new_end, end), end)] = False
    return _kept(texts, kept)


def _last(flags: Flags, index: Indices) -> Indices:
    """For each place, the last one up to it that has the flag, or -1."""
    nearest: Indices = np.maximum.accumulate(np.where(flags, index, -1))
    return nearest


def _next(flags: Flags, index: Indices) -> Indices:
    """For each place and the end, the first one from it on that has the flag, or the end."""
    found = np.append(np.where(flags, index, len(index)), len(index))
    nearest: Indices = np.minimum.accumulate(found[::-1])[::-1]
    return nearest


def _count(flags: Flags, start: Indices, end: Indices) -> Indices:
    before: Indices = np.concatenate([[0], np.cumsum(flags)])
    return before[end] - before[start]


def _between(start: Indices, end: Indices) -> Indices:
    """All places of the half-open spans, end to end."""
    lengths = end - start
    before = np.cumsum(lengths) - lengths
    places: Indices = np.arange(int(lengths.sum())) + np.repeat(start - before, lengths)
    return places


def _any(flags: Flags, bounds: Indices) -> Flags:
    return _count(flags, bounds[:-1], bounds[1:]) > 0


def _starts(texts: Texts) -> Indices:
    return texts.bounds[:-1][np.diff(texts.bounds) > 0]


def _ends(texts: Texts) -> Indices:
    return texts.bounds[1:][np.diff(texts.bounds) > 0] - 1


def _kept(texts: Texts, kept: Flags) -> Texts:
    before = np.concatenate([[0], np.cumsum(kept)])
    return Texts(texts.points[kept], before[texts.bounds])


def _replaced(texts: Texts, rows: Indices, forms: list[Points]) -> Texts:
    """Put other texts in place of some rows."""
    if not forms:
        return texts
    lengths = np.diff(texts.bounds)
    kept = _kept(texts, ~np.isin(np.repeat(np.arange(len(lengths)), lengths), rows))
    places = np.repeat(kept.bounds[rows], [len(form) for form in forms])
    points = np.insert(kept.points, places, np.concatenate(forms))
    new_lengths = np.diff(kept.bounds)
    new_lengths[rows] = [len(form) for form in forms]
    return Texts(points, np.concatenate([[0], np.cumsum(new_lengths)]))
