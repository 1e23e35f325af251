"""The books: what each account owes, entered once and to the micro-unit.

A delivery says which positions of which choices a request received. The books charge the union of positions
per request and choice, and its prompt once, so a delivery that is repeated, overlaps another or comes out
of order adds nothing twice. Each posting is two entries that sum to zero: the account owes, `REVENUE` is
owed.

The first delivery of a request fixes its account, model, prompt and price version. A later one that
contradicts it is not entered where it contradicts; the contradiction is noted, and reconciling reports it.

One process writes. `enter` is one transaction for as many deliveries as wait: that makes durable entries
fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from attrs import frozen

from store.books_posting import Batch, Delivery, Request
from store.books_schema import (
    BALANCES,
    CONFLICTS,
    ENTRIES,
    METADATA,
    PRICES,
    REQUESTS,
    SPANS,
    WAIVED,
    WITNESS,
)
from store.prices import ANY_MODEL, Price
from store.sqlite import open_engine, reader

_IDS_A_QUERY = 500
"""Ids in one IN list: under every database's limit on parameters."""


@frozen
class Witnessed:
    """What the engine counted, independently.

    It generated [start, end) of a choice. `key` names the event.
    """

    key: str
    request_id: str
    choice: int
    account: str
    model: str
    prompt_tokens: int
    start: int
    end: int


@frozen
class Waiver:
    """A request that failed before anything was let out: nothing is owed for it."""

    request_id: str
    account: str


@frozen
class Entry:
    """One half of a posting. `at` is Unix milliseconds."""

    id: int
    request_id: str
    posting: int
    account: str
    micros: int
    at: int


@frozen
class Balance:
    """What an account owes, and for how much use."""

    account: str
    micros: int
    requests: int
    prompt_tokens: int
    completion_tokens: int


