"""The turn journal: what a session host must not forget, one SQLite file per host.

A turn leaves here, in this order: its opening, each chunk of tokens, each event with the newest verdict, its
close, and the two acknowledgements that follow (settled, charged).

What happens many times a second goes to a log, one row a transaction whatever the number of turns in it, and
is kept in memory while its turn is open; at the close a turn's log becomes one row of its own, and log rows
older than every open turn are deleted. So a step of the engine costs one append, not a page for each stream.

A commit survives the death of any process, and costs no flush (`store.wal`); power loss may cost the last
steps, never the file's consistency. The host calls `checkpoint` in a thread.

The journal is SQLite by nature, private to one process and on the path of every token, so it speaks to
`sqlite3` directly.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from attrs import define, evolve, field

from store import wal
from store.journal_records import (
    Acknowledged,
    Close,
    Event,
    History,
    Opening,
    Record,
    Step,
    Turn,
    Verdict,
    from_plain,
    pack_tokens,
    to_plain,
    unpack_tokens,
)
from store.journal_salvage import ANYBODYS, UNREADABLE, salvage_steps

SCHEMA_VERSION: Final = 1
TRIM_ROWS: Final = 512
"""Log rows deleted with one close at most, so that no commit is long."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    owner TEXT NOT NULL,
    request_id TEXT NOT NULL PRIMARY KEY,
    created REAL NOT NULL,
    model TEXT NOT NULL,
    batcher TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    body_digest TEXT NOT NULL,
    opening BLOB NOT NULL,
    prompt BLOB NOT NULL,
    verdict BLOB NOT NULL,
    headers BLOB NOT NULL,
    answer BLOB NOT NULL,
    first_row INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'in_progress',
    finished REAL,
    error BLOB NOT NULL DEFAULT x'',
    steps BLOB NOT NULL DEFAULT x'',
    settled INTEGER NOT NULL DEFAULT 0,
    charged INTEGER NOT NULL DEFAULT 0,
    key_id TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS turns_by_key ON turns (owner, idempotency_key) WHERE idempotency_key <> '';
CREATE INDEX IF NOT EXISTS turns_by_body ON turns (owner, body_digest) WHERE body_digest <> '';
CREATE INDEX IF NOT EXISTS turns_owing ON turns (created)
    WHERE finished IS NULL OR settled = 0 OR charged = 0;
