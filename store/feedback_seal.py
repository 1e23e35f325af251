"""Sealing a day of rows: from the writers' files to one Parquet file with a manifest. Needs `pyarrow`.

The Parquet file comes first, then the manifest, then the writers' files go. Killed at any step, sealing again
finishes: rows that are sealed already are recognised by the manifest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyarrow import parquet

from store.decision import INPUTS
from store.durable import INCOMING, Checkpoint, flush, go_on, replace_file
from store.feedback import Kind, day_of, open_days, read_day
from store.release import sha256_of

SCHEMA: Final = 1
ROW_GROUP: Final = 50_000
SETTLING: Final = 600.0
"""Seconds after midnight until the last rows of a day are surely written."""

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


class DayManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sealed day."""

    schema: int
    kind: str
    day: str
    rows: int
    size: int
    sha256: str
    inputs: tuple[str, ...]
    """What the numbers of the column `inputs` are."""


class SealError(Exception):
    """A sealed day that is not what its manifest says."""


def seal_closed_days(root: Path, kind: Kind, now: float) -> list[DayManifest]:
    """Seal every day that is over at `now` (Unix seconds) and that no writer can still be adding to."""
    return [seal(root, kind, day) for day in open_days(root, kind, day_of(now - SETTLING))]


def seal(root: Path, kind: Kind, day: str, checkpoint: Checkpoint = go_on) -> DayManifest:
    """Seal one day. Whatever it is killed at, sealing again ends with every row in the file once."""
    directory = root / kind
    sealed = directory / f"{day}.manifest.json"
    if not sealed.exists():
        _write_rows(root, kind, day)
        checkpoint("wrote rows")
        replace_file(sealed, msgspec.json.encode(_describe(directory, kind, day)), checkpoint)
    manifest = verify_day(root, kind, day)
    shutil.rmtree(directory / day, ignore_errors=True)
    return manifest


def verify_day(root: Path, kind: Kind, day: str) -> DayManifest:
    """Return a sealed day's manifest once its file is known to be whole. Raises `SealError`."""
    path = root / kind / f"{day}.parquet"
    manifest = msgspec.json.decode((root / kind / f"{day}.manifest.json").read_bytes(), type=DayManifest)
    if not path.exists() or path.stat().st_size != manifest.size or sha256_of(path) != manifest.sha256:
        raise SealError(f"{path} is not what its manifest says: bring it back from a copy")
    return manifest


def _write_rows(root: Path, kind: Kind, day: str) -> None:
    path = root / kind / f"{day}.parquet"
    descriptor, name = tempfile.mkstemp(prefix=INCOMING, dir=path.parent)
    os.close(descriptor)
    rows = read_day(root, kind, day)
    with parquet.ParquetWriter(name, COLUMNS[kind], compression="zstd") as writer:
        while group := list(islice(rows, ROW_GROUP)):
            columns = [msgspec.to_builtins(row) for row in group]
            writer.write_table(pa.Table.from_pylist(columns, COLUMNS[kind]))
    flush(Path(name))
    Path(name).rename(path)
    flush(path.parent)


def _describe(directory: Path, kind: Kind, day: str) -> DayManifest:
    path = directory / f"{day}.parquet"
    rows = parquet.read_metadata(path).num_rows
    return DayManifest(SCHEMA, kind, day, rows, path.stat().st_size, sha256_of(path), INPUTS)
