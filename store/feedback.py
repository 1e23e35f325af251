"""What was decided and what people said of it: rows to train and judge decision models by.

    feedback/
        decisions/2026-11-30/fast_answer.0-7.jsonl   a writer's own file, appended to
        ratings/2026-11-30/edge.0-3.jsonl
        decisions/2026-11-29.parquet                 a day that is over, sealed
        decisions/2026-11-29.manifest.json
        decisions/damaged/2026-11-29/                the files of a sealed day with lines that were no rows

No row has text of a conversation in it. A row is never changed; a day is sealed once, when it is over.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from itertools import groupby, islice
from pathlib import Path
from typing import Final, Literal

import msgspec

from store.durable import flush

DECISIONS: Final = "decisions"
RATINGS: Final = "ratings"
SECONDS_A_DAY: Final = 86400
PIECE: Final = 1024
"""Rows encoded at a time: all at once cost a busy replica 6 MB, which it kept."""
SETTLING: Final = 600.0
"""Seconds after midnight until the last rows of a day are surely written."""
Kind = Literal["decisions", "ratings"]


class DecisionRow(msgspec.Struct, frozen=True):
    """One eligible request and what was decided. `entry` is "" when the catalog had none."""

    at: float
    """Unix seconds."""
    request_id: str
    owner: str
    release: str
    entry: str
    inputs: tuple[float, ...]
    """In the order of `store.decision.INPUTS`; none without an entry."""
    score: float
    threshold: float
    arm: str
    action: Literal["serve", "decline"]
    reason: str
    propensity: float
    """Probability that this action had when it was decided."""


class RatingRow(msgspec.Struct, frozen=True):
    """What a person said of the reply to a request."""

    at: float
    request_id: str
    owner: str
    rating: Literal["up", "down", "regenerate"]


Row = DecisionRow | RatingRow
ROWS: Final[dict[Kind, type[Row]]] = {"decisions": DecisionRow, "ratings": RatingRow}


def day_of(at: float) -> str:
    """Return the UTC day of a time in Unix seconds, as `YYYY-MM-DD`."""
    return dt.datetime.fromtimestamp(at, dt.UTC).date().isoformat()


class RowLog:
    """One writer's rows of one kind. `writer` names an incarnation, so that no two share a file."""

    def __init__(self, root: Path, kind: Kind, writer: str) -> None:
        self._directory = root / kind
        self._name = f"{writer}.jsonl"
        self._encode = msgspec.json.Encoder().encode_lines
        self._pending: list[Row] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows; they are on the disk after the next `write`."""
        self._pending.extend(rows)

    def take(self) -> list[Row]:
        """Give up the rows that are not written yet, to be written in another thread."""
        rows, self._pending = self._pending, []
        return rows

    def write(self, rows: list[Row], *, flushed: bool = False) -> None:
        """Append rows to their days' files, some at a time. `flushed` waits for the disk.

        Raises `OSError`, as on a full disk; then the day at which it stopped has none of these rows.
        A kill may cut the last line off; it is left out when it is read.
        """
        for number, of_day in groupby(rows, lambda row: row.at // SECONDS_A_DAY):
            path = self._directory / day_of(number * SECONDS_A_DAY) / self._name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b", buffering=0) as file:
                _append(file, map(self._encode, _pieces(of_day)), flushed=flushed)
            if flushed:
                flush(path.parent)


def _pieces(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while piece := list(islice(rows, PIECE)):
        yield piece


def _append(file: FileIO, pieces: Iterable[bytes], *, flushed: bool) -> None:
    """Append whole lines: all of them, or none and `OSError`."""
    end = file.seek(0, os.SEEK_END)
    try:
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            _write_all(file, b"\n")  # cutting a line back failed: what is left of it must not spoil the next
        for piece in pieces:
            _write_all(file, piece)
        if flushed:
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def _write_all(file: FileIO, piece: bytes) -> None:
    """A disk that is nearly full takes the beginning and says so; only the next write fails."""
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def _ignore(_path: Path) -> None:
    """Do nothing about a damaged line."""


def read_day(root: Path, kind: Kind, day: str, damaged: Callable[[Path], None] = _ignore) -> Iterator[Row]:
    """Yield the rows of a day that is not sealed yet, by writer.

    A last line that a kill cut off is left out. So is any other line that is no row, and `damaged` is called
    with the file it is in.
    """
    decode = msgspec.json.Decoder(ROWS[kind]).decode
    for path in sorted((root / kind / day).glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    continue
                try:
                    row = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    damaged(path)
                else:
                    yield row


def open_days(root: Path, kind: Kind, today: str) -> list[str]:
    """List the days before `today` that have rows and are not sealed."""
    directory = root / kind
    days = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    return [day for day in days if day < today]


def closed_days(root: Path, kind: Kind, now: float) -> list[str]:
    """List the days that are not sealed and that no writer can still be adding to at `now`, in Unix seconds."""
    return open_days(root, kind, day_of(now - SETTLING))