class Books:
    """The books' database. Any thread may call any method; each is one transaction.

    Times are Unix milliseconds.

    An error of the disk comes out as SQLAlchemy's; what was being written is not in the books, and the
    process must end and be started again: after a failed fsync nothing that this process reads can be
    trusted.
    """

    def __init__(self, database: str | Path) -> None:
        """Open or make the books, by path or URL."""
        self._engine = open_engine(database, synchronous="FULL")
        self._reader = reader(self._engine)
        METADATA.create_all(self._engine)
        self._prices: dict[tuple[str, int], Price] = {}
        self._newest: dict[str, Price] = {}
        self._read_prices()

    @property
    def engine(self) -> sa.Engine:
        """For reading: `store.books_reconcile` goes through every table."""
        return self._reader

    def close(self) -> None:
        """Give back the file's descriptors."""
        self._engine.dispose()

    def publish(self, prices: Sequence[Price], at: int) -> None:
        """Make these the prices of requests that begin from now on.

        A model whose figures changed gets a new version.
        """
        with self._engine.begin() as connection:
            for price in prices:
                newest = self._newest.get(price.model)
                version = newest.version if newest else 0
                if newest is None or _figures(newest) != _figures(price):
                    row = {"model": price.model, "version": version + 1, "at": at, **_figures(price)}
                    connection.execute(sa.insert(PRICES), row)
        self._read_prices()

    def price_of(self, model: str) -> Price:
        """Return the newest price of a model: its own, or that of `ANY_MODEL`, or nothing at version 0."""
        return self._newest.get(model) or self._newest.get(ANY_MODEL) or Price(ANY_MODEL)

    def enter(self, deliveries: Sequence[Delivery], at: int) -> list[int]:
        """Enter deliveries in one durable transaction; returns what each added, in micro-units."""
        with self._engine.begin() as connection:
            requests = self._requests(connection, {d.request_id for d in deliveries})
            batch = Batch(at)
            added = []
            for delivery in deliveries:
                request = requests.get(delivery.request_id) or self._begin(delivery, at)
                requests[delivery.request_id] = request
                added.append(batch.enter(request, delivery))
            _write(connection, batch, requests.values())
        return added

    def witness(self, events: Sequence[Witnessed], at: int) -> int:
        """Keep the engine's count; returns how many events were new. An event seen before adds nothing."""
        by_key = {event.key: event for event in events}
        with self._engine.begin() as connection:
            for keys in _pieces(by_key):
                for row in connection.execute(sa.select(WITNESS.c.key).where(WITNESS.c.key.in_(keys))):
                    del by_key[row.key]
            if by_key:
                connection.execute(sa.insert(WITNESS), [_witness_row(e, at) for e in by_key.values()])
        return len(by_key)

    def waive(self, waivers: Sequence[Waiver], at: int) -> None:
        """Keep that nothing is owed for these requests. A waiver that is known adds nothing."""
        new = {waiver.request_id: waiver for waiver in waivers}
        with self._engine.begin() as connection:
            for ids in _pieces(new):
                known = sa.select(WAIVED.c.request_id).where(WAIVED.c.request_id.in_(ids))
                for request_id in connection.execute(known).scalars():
                    del new[request_id]
            if new:
                rows = [{"request_id": w.request_id, "account": w.account, "at": at} for w in new.values()]
                connection.execute(sa.insert(WAIVED), rows)

    def note_conflict(self, request_id: str, what: str, at: int) -> None:
        """Keep a delivery that could not be entered in sight of reconciling."""
        batch = Batch(at)
        batch.note(request_id, what)
        with self._engine.begin() as connection:
            _write(connection, batch, ())

    def balances(self, account: str | None = None) -> list[Balance]:
        """Return what each account, or one, owes and used."""
        sums = [
            sa.func.coalesce(sa.func.sum(REQUESTS.c[name]), 0)
            for name in ("prompt_tokens", "completion_tokens")
        ]
        query = (
            sa.select(BALANCES.c.account, BALANCES.c.micros, sa.func.count(REQUESTS.c.request_id), *sums)
            .select_from(BALANCES.outerjoin(REQUESTS, REQUESTS.c.account == BALANCES.c.account))
            .group_by(BALANCES.c.account, BALANCES.c.micros)
            .order_by(BALANCES.c.account)
        )
        if account is not None:
            query = query.where(BALANCES.c.account == account)
        with self._reader.connect() as connection:
            return [Balance(a, int(m), int(n), int(p), int(c)) for a, m, n, p, c in connection.execute(query)]

    def entries(self, *, account: str | None = None, after: int = 0, limit: int = 1000) -> list[Entry]:
        """Return up to `limit` entries with an id above `after`, in the order they were made."""
        query = sa.select(ENTRIES).where(ENTRIES.c.id > after).order_by(ENTRIES.c.id).limit(limit)
        return self._entries(query, account, None)

    def newest_entries(
        self, limit: int, *, account: str | None = None, request_id: str | None = None
    ) -> list[Entry]:
        """Return the last `limit` entries, of one account or request, in the order they were made."""
        query = sa.select(ENTRIES).order_by(ENTRIES.c.id.desc()).limit(limit)
        return self._entries(query, account, request_id)[::-1]

    def _entries(self, query: sa.Select[Any], account: str | None, request_id: str | None) -> list[Entry]:
        if account is not None:
            query = query.where(ENTRIES.c.account == account)
        if request_id is not None:
            query = query.where(ENTRIES.c.request_id == request_id)
        with self._reader.connect() as connection:
            return [Entry(**row) for row in connection.execute(query).mappings()]

    def _begin(self, delivery: Delivery, at: int) -> Request:
        price = self.price_of(delivery.model)
        row = {
            "request_id": delivery.request_id,
            "account": delivery.account,
            "key_id": delivery.key_id,
            "model": delivery.model,
            "price_model": price.model,
            "price_version": price.version,
            "prompt_tokens": delivery.prompt_tokens,
            "cached_tokens": delivery.cached_tokens,
            "completion_tokens": 0,
            "fast_answer": delivery.fast_answer,
            "micros": 0,
            "postings": 0,
            "at": at,
        }
        return Request(row, price, is_new=True)

    def _requests(self, connection: sa.Connection, ids: Iterable[str]) -> dict[str, Request]:
        found: dict[str, Request] = {}
        for piece in _pieces(ids):
            rows = connection.execute(sa.select(REQUESTS).where(REQUESTS.c.request_id.in_(piece)))
            for known in rows.mappings():
                price = self._prices.get((known["price_model"], known["price_version"])) or Price(ANY_MODEL)
                found[known["request_id"]] = Request(dict(known), price, is_new=False)
        for piece in _pieces(found):
            for row in connection.execute(sa.select(SPANS).where(SPANS.c.request_id.in_(piece))):
                found[row.request_id].positions[row.choice].add(row.start, row.end)
        return found

    def _read_prices(self) -> None:
        with self._reader.connect() as connection:
            rows = connection.execute(sa.select(PRICES).order_by(PRICES.c.version)).all()
        for row in rows:
            figures = {name: getattr(row, name) for name in ("prompt", "cached", "completion", "fast_answer")}
            price = Price(row.model, **figures, version=row.version)
            self._prices[row.model, row.version] = self._newest[row.model] = price


