"""Checking the books: against themselves, and against what the engine says it generated.

The session's settlement is the authority, the engine's count the second witness. What the engine generated
after the last position a client was charged for is no drift (a stop string, a cancelled turn); what was
charged and never generated, or generated and skipped, or generated for a request that was neither charged
nor waived, is. Waived is a request that failed before its first token was let out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from attrs import define, field, frozen

from store.books import Books
from store.books_posting import REVENUE
from store.books_schema import BALANCES, CONFLICTS, ENTRIES, PRICES, REQUESTS, SPANS, WAIVED, WITNESS
from store.books_spans import Positions
from store.prices import Price, Use, cost

_REQUESTS_A_ROUND = 500


@frozen
class Drift:
    """Something that does not agree.

    `kind` is for programs, `what` for people; `about` is a request or an account.
    """

    kind: str
    about: str
    what: str


@define
class Report:
    """What was looked at, and every disagreement found."""

    requests: int = 0
    micros: int = 0
    charged_tokens: int = 0
    witnessed_tokens: int = 0
    undelivered_tokens: int = 0
    """Generated past the last position charged: the engine's loss, not the client's."""
    drifts: list[Drift] = field(factory=list)


@define
class _Account:
    """One request from both sides."""

    request: Any = None
    waived: Any = None
    charged: defaultdict[int, Positions] = field(factory=lambda: defaultdict(Positions))
    overlaps: bool = False
    posted: int = 0
    witnessed: defaultdict[int, Positions] = field(factory=lambda: defaultdict(Positions))
    witness: list[Any] = field(factory=list)


def reconcile(books: Books, *, settled_before: int) -> Report:
    """Compare everything.

    Requests with news after `settled_before` (Unix ms) are not yet held against the witness.
    """
    report = Report()
    with books.engine.connect() as connection:
        prices = _prices(connection)
        for request_id, both in _requests(connection):
            report.requests += 1
            report.drifts += _check_entries(request_id, both, prices)
            _count(report, both)
            if _newest(both) < settled_before:
                report.drifts += _compare(request_id, both)
        report.drifts += _check_balances(connection)
        for row in connection.execute(sa.select(CONFLICTS).order_by(CONFLICTS.c.id)):
            report.drifts.append(Drift("conflict", row.request_id, row.what))
    return report


def _prices(connection: sa.Connection) -> dict[tuple[str, int], Price]:
    return {
        (p.model, p.version): Price(p.model, p.prompt, p.cached, p.completion, p.fast_answer, p.version)
        for p in connection.execute(sa.select(PRICES))
    }


def _requests(connection: sa.Connection) -> Iterator[tuple[str, _Account]]:
    last = ""
    while True:
        ids = _next_ids(connection, last)
        if not ids:
            return
        found = {request_id: _Account() for request_id in ids}
        for row in _of(connection, REQUESTS, ids):
            found[row.request_id].request = row
        for row in _of(connection, WAIVED, ids):
            found[row.request_id].waived = row
        for row in _of(connection, SPANS, ids):
            both, length = found[row.request_id], row.end - row.start
            new = both.charged[row.choice].add(row.start, row.end)
            both.overlaps |= sum(b - a for a, b in new) != length
        for row in _of(connection, ENTRIES, ids):
            found[row.request_id].posted += row.micros if row.account != REVENUE else 0
        for row in _of(connection, WITNESS, ids):
            found[row.request_id].witness.append(row)
            found[row.request_id].witnessed[row.choice].add(row.start, row.end)
        yield from found.items()
        last = ids[-1]


def _next_ids(connection: sa.Connection, last: str) -> list[str]:
    ids = sa.union(sa.select(REQUESTS.c.request_id), sa.select(WITNESS.c.request_id)).subquery()
    query = sa.select(ids.c.request_id).where(ids.c.request_id > last).order_by(ids.c.request_id)
    return list(connection.execute(query.limit(_REQUESTS_A_ROUND)).scalars())


def _of(connection: sa.Connection, table: sa.Table, ids: list[str]) -> Iterator[Any]:
    yield from connection.execute(sa.select(table).where(table.c.request_id.in_(ids)))


def _newest(both: _Account) -> int:
    times: list[int] = [row.at for row in both.witness]
    return max([*times, both.request.at] if both.request else times)


def _count(report: Report, both: _Account) -> None:
    report.charged_tokens += sum(map(len, both.charged.values()))
    report.witnessed_tokens += sum(map(len, both.witnessed.values()))
    report.micros += both.posted
    for choice, positions in both.witnessed.items():
        past = positions.minus(Positions.of([(0, both.charged[choice].end)]))
        report.undelivered_tokens += len(past)


def _check_entries(request_id: str, both: _Account, prices: dict[tuple[str, int], Price]) -> Iterator[Drift]:
    row = both.request
    if row is None:
        return
    if both.overlaps:
        yield Drift("overlap", request_id, "positions were charged twice")
    tokens = sum(map(len, both.charged.values()))
    price = prices.get((row.price_model, row.price_version), Price(row.price_model))
    due = cost(price, Use(row.prompt_tokens, row.cached_tokens, tokens, bool(row.fast_answer)))
    if due != both.posted or row.micros != both.posted or row.completion_tokens != tokens:
        yield Drift("price", request_id, f"{tokens} tokens cost {due}, {both.posted} are entered")


def _compare(request_id: str, both: _Account) -> Iterator[Drift]:
    if both.waived is not None:
        yield from _check_waiver(request_id, both)
        return
    if both.request is None:
        tokens = sum(map(len, both.witnessed.values()))
        yield Drift("uncharged", request_id, f"{tokens} tokens were generated and never charged")
        return
    if both.request.fast_answer:
        return
    for choice in sorted({*both.charged, *both.witnessed}):
        yield from _compare_choice(request_id, choice, both.charged[choice], both.witnessed[choice])
    yield from _compare_facts(request_id, both)


def _check_waiver(request_id: str, both: _Account) -> Iterator[Drift]:
    if both.request is not None:
        yield Drift("waived", request_id, f"charged {both.posted}, and waived")
    theirs = {row.account for row in both.witness} - {both.waived.account}
    if theirs:
        yield Drift(
            "account", request_id, f"waived for {both.waived.account!r}, generated for {sorted(theirs)}"
        )


def _compare_choice(
    request_id: str, choice: int, charged: Positions, witnessed: Positions
) -> Iterator[Drift]:
    unseen = charged.minus(witnessed).intervals
    if unseen:
        yield Drift("unwitnessed", request_id, f"choice {choice}: charged, not generated: {unseen}")
    skipped = witnessed.minus(charged).minus(Positions.of([(charged.end, witnessed.end)])).intervals
    if skipped:
        yield Drift("skipped", request_id, f"choice {choice}: generated, not charged: {skipped}")


def _compare_facts(request_id: str, both: _Account) -> Iterator[Drift]:
    for name in ("account", "model", "prompt_tokens"):
        mine = getattr(both.request, name)
        theirs = {getattr(row, name) for row in both.witness} - {mine}
        if theirs:
            yield Drift(name, request_id, f"charged {mine!r}, generated for {sorted(theirs)}")


def _check_balances(connection: sa.Connection) -> Iterator[Drift]:
    sums = sa.select(ENTRIES.c.account, sa.func.sum(ENTRIES.c.micros)).group_by(ENTRIES.c.account)
    entered = {account: int(total) for account, total in connection.execute(sums)}
    kept = {row.account: row.micros for row in connection.execute(sa.select(BALANCES))}
    if sum(entered.values()):
        yield Drift("double entry", REVENUE, f"all entries sum to {sum(entered.values())}, not to 0")
    for account in sorted({*entered, *kept}):
        if entered.get(account, 0) != kept.get(account, 0):
            yield Drift(
                "balance", account, f"entries {entered.get(account, 0)}, balance {kept.get(account, 0)}"
            )
