"""A batcher's own count of what it generated, kept until the books have confirmed it.

One row for each generation, brought forward at every step before its tokens leave: so whatever a session
received is counted here, even when the batcher is killed in mid-reply. SQLite WAL `NORMAL`: it survives any
kill.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from attrs import frozen

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counts (
    key TEXT PRIMARY KEY, request_id TEXT NOT NULL, choice INTEGER NOT NULL, account TEXT NOT NULL,
    model TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, first INTEGER NOT NULL, until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


class OutboxError(Exception):
    """The outbox cannot be opened or written; the text says which file and what to do."""


@frozen
class Count:
    """Positions [start, end) of one choice, generated in one go. `key` names the event for good."""

    key: str
    request_id: str
    choice: int
    account: str
    model: str
    prompt_tokens: int
    start: int
    end: int


class WitnessOutbox:
    """One batcher's outbox. Every method is a whole transaction and waits for no flush."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise OutboxError(
                f"{self.path}: cannot open the outbox ({error}); is the directory writable?"
            ) from error

    def write(self, counts: Iterable[Count]) -> None:
        """Bring counts forward: the newest with a key replaces the one before. Raises `OutboxError`."""
        rows: list[tuple[object, ...]] = [
            (c.key, c.request_id, c.choice, c.account, c.model, c.prompt_tokens, c.start, c.end)
            for c in counts
        ]
        self._execute("INSERT OR REPLACE INTO counts VALUES (?,?,?,?,?,?,?,?)", rows)

    def confirm(self, counts: Iterable[Count]) -> None:
        """Forget counts that the books have; one that has grown since stays. Raises `OutboxError`."""
        self._execute("DELETE FROM counts WHERE key=? AND until=?", [(c.key, c.end) for c in counts])

    def pending(self) -> list[Count]:
        """Return every count that is not confirmed, in the order of their keys."""
        return [Count(*row) for row in self._db.execute("SELECT * FROM counts ORDER BY key")]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _execute(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        if not rows:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise OutboxError(f"{self.path}: cannot write ({error}); is the disk full?") from error
