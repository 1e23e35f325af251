"""A slow disk, pretended: commits and flushes of an actor take their time. Only where ANTIPHON_CHAOS=1.

While the file `switch_of(state_dir)` is there, every commit, checkpoint and `os.fsync` of every actor waits.
Each adds a line to the file, the milliseconds it waited: the proof, for whoever put the file there.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

FASTEST, SLOWEST = 0.2, 0.5
"""Seconds that a flush takes on a disk that others keep busy."""

_switch: Path | None = None


def switch_of(state_dir: Path) -> Path:
    """Return the file that makes the disk under a state directory slow while it exists."""
    return state_dir / "run" / "slow_disk"


def install(state_dir: Path) -> None:
    """Have this process's commits and flushes look for the switch, from now on."""
    global _switch  # noqa: PLW0603 - connections are made by libraries, which pass nothing on
    _switch = switch_of(state_dir)
    flush: Any = os.fsync
    connect: Any = sqlite3.connect

    def slow_flush(descriptor: Any) -> None:
        _wait()
        flush(descriptor)

    def slow_connect(*args: Any, **options: Any) -> Any:
        return connect(*args, **{"factory": _SlowConnection, **options})

    os.fsync = slow_flush  # type: ignore[assignment]
    for module in (sqlite3, sqlite3.dbapi2):
        module.connect = slow_connect  # type: ignore[attr-defined]


def _wait() -> None:
    """Take as long as a flush does while the switch is there, and say so in it."""
    if _switch is None:
        return
    try:
        record = os.open(_switch, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    seconds = random.uniform(FASTEST, SLOWEST)  # noqa: S311 - any of them will do
    os.write(record, f"{seconds * 1000:.0f}\n".encode())
    os.close(record)
    time.sleep(seconds)


class _SlowConnection(sqlite3.Connection):
    """Waits after each transaction that changed a row, and before each checkpoint."""

    _changes = 0

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in sql:
            _wait()
        cursor = super().execute(sql, *parameters)
        self._after_a_commit()
        return cursor

    def executemany(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        cursor = super().executemany(sql, *parameters)
        self._after_a_commit()
        return cursor

    def commit(self) -> None:
        super().commit()
        self._after_a_commit()

    def rollback(self) -> None:
        super().rollback()
        self._changes = self.total_changes

    def _after_a_commit(self) -> None:
        if not self.in_transaction and self.total_changes != self._changes:
            self._changes = self.total_changes
            _wait()
