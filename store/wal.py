"""One process's own SQLite file on the path of every turn: commits that wait for no flush.

WAL with `synchronous=NORMAL`: a commit survives the death of any process; power loss may cost the last ones,
never the file. Only checkpoints flush, so SQLite does none by itself: `checkpoint` is called in a thread.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Size of the write-ahead log past which a checkpoint is due; SQLite's own default of 1,000 pages."""
PAGE: Final = 4096
"""Bytes a commit writes at least."""
BUSY_MS: Final = 5000


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the file. Transactions are begun and ended by the caller. Raises `sqlite3.Error`."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.execute(f"PRAGMA busy_timeout={BUSY_MS}")
    return db


def checkpoint(path: Path) -> None:
    """Fold the write-ahead log into the file, and flush it. Takes milliseconds: call it in a thread.

    Commits go on meanwhile, on the owner's own connection. Raises `sqlite3.Error`.
    """
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    finally:
        db.close()
