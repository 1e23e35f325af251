"""The limiter's memory on disk: open reservations, closed requests, buckets and budgets.

It survives any kill; power loss may cost the last moments, which the limiter makes good by asking the
sessions what they still run. Like the turn journal it is one process's own file on the path of every turn,
so it speaks to `sqlite3` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from store import wal
from store.limits import MINUTE, Bucket, Budget, Gauge, Limits, Meter, Reservation

_SCHEMA = """
CREATE TABLE IF NOT EXISTS open_reservations (
    request_id VARCHAR NOT NULL PRIMARY KEY,
    owner VARCHAR NOT NULL,
    scope VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    tokens BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS closed_requests (request_id VARCHAR NOT NULL PRIMARY KEY, at BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS buckets (
    scope VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    requests_per_minute BIGINT,
    tokens_per_minute BIGINT,
    concurrency BIGINT,
    budget_tokens BIGINT,
    requests BIGINT,
    tokens BIGINT,
    at BIGINT NOT NULL,
    PRIMARY KEY (scope, model)
);
CREATE TABLE IF NOT EXISTS budgets (scope VARCHAR NOT NULL PRIMARY KEY, spent BIGINT NOT NULL);
"""
_OPEN = "INSERT INTO open_reservations (request_id, owner, scope, model, tokens) VALUES (?,?,?,?,?)"
_DELETE_OPEN = "DELETE FROM open_reservations WHERE request_id=?"
_CLOSE = "INSERT OR REPLACE INTO closed_requests (request_id, at) VALUES (?,?)"
_DELETE_CLOSED = "DELETE FROM closed_requests WHERE request_id=?"
_LEVEL = (
    "INSERT OR REPLACE INTO buckets (scope, model, requests_per_minute, tokens_per_minute, concurrency,"
    " budget_tokens, requests, tokens, at) VALUES (?,?,?,?,?,?,?,?,?)"
)
_SPENT = "INSERT OR REPLACE INTO budgets (scope, spent) VALUES (?,?)"


@frozen
class Opened:
    """A reservation was made."""

    reservation: Reservation


@frozen
class Closed:
    """A request was closed, whether or not it held anything. `at` is Unix milliseconds."""

    request_id: str
    at: int


@frozen
class Level:
    """What a bucket pair holds now, in whole tokens rounded down. `at` is Unix milliseconds."""

    scope: str
    model: str
    limits: Limits
    requests: int | None
    tokens: int | None
    at: int

    @classmethod
    def of(cls, scope: str, model: str, gauge: Gauge, at: int) -> Level:
        """Return a gauge's level as it is kept."""
        requests = None if gauge.requests is None else gauge.requests.level // MINUTE
        tokens = None if gauge.tokens is None else gauge.tokens.level // MINUTE
        return cls(scope, model, gauge.limits, requests, tokens, at)


@frozen
class Spent:
    """What a scope has used of its budget so far."""

    scope: str
    tokens: int


@frozen
class Forgotten:
    """Closed requests that need not be remembered any more."""

    request_ids: tuple[str, ...]


Change = Opened | Closed | Level | Spent | Forgotten


class LimitsState:
    """The limiter's file. Any thread may call, one at a time; only `checkpoint` waits for a flush."""

    def __init__(self, path: str | Path) -> None:
        """Open or make it (0600). Raises `OSError` or `sqlite3.Error`."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)
        self._db = wal.connect(self.path)
        self._db.executescript(_SCHEMA)
        self._written = 0

    def close(self) -> None:
        """Give back the file's descriptors."""
        self._db.close()

    def write(self, changes: Sequence[Change]) -> None:
        """Keep changes in one transaction: all of them or none.

        In order of kind; of several levels of one bucket the last one counts. Raises `sqlite3.Error`.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._write(changes)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _write(self, changes: Sequence[Change]) -> None:
        opened = [_open_row(c.reservation) for c in changes if isinstance(c, Opened)]
        closed = {c.request_id: c.at for c in changes if isinstance(c, Closed)}
        levels = {(c.scope, c.model): _level_row(c) for c in changes if isinstance(c, Level)}
        spent = {c.scope: c.tokens for c in changes if isinstance(c, Spent)}
        forgotten = [(r,) for c in changes if isinstance(c, Forgotten) for r in c.request_ids]
        self._each(_OPEN, opened)
        self._each(_DELETE_OPEN, [(request_id,) for request_id in closed])
        self._each(_CLOSE, list(closed.items()))
        self._each(_DELETE_CLOSED, forgotten)
        self._each(_LEVEL, list(levels.values()))
        self._each(_SPENT, list(spent.items()))

    def _each(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            self._db.executemany(statement, rows)
            self._written += wal.PAGE * (1 + len(rows))

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough was written since the last checkpoint for another to be worth its flush."""
        return self._written > wal.CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the file: in a thread. Raises `sqlite3.Error`."""
        self._written = 0
        wal.checkpoint(self.path)

    def read(self, now: int, wall: int) -> Meter:
        """Return the meter as it was kept, for a clock that says `now` (ns) at Unix milliseconds `wall`.

        Buckets are refilled by the wall clock, for the monotonic one does not outlive a boot: by what
        passed since they were kept, at least nothing and at most a minute, which fills any bucket. So a
        step of the wall clock can give at most one full bucket, and only across a restart.
        """
        meter = Meter()
        for scope, model, *limits, requests, tokens, at in self._db.execute(
            "SELECT scope, model, requests_per_minute, tokens_per_minute, concurrency, budget_tokens,"
            " requests, tokens, at FROM buckets"
        ):
            since = now - min(MINUTE, max(0, wall - at) * 1_000_000)
            meter.gauges[scope, model] = _gauge(Limits(*limits), requests, tokens, since)
        for scope, spent in self._db.execute("SELECT scope, spent FROM budgets"):
            meter.budgets[scope] = Budget(spent=spent)
        for request_id, at in self._db.execute("SELECT request_id, at FROM closed_requests ORDER BY at"):
            meter.closed[request_id] = now - max(0, wall - at) * 1_000_000
        for request_id, owner, scope, model, tokens in self._db.execute(
            "SELECT request_id, owner, scope, model, tokens FROM open_reservations"
        ):
            gauge = meter.gauges.get((scope, model)) or Gauge.fresh(Limits(), now)
            meter.gauges[scope, model] = gauge
            meter.hold(Reservation(request_id, owner, scope, model, tokens, now), gauge)
        return meter


def _open_row(held: Reservation) -> tuple[object, ...]:
    return (held.request_id, held.owner, held.scope, held.model, held.tokens)


def _level_row(level: Level) -> tuple[object, ...]:
    limits = level.limits
    return (
        level.scope,
        level.model,
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.concurrency,
        limits.budget_tokens,
        level.requests,
        level.tokens,
        level.at,
    )


def _gauge(limits: Limits, requests: int | None, tokens: int | None, at: int) -> Gauge:
    def bucket(limit: int | None, level: int | None) -> Bucket | None:
        return None if limit is None or level is None else Bucket(limit, level * MINUTE, at)

    return Gauge(
        limits, bucket(limits.requests_per_minute, requests), bucket(limits.tokens_per_minute, tokens)
    )