def _figures(price: Price) -> dict[str, int]:
    return {
        "prompt": price.prompt,
        "cached": price.cached,
        "completion": price.completion,
        "fast_answer": price.fast_answer,
    }


def _pieces(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(ids)
    for start in range(0, len(every), _IDS_A_QUERY):
        yield every[start : start + _IDS_A_QUERY]


def _witness_row(event: Witnessed, at: int) -> dict[str, Any]:
    return {
        "key": event.key,
        "request_id": event.request_id,
        "choice": event.choice,
        "account": event.account,
        "model": event.model,
        "prompt_tokens": event.prompt_tokens,
        "start": event.start,
        "end": event.end,
        "at": at,
    }


def _write(connection: sa.Connection, batch: Batch, requests: Iterable[Request]) -> None:
    new = [r.row for r in requests if r.is_new]
    changed = [r.row for r in requests if not r.is_new]
    for table, rows in ((REQUESTS, new), (SPANS, batch.spans), (ENTRIES, batch.entries)):
        if rows:
            connection.execute(sa.insert(table), rows)
    if changed:
        connection.execute(_UPDATE_REQUEST, [{"id_": r["request_id"], **_sums(r)} for r in changed])
    _write_balances(connection, batch.owed)
    _write_conflicts(connection, batch.conflicts)


_UPDATE_REQUEST = (
    sa.update(REQUESTS)
    .where(REQUESTS.c.request_id == sa.bindparam("id_"))
    .values(
        completion_tokens=sa.bindparam("completion_"),
        micros=sa.bindparam("micros_"),
        postings=sa.bindparam("postings_"),
    )
)


def _sums(row: dict[str, Any]) -> dict[str, int]:
    return {
        "completion_": row["completion_tokens"],
        "micros_": row["micros"],
        "postings_": row["postings"],
    }


def _write_balances(connection: sa.Connection, owed: dict[str, int]) -> None:
    known: set[str] = set()
    for piece in _pieces(owed):
        found = connection.execute(sa.select(BALANCES.c.account).where(BALANCES.c.account.in_(piece)))
        known |= set(found.scalars())
    new = [{"account": a, "micros": m} for a, m in owed.items() if a not in known]
    old = [{"account_": a, "added_": m} for a, m in owed.items() if a in known and m]
    if new:
        connection.execute(sa.insert(BALANCES), new)
    if old:
        update = sa.update(BALANCES).where(BALANCES.c.account == sa.bindparam("account_"))
        connection.execute(update.values(micros=BALANCES.c.micros + sa.bindparam("added_")), old)


def _write_conflicts(connection: sa.Connection, conflicts: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (request_id, what), row in conflicts.items():
        same = (CONFLICTS.c.request_id == request_id) & (CONFLICTS.c.what == what)
        if connection.execute(sa.select(CONFLICTS.c.id).where(same)).first() is None:
            connection.execute(sa.insert(CONFLICTS), row)
