"""The limiter's memory on disk: open reservations, closed requests, buckets and budgets.

SQLite with `synchronous=NORMAL`: it survives any kill; power loss may cost the last moments, which the
limiter makes good by asking the sessions what they still run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from attrs import frozen

from store.limits import MINUTE, Bucket, Budget, Gauge, Limits, Meter, Reservation
from store.sqlite import open_engine

_METADATA = sa.MetaData()
_OPEN = sa.Table(
    "open_reservations",
    _METADATA,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("scope", sa.String, nullable=False),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)
_CLOSED = sa.Table(
    "closed_requests",
    _METADATA,
    sa.Column("request_id", sa.String, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
)
_BUCKETS = sa.Table(
    "buckets",
    _METADATA,
    sa.Column("scope", sa.String, primary_key=True),
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("requests_per_minute", sa.BigInteger),
    sa.Column("tokens_per_minute", sa.BigInteger),
    sa.Column("concurrency", sa.BigInteger),
    sa.Column("budget_tokens", sa.BigInteger),
    sa.Column("requests", sa.BigInteger),
    sa.Column("tokens", sa.BigInteger),
    sa.Column("at", sa.BigInteger, nullable=False),
)
_BUDGETS = sa.Table(
    "budgets",
    _METADATA,
    sa.Column("scope", sa.String, primary_key=True),
    sa.Column("spent", sa.BigInteger, nullable=False),
)


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
    """The limiter's database. `write` is one transaction; any thread may call, one at a time."""

    def __init__(self, database: str | Path) -> None:
        """Open or make it."""
        self._engine = open_engine(database, synchronous="NORMAL")
        _METADATA.create_all(self._engine)

    def close(self) -> None:
        """Give back the file's descriptors."""
        self._engine.dispose()

    def write(self, changes: Sequence[Change]) -> None:
        """Keep changes, in order of kind: of several levels of one bucket the last one counts."""
        opened = [c.reservation for c in changes if isinstance(c, Opened)]
        closed = {c.request_id: c.at for c in changes if isinstance(c, Closed)}
        levels = {(c.scope, c.model): c for c in changes if isinstance(c, Level)}
        spent = {c.scope: c.tokens for c in changes if isinstance(c, Spent)}
        forgotten = [r for c in changes if isinstance(c, Forgotten) for r in c.request_ids]
        with self._engine.begin() as connection:
            _insert(connection, _OPEN, [_open_row(r) for r in opened])
            _delete(connection, _OPEN, closed)
            _delete(connection, _CLOSED, closed)
            _insert(connection, _CLOSED, [{"request_id": r, "at": at} for r, at in closed.items()])
            _delete(connection, _CLOSED, forgotten)
            _replace_levels(connection, levels.values())
            _replace_spent(connection, spent)

    def read(self, now: int, wall: int) -> Meter:
        """Return the meter as it was kept, for a clock that says `now` (ns) at Unix milliseconds `wall`.

        Buckets are refilled by the wall clock, for the monotonic one does not outlive a boot: by what
        passed since they were kept, at least nothing and at most a minute, which fills any bucket. So a
        step of the wall clock can give at most one full bucket, and only across a restart.
        """
        meter = Meter()
        with self._engine.begin() as connection:
            for row in connection.execute(sa.select(_BUCKETS)):
                passed = min(MINUTE, max(0, wall - row.at) * 1_000_000)
                meter.gauges[row.scope, row.model] = _gauge(row, now - passed)
            for row in connection.execute(sa.select(_BUDGETS)):
                meter.budgets[row.scope] = Budget(spent=row.spent)
            for row in connection.execute(sa.select(_CLOSED).order_by(_CLOSED.c.at)):
                meter.closed[row.request_id] = now - max(0, wall - row.at) * 1_000_000
            for row in connection.execute(sa.select(_OPEN)):
                held = Reservation(row.request_id, row.owner, row.scope, row.model, row.tokens, now)
                gauge = meter.gauges.get((row.scope, row.model)) or Gauge.fresh(Limits(), now)
                meter.gauges[row.scope, row.model] = gauge
                meter.hold(held, gauge)
        return meter


def _open_row(reservation: Reservation) -> dict[str, Any]:
    return {
        "request_id": reservation.request_id,
        "owner": reservation.owner,
        "scope": reservation.scope,
        "model": reservation.model,
        "tokens": reservation.tokens,
    }


def _insert(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)


def _delete(connection: sa.Connection, table: sa.Table, request_ids: Iterable[str]) -> None:
    rows = [{"id_": request_id} for request_id in request_ids]
    if rows:
        connection.execute(sa.delete(table).where(table.c.request_id == sa.bindparam("id_")), rows)


def _replace_levels(connection: sa.Connection, levels: Iterable[Level]) -> None:
    for level in levels:
        same = (_BUCKETS.c.scope == level.scope) & (_BUCKETS.c.model == level.model)
        connection.execute(sa.delete(_BUCKETS).where(same))
        row = {
            "scope": level.scope,
            "model": level.model,
            "requests_per_minute": level.limits.requests_per_minute,
            "tokens_per_minute": level.limits.tokens_per_minute,
            "concurrency": level.limits.concurrency,
            "budget_tokens": level.limits.budget_tokens,
            "requests": level.requests,
            "tokens": level.tokens,
            "at": level.at,
        }
        connection.execute(sa.insert(_BUCKETS), row)


def _replace_spent(connection: sa.Connection, spent: dict[str, int]) -> None:
    for scope, tokens in spent.items():
        connection.execute(sa.delete(_BUDGETS).where(_BUDGETS.c.scope == scope))
        connection.execute(sa.insert(_BUDGETS), {"scope": scope, "spent": tokens})


def _gauge(row: sa.Row[Any], at: int) -> Gauge:
    limits = Limits(row.requests_per_minute, row.tokens_per_minute, row.concurrency, row.budget_tokens)

    def bucket(limit: int | None, level: int | None) -> Bucket | None:
        return None if limit is None or level is None else Bucket(limit, level * MINUTE, at)

    return Gauge(
        limits,
        bucket(row.requests_per_minute, row.requests),
        bucket(row.tokens_per_minute, row.tokens),
    )