CREATE INDEX IF NOT EXISTS turns_finished ON turns (finished) WHERE finished IS NOT NULL;
CREATE TABLE IF NOT EXISTS log (id INTEGER PRIMARY KEY AUTOINCREMENT, steps BLOB NOT NULL) STRICT;
"""
_COLUMNS = (
    "owner, request_id, created, model, batcher, idempotency_key, body_digest, opening, prompt, verdict,"
    " headers, answer, key_id, status, finished, error, settled, charged"
)
_PROMPT, _OPENING_COLUMNS = 8, 13
"""Of `_COLUMNS`: where the prompt is, and how many belong to the opening."""


class JournalError(Exception):
    """The journal could not be opened or written; the text says which file and what to do."""


@define
class _OpenTurn:
    """What the log holds of a turn that has not ended."""

    owner: str
    first_row: int
    steps: list[Step] = field(factory=list)
    events: list[Event] = field(factory=list)
    """Those of `steps`; sequence n is at n - 1."""
    verdicts: dict[int, Verdict] = field(factory=dict)
    is_damaged: bool = False
    """Rows of its log cannot be read."""

    def add(self, step: Step) -> None:
        if isinstance(step, Verdict):
            self.verdicts[step.choice] = step
            return
        self.steps.append(step)
        if isinstance(step, Event):
            self.events.append(step)

    def all(self) -> list[Step]:
        """Every chunk and event, and the newest verdicts: older ones say nothing any more."""
        return [*self.steps, *self.verdicts.values()]


class Journal:
    """One session host's journal. Each method is a whole unit of work; only `checkpoint` waits for a flush.

    Reads of single turns take the owner first and see only that owner's; `unfinished` is the host's own view.
    They raise an error of `store.journal_salvage.UNREADABLE` for a row that does not decode.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, _OpenTurn] = {}
        self._written = 0
        self._next_row = 1
        """Id of the log row to come."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = wal.connect(self.path)
            self._check_version()
            self._db.executescript(_SCHEMA)
            self._add_key_id()
            self._recall()
        except (OSError, sqlite3.Error) as error:
            raise JournalError(
                f"{self.path}: cannot open the turn journal ({error}); the directory must be writable and"
                " the file whole"
            ) from error

    def _check_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise JournalError(
                f"{self.path}: journal version {version}, this program reads {SCHEMA_VERSION};"
                " start the version that wrote it, or move the file away"
            )
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _add_key_id(self) -> None:
        """Give a file of before the column; the program that made it can still use it."""
        if "key_id" not in {row[1] for row in self._db.execute("PRAGMA table_info(turns)")}:
            self._db.execute("ALTER TABLE turns ADD COLUMN key_id TEXT NOT NULL DEFAULT ''")

    def _recall(self) -> None:
        """Read the log of every open turn back into memory. A turn with steps that cannot be read is damaged."""
        last = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name='log'").fetchone()
        self._next_row = last[0] + 1 if last else 1
        rows = self._db.execute("SELECT owner, request_id, first_row FROM turns WHERE finished IS NULL")
        self._open = {request_id: _OpenTurn(owner, first) for owner, request_id, first in rows}
        for row_id, data in self._db.execute(
            "SELECT id, steps FROM log WHERE id >= ? ORDER BY id", (self._oldest(),)
        ):
            steps, damaged = salvage_steps(data)
            for step in steps:
                if step.request_id in self._open:
                    self._open[step.request_id].add(step)
            for request_id, turn in self._open.items():
                if request_id in damaged or (ANYBODYS in damaged and turn.first_row <= row_id):
                    turn.is_damaged = True

    def _oldest(self) -> int:
        """First log row that an open turn needs, or the one to come."""
        if self._open:
            return min(turn.first_row for turn in self._open.values())
        return self._next_row

    def close(self) -> None:
        """Close the file. Nothing is lost: the log is read back at the next opening."""
        self._db.close()

    # ------------------------------------------------------------------ writing

    def write(self, records: Iterable[Record]) -> None:
        """Write the records, in order, in one transaction: all of them or none.

        Steps (`Chunk`, `Event`, `Verdict`) of a turn that is not open are dropped.
        Raises `JournalError` when the file cannot take them (a full disk); nothing is written then and the
        same call may be made again. Any other error of SQLite is a bug or a broken file, and ends the host.
        """
        batch = list(records)
        steps = [record for record in batch if isinstance(record, Step)]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for record in batch:
                if isinstance(record, Opening):
                    self._insert(record)
            if steps:
                self._append(_encode(steps))
            next_row = self._next_row + bool(steps)
            for record in batch:
                if isinstance(record, Close):
                    self._end(record, steps, next_row)
                elif isinstance(record, Acknowledged):
                    self._acknowledge(record)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise JournalError(f"{self.path}: cannot write ({error}); is the disk full?") from error
        self._remember(batch)
        self._next_row = next_row

    def _append(self, steps: bytes) -> None:
        self._db.execute("INSERT INTO log (id, steps) VALUES (?,?)", (self._next_row, steps))
        self._written += len(steps) + wal.PAGE

    def _insert(self, opening: Opening) -> None:
        self._db.execute(
            "INSERT INTO turns (owner, request_id, created, model, batcher, idempotency_key, body_digest,"
            " opening, prompt, verdict, headers, answer, key_id, first_row)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                opening.owner,
                opening.request_id,
                opening.created,
                opening.model,
                opening.batcher,
                opening.idempotency_key,
                opening.body_digest,
                opening.opening,
                pack_tokens(opening.prompt),
                opening.verdict,
                opening.headers,
                opening.answer,
                opening.key_id,
                self._next_row,
            ),
        )

    def _end(self, close: Close, fresh: Sequence[Step], next_row: int) -> None:
        """Gather the turn's log into its own row, and delete log rows that nobody needs any more."""
        known = self._open.get(close.request_id)
        whole = _OpenTurn("", 0)
        for step in (*(known.all() if known else ()), *fresh):
            if step.request_id == close.request_id:
                whole.add(step)
        self._db.execute(
            "UPDATE turns SET status=?, finished=?, error=?, steps=? WHERE request_id=? AND finished IS NULL",
            (close.status, close.finished, close.error, _encode(whole.all()), close.request_id),
        )
        needed = [t.first_row for request_id, t in self._open.items() if request_id != close.request_id]
        self._db.execute(
            "DELETE FROM log WHERE id < min(?, (SELECT min(id) FROM log) + ?)",
            (min(needed, default=next_row), TRIM_ROWS),
        )

    def _acknowledge(self, record: Acknowledged) -> None:
        self._db.execute(
            "UPDATE turns SET settled = settled | ?, charged = charged | ? WHERE request_id=?",
            (record.settled, record.charged, record.request_id),
        )

    def _remember(self, batch: Sequence[Record]) -> None:
        for record in batch:
            if isinstance(record, Opening):
                self._open[record.request_id] = _OpenTurn(record.owner, self._next_row)
        for record in batch:
            if isinstance(record, Step) and record.request_id in self._open:
                self._open[record.request_id].add(record)
        for record in batch:
            if isinstance(record, Close):
                self._open.pop(record.request_id, None)

    # ------------------------------------------------------------------ reading

    def unfinished(self) -> list[History]:
        """Return every turn that is open, or ended and not yet settled and charged, oldest first.

        Never raises for rows that do not decode: a turn that has some is marked as damaged.
        """
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM turns WHERE finished IS NULL OR settled = 0 OR charged = 0"  # noqa: S608
            " ORDER BY created, rowid"
        ).fetchall()
        return [self._salvaged(row) for row in rows]

    def history(self, owner: str, request_id: str) -> History | None:
        """Return all that is known of `owner`'s turn; None when there is none, or it is another's."""
        found = self.turn(owner, request_id)
        return self._history(found) if found else None

    def turn(self, owner: str, request_id: str) -> Turn | None:
        """Return `owner`'s turn; None when there is none, or it is another's."""
        return self._one("owner=? AND request_id=?", (owner, request_id))

    def taken(self, request_id: str) -> bool:
        """Whether any turn, of whatever owner, has this id: it must not be opened again."""
        return (
            self._db.execute("SELECT 1 FROM turns WHERE request_id=?", (request_id,)).fetchone() is not None
        )

    def by_idempotency_key(self, owner: str, key_id: str, key: str) -> Turn | None:
        """Return `owner`'s newest turn that this API key opened with this idempotency key.

        Or one of which its row does not say which API key opened it.
        """
        return self._one(
            "owner=? AND idempotency_key=? AND idempotency_key <> '' AND key_id IN (?, '')",
            (owner, key, key_id),
        )

    def by_body(self, owner: str, key_id: str, digest: str, since: float) -> Turn | None:
        """Return the newest such turn with this body that is open, or ended after `since` (Unix seconds)."""
        return self._one(
            "owner=? AND body_digest=? AND body_digest <> '' AND key_id IN (?, '')"
            " AND (finished IS NULL OR finished >= ?)",
            (owner, digest, key_id, since),
        )

    def events(self, owner: str, request_id: str, after: int) -> list[Event]:
        """Return the events of `owner`'s turn with a sequence above `after`, in order."""
        live = self._live(owner, request_id)
        if live is not None:
            return live.events[after:]
        return [s for s in self._ended(owner, request_id) if isinstance(s, Event) and s.sequence > after]

    def verdicts(self, owner: str, request_id: str) -> list[Verdict]:
        """Return the newest verdict of each choice of `owner`'s turn."""
        live = self._live(owner, request_id)
        ended = self._ended(owner, request_id) if live is None else ()
        newest = live.verdicts if live else {s.choice: s for s in ended if isinstance(s, Verdict)}
        return [newest[choice] for choice in sorted(newest)]

    def _live(self, owner: str, request_id: str) -> _OpenTurn | None:
        live = self._open.get(request_id)
        return live if live is not None and live.owner == owner else None

    def _ended(self, owner: str, request_id: str) -> Sequence[Step]:
        row = self._db.execute(
            "SELECT steps FROM turns WHERE owner=? AND request_id=?", (owner, request_id)
        ).fetchone()
        return _decode(row[0]) if row else ()

    def _one(self, where: str, values: tuple[object, ...]) -> Turn | None:
        row = self._db.execute(
            f"SELECT {_COLUMNS} FROM turns WHERE {where} ORDER BY created DESC, rowid DESC LIMIT 1",  # noqa: S608
            values,
        ).fetchone()
        return _turn(row) if row else None

    def _history(self, turn: Turn) -> History:
        owner, request_id = turn.opening.owner, turn.opening.request_id
        live = self._live(owner, request_id)
        return History.of(turn, live.all() if live else self._ended(owner, request_id))

    def _salvaged(self, row: tuple[Any, ...]) -> History:
        """Return what can be read of a turn, and whether that is all."""
        try:
            turn, is_damaged = _turn(row), False
        except UNREADABLE:
            turn, is_damaged = _turn((*row[:_PROMPT], b"", *row[_PROMPT + 1 :])), True
        live = self._open.get(turn.opening.request_id)
        try:
            history = self._history(turn)
        except UNREADABLE:
            return History(turn, is_damaged=True)
        return evolve(history, is_damaged=is_damaged or (live is not None and live.is_damaged))

    # ------------------------------------------------------------------ upkeep

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough was written since the last checkpoint for another to be worth its flush."""
        return self._written > wal.CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the file, and flush it. Takes milliseconds: call it in a thread.

        Commits go on meanwhile, on the journal's own connection.
        """
        self._written = 0
        try:
            wal.checkpoint(self.path)
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: cannot checkpoint ({error}); is the disk full?") from error

    def forget(self, before: float, limit: int = 100) -> int:
        """Delete at most `limit` turns that ended before `before` and owe nothing. Returns how many."""
        try:
            return self._db.execute(
                "DELETE FROM turns WHERE rowid IN (SELECT rowid FROM turns"
                " WHERE finished < ? AND settled = 1 AND charged = 1 LIMIT ?)",
                (before, limit),
            ).rowcount
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: cannot delete old turns ({error})") from error


def _encode(steps: Sequence[Step]) -> bytes:
    return msgspec.msgpack.encode([to_plain(step) for step in steps])


def _decode(data: bytes) -> list[Step]:
    return [from_plain(plain) for plain in msgspec.msgpack.decode(data)] if data else []


def _turn(row: tuple[Any, ...]) -> Turn:
    opening = list(row[:_OPENING_COLUMNS])
    opening[_PROMPT] = unpack_tokens(opening[_PROMPT])
    status, finished, error, settled, charged = row[_OPENING_COLUMNS:]
    return Turn(Opening(*opening), status, finished, error, bool(settled), bool(charged))
