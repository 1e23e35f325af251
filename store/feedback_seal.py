"""Sealing a day of rows: from the writers' files to one Parquet file with a manifest. Needs `pyarrow`.

The Parquet file comes first, then the manifest, then the writers' files go. Killed at any step, sealing again
finishes: rows that are sealed already are recognised by the manifest. Lines that are no rows are counted, and
the files they are in are kept in `damaged`. One sealer at a time holds a lock that dies with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import parquet

from store.decision import INPUTS
from store.durable import INCOMING, Checkpoint, flush, go_on, replace_file
from store.feedback import Kind, closed_days, read_day
from store.release import sha256_of

SCHEMA: Final = 1
ROW_GROUP: Final = 50_000
LOCK: Final = ".lock"
DAMAGED: Final = "damaged"

DECISION_COLUMNS: Final = pa.schema(
    [
        ("at", pa.float64()),
        ("request_id", pa.string()),
        ("owner", pa.string()),
        ("release", pa.string()),
        ("entry", pa.string()),
        ("inputs", pa.list_(pa.float64())),
        ("score", pa.float64()),
        ("threshold", pa.float64()),
        ("arm", pa.string()),
        ("action", pa.string()),
        ("reason", pa.string()),
        ("propensity", pa.float64()),
    ]
)
RATING_COLUMNS: Final = pa.schema(
    [("at", pa.float64()), ("request_id", pa.string()), ("owner", pa.string()), ("rating", pa.string())]
)
COLUMNS: Final[dict[Kind, Any]] = {"decisions": DECISION_COLUMNS, "ratings": RATING_COLUMNS}


class DayManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sealed day."""

    schema: int
    kind: str
    day: str
    rows: int
    size: int
    sha256: str
    inputs: tuple[str, ...]
    """What the numbers of the column `inputs` are."""
    damaged_lines: int = 0
    """Lines that are no rows, and are in no column."""


class SealError(Exception):
    """A day that cannot be sealed, or is not what its manifest says; the text is one line that says why."""


def seal_closed_days(root: Path, kind: Kind, now: float) -> list[DayManifest | SealError]:
    """Seal every day that is over at `now` (Unix seconds) and that no writer can still be adding to.

    A day that cannot be sealed stays as it is, with what is wrong in its place, and keeps no other waiting.
    """
    days: list[DayManifest | SealError] = []
    for day in closed_days(root, kind, now):
        try:
            days.append(seal(root, kind, day))
        except SealError as error:
            days.append(error)
    return days


def seal(root: Path, kind: Kind, day: str, checkpoint: Checkpoint = go_on) -> DayManifest:
    """Seal one day. Whatever it is killed at, sealing again ends with every row in the file once.

    Raises `SealError`; then every row is still in the writers' files.
    """
    directory = root / kind
    try:
        with _locked(directory):
            return _seal(root, kind, day, checkpoint)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise SealError(f"{kind} of {day} in {directory} cannot be sealed: {reason}") from error


def _seal(root: Path, kind: Kind, day: str, checkpoint: Checkpoint) -> DayManifest:
    directory = root / kind
    sealed = directory / f"{day}.manifest.json"
    if not sealed.exists():
        damaged = _write_rows(root, kind, day)
        checkpoint("wrote rows")
        replace_file(sealed, msgspec.json.encode(_describe(directory, kind, day, damaged)), checkpoint)
    manifest = verify_day(root, kind, day)
    kept = directory / DAMAGED / day
    if manifest.damaged_lines and (directory / day).exists() and not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        (directory / day).rename(kept)
    shutil.rmtree(directory / day, ignore_errors=True)
    return manifest


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the sealers' lock, and remove what a killed one left. It ends with the process that holds it."""
    with (directory / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob(f"{INCOMING}*"):
            left.unlink(missing_ok=True)
        yield


def verify_day(root: Path, kind: Kind, day: str) -> DayManifest:
    """Return a sealed day's manifest once its file is known to be whole. Raises `SealError`."""
    path = root / kind / f"{day}.parquet"
    described = root / kind / f"{day}.manifest.json"
    try:
        manifest = msgspec.json.decode(described.read_bytes(), type=DayManifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SealError(f"{described} cannot be read: {error}; bring it back from a copy") from error
    if not path.exists() or path.stat().st_size != manifest.size or sha256_of(path) != manifest.sha256:
        raise SealError(f"{path} is not what its manifest says: bring it back from a copy")
    return manifest


def _write_rows(root: Path, kind: Kind, day: str) -> int:
    """Write the Parquet file. Returns how many lines of the writers' files are damaged."""
    path = root / kind / f"{day}.parquet"
    descriptor, name = tempfile.mkstemp(prefix=INCOMING, dir=path.parent)
    os.close(descriptor)
    damaged: Counter[Path] = Counter()
    rows = read_day(root, kind, day, lambda file: damaged.update([file]))
    try:
        with parquet.ParquetWriter(name, COLUMNS[kind], compression="zstd") as writer:
            while group := list(islice(rows, ROW_GROUP)):
                columns = [msgspec.to_builtins(row) for row in group]
                writer.write_table(pa.Table.from_pylist(columns, COLUMNS[kind]))
        flush(Path(name))
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    flush(path.parent)
    return damaged.total()


def _describe(directory: Path, kind: Kind, day: str, damaged: int) -> DayManifest:
    path = directory / f"{day}.parquet"
    rows = parquet.read_metadata(path).num_rows
    return DayManifest(SCHEMA, kind, day, rows, path.stat().st_size, sha256_of(path), INPUTS, damaged)
